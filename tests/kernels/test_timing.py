"""Statistics, the order of samples, and the record that refuses to be incomplete."""

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.timing import Measurement, MeasurementError, alternating, geomean, quantile

COMPLETE = {
    "kernel": "fa3",
    "scope": "run",
    "timer": "cuda-events",
    "statistic": "median",
    "flush": "dirty",
    "samples_us": (10.0, 12.0, 11.0),
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
}


def test_a_complete_record_is_built_and_written():
    measurement = Measurement(**COMPLETE)
    assert measurement.median_us == 11.0
    assert measurement.p10_us == pytest.approx(10.2) and measurement.p90_us == pytest.approx(11.8)
    assert measurement.spread == pytest.approx(1.6 / 11)
    assert json.loads(json.dumps(measurement.to_json())) == COMPLETE | {"samples_us": [10.0, 12.0, 11.0]}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scope", "", "scope is '', must be one of run, step, call"),
        ("scope", "kernel", "scope is 'kernel', must be one of run, step, call"),
        ("timer", None, "timer is None, must be one of cuda-events, cupti, wall"),
        ("statistic", "mean", "statistic is 'mean', must be one of median"),
        ("flush", "cold", "flush is 'cold', must be one of dirty, clean, hot, none"),
        ("kernel", "", "kernel is '', must be a non-empty string"),
        ("device", None, "device is None, must be a non-empty string"),
        ("versions", {}, "versions is {}, must name at least one version as text"),
        ("versions", {"torch": None}, "must name at least one version as text"),
        ("samples_us", (), "samples_us is empty, a measurement has at least one sample"),
        ("samples_us", (1.0, math.nan), "samples_us holds nan, every sample must be finite and above zero"),
        ("samples_us", (1.0, 0.0), "samples_us holds 0.0"),
        ("samples_us", (-1.0,), "samples_us holds -1.0"),
    ],
)
def test_an_incomplete_record_is_refused(field, value, message):
    with pytest.raises(MeasurementError) as refused:
        Measurement(**COMPLETE | {field: value})
    assert message in str(refused.value)


@pytest.mark.parametrize("field", list(COMPLETE))
def test_no_field_has_a_default(field):
    with pytest.raises(TypeError, match=field):
        Measurement(**{name: value for name, value in COMPLETE.items() if name != field})


def test_a_record_cannot_be_changed():
    with pytest.raises(AttributeError):
        Measurement(**COMPLETE).scope = "step"


def test_every_kernel_goes_first_equally_often():
    order = list(alternating(("ours", "fa3", "fa2"), 30))
    assert len(order) == 90
    assert order[:6] == [(0, "ours"), (0, "fa3"), (0, "fa2"), (1, "fa2"), (1, "fa3"), (1, "ours")]
    assert Counter(name for _, name in order[::3]) == {"ours": 15, "fa2": 15}
    assert all(Counter(name for i, name in order if i == k) == {"ours": 1, "fa3": 1, "fa2": 1} for k in range(30))


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_quantiles_are_ordered_and_within_the_samples(samples):
    low, middle, high = (quantile(samples, q) for q in (0.1, 0.5, 0.9))
    assert min(samples) <= low <= middle <= high <= max(samples)


def test_quantile_and_geomean_by_hand():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([7.0], 0.9) == 7.0
    assert geomean([0.5, 2.0, 8.0]) == pytest.approx(2.0)

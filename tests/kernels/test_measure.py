"""What happens around the GPU: binding, poisoning, judging, rows, summaries, and the ratio by runs per plan()."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from kernels.bench import OURS, Bench, Contender, bind, error_ratio_limit, judge
from kernels.cupti import Recording
from kernels.reference import ERROR_RATIO_LIMIT, Errors
from kernels.rows import summarize, table_row
from kernels.serving import LAYERS, amortization, runs_per_plan
from kernels.timing import Measurement, MeasurementError
from kernels.workloads import load_workloads

RIGHT = Errors(True, "", 1e-3, 1e-6, 2e-3)
WRONG = Errors(False, "out[0, 0, 0] is nan, must be 1; 3 elements differ", math.inf, math.inf, math.inf)


def measurement(name, *samples):
    return Measurement(name, "run", "cuda-events", "median", "dirty", samples, "a GPU", {"torch": "2"})


def row_of(errors, measurements, calls=1):
    inputs = SimpleNamespace(workload=load_workloads()[0], bytes_moved=lambda: 4_000_000)
    return table_row(inputs, SimpleNamespace(copy_tb_s=4.0), errors, measurements, calls)


def test_a_candidate_with_out_and_lse_writes_where_it_is_told():
    def candidate(a, *, out, lse):
        out.fill_(a)
        lse.fill_(a)
        return out, lse

    outputs = torch.zeros(2), torch.zeros(2)
    contender = bind(candidate, (3.0,), outputs)
    contender()
    assert outputs[0].tolist() == [3, 3] and contender.outputs[0] is outputs[0]
    contender.poison()
    assert outputs[0].isnan().all() and outputs[1].isnan().all()


def test_a_candidate_without_them_has_its_last_outputs_poisoned():
    kept = torch.ones(2), torch.ones(2)
    contender = bind(lambda a: kept, (3.0,), (torch.zeros(2), torch.zeros(2)))
    contender.poison()
    contender()
    contender.poison()
    assert kept[0].isnan().all(), "an answer that is handed out again is no answer"


@pytest.mark.parametrize("strange", [None, 7, (None, "x"), []])
def test_strange_outputs_are_judged_not_crashed_on(strange):
    contender = Contender(lambda: strange)
    contender()
    contender.poison()
    assert not judge({OURS: contender.outputs}, (torch.zeros(1, 1, 1).double(), torch.zeros(1, 1).double()))[OURS].ok


def test_baselines_that_are_right_set_the_error_ratio_of_ours():
    assert error_ratio_limit({OURS: RIGHT}) == ERROR_RATIO_LIMIT
    assert error_ratio_limit({OURS: RIGHT, "fa3": RIGHT, "fa2": WRONG}) == pytest.approx(3e-3)
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(2, 4, 64, generator=generator).double(), torch.randn(2, 4, generator=generator).double()
    exact = reference[0].bfloat16(), reference[1].float()
    coarse = (reference[0] * 1.005).bfloat16(), reference[1].float()
    assert judge({OURS: coarse}, reference)[OURS].ok
    beside_exact = judge({OURS: coarse, "fa3": exact}, reference)[OURS]
    assert not beside_exact.ok and beside_exact.reason.startswith("out has error ratio")


def test_a_row_is_judged_by_the_faster_baseline():
    row = row_of(
        {OURS: RIGHT, "fa3": RIGHT, "fa2": RIGHT},
        {
            OURS: measurement(OURS, 10, 10, 10),
            "fa2": measurement("fa2", 30, 30, 30),
            "fa3": measurement("fa3", 20, 20, 20),
        },
    )
    assert (row["baseline"], row["baseline_us"], row["ours_us"], row["ratio"]) == ("fa3", 20, 10, 2.0)
    assert row["bandwidth_share"] == pytest.approx(4_000_000 / 10e-6 / 4e12)
    assert row["status"] == "ok" and row["samples"] == {"ours": [10, 10, 10], "fa2": [30, 30, 30], "fa3": [20, 20, 20]}
    assert (row["index"], row["uuid"], row["family"], row["batch"], row["tokens"]) == (
        0,
        load_workloads()[0].uuid,
        0,
        1,
        8,
    )


@pytest.mark.parametrize(("wide", "status"), [(OURS, "unstable"), ("fa3", "unstable"), ("fa2", "ok")])
def test_a_wide_spread_of_either_side_makes_the_row_unstable_never_blank(wide, status):
    samples = {OURS: (10, 10, 10), "fa3": (20, 20, 20), "fa2": (30, 30, 30)}
    samples[wide] = tuple(s * factor for s, factor in zip(samples[wide], (0.9, 1, 1.1)))
    row = row_of(dict.fromkeys(samples, RIGHT), {name: measurement(name, *values) for name, values in samples.items()})
    assert row["status"] == status and row["ratio"] == 2.0
    assert row["spread"] == pytest.approx(0.16 if status == "unstable" else 0.0)


def test_a_wrong_row_has_a_reason_and_no_times():
    row = row_of({OURS: WRONG, "fa3": RIGHT}, {})
    assert row["status"] == "wrong" and row["reason"] == WRONG.reason
    assert row["ours_us"] is row["ratio"] is row["spread"] is row["error_ratio"] is None
    json.dumps(row, allow_nan=False)


def test_without_a_baseline_there_are_times_but_no_ratio():
    row = row_of({OURS: RIGHT}, {OURS: measurement(OURS, 10, 10, 10)})
    assert (row["ours_us"], row["ratio"], row["baseline"], row["status"]) == (10, None, "", "ok")
    assert summarize([row])["geomean"] is None


def summary_row(index, batch, ratio, status="ok"):
    return {"index": index, "batch": batch, "ratio": ratio, "status": status}


def test_summary_by_hand():
    rows = [
        summary_row(3, 1, 2.0),
        summary_row(5, 16, 0.5),
        summary_row(9, 16, 8.0, "unstable"),
        summary_row(1, 1, 1.0),
    ]
    assert summarize(rows) == {
        "n": 4,
        "wrong": [],
        "unstable": [9],
        "geomean": pytest.approx(8**0.25),
        "arithmetic_mean": pytest.approx(2.875),
        "wins": 2,
        "losses": 1,
        "worst": {"index": 5, "ratio": 0.5},
        "geomean_by_batch": {"1": pytest.approx(2**0.5), "16": pytest.approx(2.0)},
    }


def test_one_wrong_row_leaves_no_mean():
    summary = summarize([summary_row(3, 1, 2.0), summary_row(4, 1, None, "wrong")])
    assert summary["geomean"] is None and summary["arithmetic_mean"] is None and summary["worst"] is None
    assert summary["wrong"] == [4]


def step_row(ours, fa3, fa2, plan):
    """A row whose kernels take that many microseconds a layer, and whose plan() takes `plan`."""
    graph = {OURS: ours * LAYERS, "fa3": fa3 * LAYERS, "fa2": fa2 * LAYERS}
    step = graph | {name: graph[name] + plan for name in ("fa3", "fa2")}
    return {"graph_us": graph, "step_us": step, "ratio": 1.0}


def test_runs_per_plan_by_hand():
    table = runs_per_plan([step_row(10, 20, 25, 1000)])
    assert list(table) == ["1", "2", "5", "10", "20", "50", "61", "100", "never"]
    assert table["1"] == pytest.approx(102.0)
    assert table["50"] == pytest.approx(4.0)
    assert table["61"] == pytest.approx((20 * 61 + 1000) / (10 * 61))
    assert table["never"] == pytest.approx(2.0)
    pair = runs_per_plan([step_row(10, 20, 25, 1000), step_row(10, 5, 25, 1000)])
    assert pair["never"] == pytest.approx(1.0)
    assert runs_per_plan([{"ratio": None}]) == {}


def test_the_amortization_that_turns_one_ratio_into_another():
    rows = [step_row(10, 20, 25, 1000)]
    runs = amortization(rows, run_ratio=0.96, with_plan=1.21)
    assert 0.96 * (1000 / runs + 20) / 20 == pytest.approx(1.21)
    assert runs == pytest.approx(1000 / 20 / (1.21 / 0.96 - 1))
    assert amortization(rows, run_ratio=1.3, with_plan=1.21) is None
    assert amortization([], run_ratio=0.96, with_plan=1.21) is None


def test_cupti_spans_lie_between_the_marks():
    recording = Recording(torch.device("cpu"))
    recording._events = [
        (0, 5, "flush"),
        (100, 300, "spin_kernel(long)"),
        (310, 320, "split"),
        (318, 333, "merge"),
        (340, 341, "spin_kernel(long)"),
        (350, 390, "flush"),
        (400, 600, "spin_kernel(long)"),
        (601, 602.5, "Memset (Device)"),
        (610, 611, "spin_kernel(long)"),
    ][::-1]
    recording._valid = [True, True]
    assert recording.spans_us() == [23, 1.5]


def test_a_span_that_was_not_queued_in_time_is_left_out():
    recording = Recording(torch.device("cpu"))
    recording._events = [
        (10 * i, 10 * i + width, "spin_kernel" if i % 3 != 1 else "work") for i, width in enumerate([1, 4, 1, 1, 5, 1])
    ]
    recording._valid = [False, True]
    assert recording.spans_us() == [5]


def test_a_span_without_a_kernel_is_refused():
    recording = Recording(torch.device("cpu"))
    recording._events = [(0, 1, "spin_kernel"), (2, 3, "spin_kernel")]
    with pytest.raises(MeasurementError, match="saw no kernel of a call"):
        recording.spans_us()


def test_a_device_without_cuda_is_refused_in_one_line():
    with pytest.raises(MeasurementError, match="device is cpu, these scopes need a CUDA device"):
        Bench(torch.device("cpu"), 0, "dirty")

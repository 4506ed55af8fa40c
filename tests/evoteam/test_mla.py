"""The run-only and extra-budget modes: every way a measurement can end, with made-up measurements in place of a GPU."""

import inspect
import json
from pathlib import Path

import pytest
import torch

from evoteam.reporting import claims, mla, record
from evoteam.reporting.console import Terminal
from evoteam.reporting.expected import load
from evoteam.reporting.formats import finite
from evoteam.reporting.session import Session
from kernels import foreign, measure, mla_paged_decode, selection, serving
from kernels.timing import MeasurementError
from kernels.workloads import load_workloads

ROOT = Path(__file__).parents[2]
EXPECTED = load(ROOT / "expected_results.json")


def session(*modes, workloads=None, call=lambda *arguments: None):
    chosen = tuple(claim for claim in EXPECTED.claims if claim.mode in modes)
    kernel = selection.Kernel("mla_paged_decode", call, "f" * 64)
    report = record.begin(["repro.py"], modes, 1) | {"device": {"name": "made-up GPU"}, "kernel": kernel.to_json()}
    return Session(chosen, kernel, workloads or load_workloads(), 1, Terminal(quiet=True), report)


@pytest.fixture
def gpu(monkeypatch, scope_record):
    """Makes every measurement answer with a made-up record; a test replaces one by what it is about."""

    def answer(real, scope):
        signature = inspect.signature(real)

        def measured(*arguments, progress=None, **named):
            signature.bind(*arguments, **named, **({"progress": progress} if progress else {}))
            workloads = arguments[1] if len(arguments) > 1 else None
            found = scope_record(scope, 2.0, workloads or None)
            for i, row in enumerate(found["rows"] if progress else ()):
                progress(i + 1, len(found["rows"]), row)
            return found

        return measured

    for module, name, scope in (
        (measure, "measure_run", "run"),
        (measure, "measure_cupti", "run"),
        (measure, "measure_random", "run"),
        (measure, "measure_host", "run"),
        (serving, "measure_step", "step"),
        (serving, "measure_call", "call"),
    ):
        monkeypatch.setattr(module, name, answer(getattr(module, name), scope))
    monkeypatch.setattr(record, "shipped", lambda kernel, **_: None)
    monkeypatch.setattr(mla_paged_decode, "implementation", lambda device: "made-up")
    return monkeypatch


def verdicts(made):
    return {c.id: claims.judge(c, made.evidence[c.id]) for c in made.of(mla.SCOPE_OF)}


def test_all_measurements_are_made_and_judged(gpu):
    made = session("run-only", "extra-budget")
    mla.judge(made, torch.device("cpu"))
    assert list(made.report["measurements"]) == ["run", "run-clean", "cupti", "host", "random", "step", "call"]
    assert {j.verdict for j in verdicts(made).values()} == {"reproduced"}
    assert {j.where for j in verdicts(made).values()} == {"on made-up GPU, claim is for a GPU its sources do not name"}


def test_a_mode_measures_only_its_own(gpu):
    made = session("extra-budget")
    mla.judge(made, torch.device("cpu"))
    assert list(made.report["measurements"]) == ["step", "call"]


def test_a_subset_is_measured_but_judges_nothing(gpu):
    made = session("run-only", workloads=load_workloads()[:2])
    mla.judge(made, torch.device("cpu"))
    assert verdicts(made)["mla-run-geomean"].verdict == "not-run"
    assert "random" not in made.report["measurements"]


def test_a_kernel_that_raises_reproduces_nothing_and_ends_the_measuring(gpu):
    def broken(*arguments):
        raise ValueError("not today\nsecond line")

    gpu.setattr(measure, "measure_run", lambda kernel, *_, **__: kernel())
    made = session("run-only", "extra-budget", call=broken)
    mla.judge(made, torch.device("cpu"))
    assert made.report["measurements"] == {}
    assert {(j.verdict, j.reason) for j in verdicts(made).values()} == {
        ("not-reproduced", "the kernel raised ValueError: not today")
    }


def test_a_gpu_error_after_the_kernel_is_charged_to_it(gpu):
    def ends(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    gpu.setattr(serving, "measure_step", ends)
    made = session("extra-budget")
    mla.judge(made, torch.device("cpu"))
    judged = verdicts(made)["mla-step-geomean"]
    assert judged.verdict == "not-reproduced" and "illegal memory access" in judged.reason


@pytest.mark.parametrize(
    "error", [MeasurementError("0.1 GB of GPU memory are free"), torch.OutOfMemoryError("out of memory")]
)
def test_a_measurement_that_cannot_be_made_is_not_run(gpu, error):
    def ends(*_, **__):
        raise error

    gpu.setattr(serving, "measure_step", ends)
    made = session("run-only", "extra-budget")
    mla.judge(made, torch.device("cpu"))
    judged = verdicts(made)
    assert judged["mla-step-geomean"].verdict == "not-run" and judged["mla-step-geomean"].reason == str(error)
    assert judged["mla-run-geomean"].verdict == "reproduced"


class Silent(BaseException):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error, reason",
    [
        (SystemExit(0), "the kernel raised SystemExit: 0"),
        (KeyboardInterrupt(), "the kernel raised KeyboardInterrupt"),
        (Silent(), "the kernel raised Silent: its text cannot be read, __str__ raised"),
        (ValueError("a\tb\x1b[31m\nmore"), "the kernel raised ValueError: a b [31m"),
    ],
)
def test_whatever_a_kernel_raises_is_its_result_in_one_line(gpu, error, reason):
    def broken(*arguments):
        raise error

    gpu.setattr(measure, "measure_run", lambda kernel, *_, **__: kernel())
    made = session("run-only", call=broken)
    mla.judge(made, torch.device("cpu"))
    assert {(j.verdict, j.reason) for j in verdicts(made).values()} == {("not-reproduced", reason)}


def test_ctrl_c_during_a_call_is_not_the_kernels(gpu):
    def interrupted(*arguments):
        raise foreign.Interrupted

    gpu.setattr(measure, "measure_run", lambda kernel, *_, **__: kernel())
    with pytest.raises(foreign.Interrupted):
        mla.judge(session("run-only", call=interrupted), torch.device("cpu"))


def test_an_error_of_ours_is_not_hidden(gpu):
    def ends(*_, **__):
        raise RuntimeError("a bug")

    gpu.setattr(measure, "measure_run", ends)
    with pytest.raises(RuntimeError, match="a bug"):
        mla.judge(session("run-only"), torch.device("cpu"))


def test_a_run_is_put_beside_the_shipped_record(gpu, report_record):
    gpu.setattr(record, "shipped", lambda kernel, **_: (record.ROOT / "kernels" / "r.json", report_record))
    made = session("run-only", "extra-budget")
    mla.judge(made, torch.device("cpu"))
    rows = {row["measurement"]: row for row in made.report["comparison"]["rows"]}
    assert set(rows) == {"run", "step"}
    assert (
        rows["step"]["recorded"] == report_record["measurements"]["step"]["summary"]["geomean"] != rows["step"]["now"]
    )


def test_without_a_gpu_the_record_is_shown_and_never_counts(monkeypatch, report_record):
    monkeypatch.setattr(record, "shipped", lambda kernel, **_: (record.ROOT / "kernels" / "r.json", report_record))
    monkeypatch.setattr(mla, "_check", lambda session: None)
    made = session("run-only", "extra-budget")
    mla.judge(made, None)
    judged = verdicts(made)
    assert {j.verdict for j in judged.values()} == {"recorded"}
    assert judged["mla-run-geomean"].measured == pytest.approx(
        report_record["measurements"]["run"]["summary"]["geomean"]
    )
    assert "an earlier version of the kernel: kernels/r.json" in judged["mla-run-geomean"].reason
    assert claims.exit_status(list(judged.values()), strict=True) == 3
    assert made.report["recorded"]["measurements"] == report_record["measurements"]


def test_the_newest_record_of_the_same_kernel_is_taken(tmp_path, report_record):
    for name, created, kernel in (("a", "2026-01-02", "k"), ("b", "2026-01-01", "k"), ("c", "2026-01-03", "other")):
        changed = {"created": created, "kernel": report_record["kernel"] | {"name": kernel}}
        (tmp_path / f"{name}.json").write_text(json.dumps(finite(report_record | changed)))
    assert record.shipped("k", tmp_path)[0].name == "a.json"
    assert record.shipped("nobody", tmp_path) is None


def without(data, *path):
    """A copy of nested data without what lies under `path`."""
    name, *rest = path
    if isinstance(data, list):
        return [*data[:name], without(data[name], *rest), *data[name + 1 :]]
    return {
        key: without(value, *rest) if rest and key == name else value
        for key, value in data.items()
        if rest or key != name
    }


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: "{", "d.json is not JSON"),
        (lambda r: "[" * 100_000, "d.json is not JSON: maximum recursion depth"),
        (lambda r: "{}", "d.json is not a record of this program with schema 1"),
        (lambda r: without(r, "created"), "d.json has no text under created"),
        (lambda r: without(r, "device"), "d.json has no text under device.name"),
        (lambda r: r | {"device": "H200"}, "d.json has no text under device.name"),
        (lambda r: without(r, "kernel"), "d.json has no text under kernel.name, kernel.sha256"),
        (lambda r: without(r, "kernel", "sha256"), "d.json has no text under kernel.sha256"),
        (
            lambda r: without(r, "measurements"),
            "d.json has measurements that cannot be shown: KeyError: 'measurements'",
        ),
        (lambda r: without(r, "measurements", "run", "rows", 3, "ours_us"), "cannot be shown: KeyError: 'ours_us'"),
        (lambda r: without(r, "measurements", "step", "summary", "n"), "cannot be shown: KeyError: 'n'"),
        (lambda r: r | {"measurements": {"run": None}}, "cannot be shown: TypeError"),
    ],
)
def test_a_file_that_is_no_record_is_named_and_left_out(tmp_path, report_record, change, message):
    good = finite(report_record | {"created": "2026-01-01"})
    (tmp_path / "good.json").write_text(json.dumps(good))
    bad = change(good | {"created": "2026-02-01"})
    (tmp_path / "d.json").write_text(bad if isinstance(bad, str) else json.dumps(bad))
    said = []
    assert record.shipped("mla_paged_decode", tmp_path, said.append)[0].name == "good.json"
    assert len(said) == 1 and said[0].startswith("left out: ") and message in said[0]


def test_shipped_records_can_be_read():
    for path in record.MEASUREMENTS.glob("*.json"):
        stored = record.read(path)
        assert stored["device"]["name"] and stored["measurements"]["run"]["summary"]["n"] == 47


def test_a_name_that_is_no_text_does_not_stop_a_record(tmp_path):
    record.write(tmp_path / "report.json", "caf\udce9")
    assert (tmp_path / "report.json").read_text() == "caf?"


def test_the_record_is_replaced_whole(tmp_path):
    path = tmp_path / "report.json"
    record.write(path, "old")
    with pytest.raises(record.RecordError, match="cannot write"):
        record.write(tmp_path / "missing" / "report.json", "x")
    record.write(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["report.json"]

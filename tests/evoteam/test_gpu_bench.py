"""The GPU bench without a GPU: both sides of its protocol on the CPU task, with stand-ins for CUDA's clock and graphs.

What only a GPU can show is in tests/exploits/test_gpu_exploits.py.
"""

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from evoteam.judging import gpu_side, harness  # noqa: E402
from evoteam.judging.arena import Region  # noqa: E402
from evoteam.judging.child import Failure  # noqa: E402
from kernels.tasks import load_task  # noqa: E402

ROOT = Path(__file__).parents[2]
HONEST = (ROOT / "tests" / "exploits" / "honest" / "plain_loop.py").read_text()
CPU = torch.device("cpu")


class WallStopwatch:
    """Times by the wall clock as `kernels.timing.Stopwatch` does by events; `retries` samples are taken twice."""

    def __init__(self, retries: int = 0):
        self.retries = retries

    def gpu_us(self, call, before, after):
        while True:
            before()
            start = time.perf_counter()
            call()
            us = (time.perf_counter() - start) * 1e6
            after()
            if self.retries == 0:
                return us, True
            self.retries -= 1


@pytest.fixture
def cuda(monkeypatch):
    """The few CUDA calls that the bench makes, on the CPU. A graph holds the calls made while it is captured."""
    captured, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)

    class Graph:
        def replay(self):
            side = captured[-1]
            for old, new in zip(side.audited, side.every_call()):
                for value, other in zip(old, new):
                    value.copy_(other)

    @contextmanager
    def graph(_):
        yield

    real = gpu_side.GpuSide.audit_capture
    monkeypatch.setattr(
        gpu_side.GpuSide, "audit_capture", lambda side, buffers: captured.append(side) or real(side, buffers)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(gpu_side, "AUDIT_CALLS", 4)
    yield
    torch.set_num_threads(threads)


class Connection:
    """A candidate's runner in this process, answering as `harness.serve` does."""

    def __init__(self, steps):
        self.steps = steps

    def request(self, op, fds=(), **fields):
        try:
            return {"nonce": "1"} | (self.steps[op](fields, list(fds)) or {})
        except (harness.WrongOutput, harness.Cheat) as error:
            return {"error": harness.KINDS[type(error)], "message": str(error)}
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error)}


@pytest.fixture
def bench(cuda, monkeypatch, tmp_path):
    """`bench(source)` -> a bench on a candidate, and the candidate's runner."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "harness", harness)
    monkeypatch.setitem(sys.modules, "gpu_side", gpu_side)
    from evoteam.judging import gpu_bench, gpu_harness

    monkeypatch.setattr(gpu_bench, "PAIRS", 4)
    monkeypatch.setattr(gpu_bench, "AUDITS", 3)
    monkeypatch.setattr(gpu_bench, "AUDIT_CALLS", 4)
    monkeypatch.setattr(gpu_harness, "AUDIT_CALLS", 4)
    opened = []

    def make(source, retries=0):
        task, memory = load_task("mla-paged-decode-cpu"), Region()
        runner = gpu_harness.GpuRunner(gpu_side.GpuSide(task, CPU, WallStopwatch(retries)))
        (tmp_path / "source.py").write_text(source)
        runner.load(
            {"entry_point": "mla_paged_decode"}, [os.open(tmp_path / "source.py", os.O_RDONLY), os.dup(memory.fd)]
        )
        bench = gpu_bench.GpuBench(task, Connection(runner.steps), gpu_side.GpuSide(task, CPU, WallStopwatch()), memory)
        opened.append(bench)
        return bench, runner

    yield make
    for each in opened:
        each.close()


def candidate(cheat: str) -> str:
    return HONEST.replace("def mla_paged_decode(", "def honest(") + "\n\n" + cheat


def workload(bench, name):
    return next(w for w in (*bench.task.workloads, *bench.task.awkward) if w.name == name)


@pytest.mark.parametrize("retries", [0, 3])
def test_honest_candidate_is_checked_and_timed(bench, retries):
    bench, runner = bench(HONEST, retries)
    bench.first_call()
    for awkward in bench.task.awkward:
        bench.check(awkward)
    row = bench.time(workload(bench, "few-short"))
    assert row["workload"] == "few-short" and row["audit"] == "graph" and row["compared"] == 3 and row["calls"] == 4
    assert row["ratio"] == pytest.approx(row["baseline_us"] / row["ours_us"], rel=0.01)
    assert row["error_ratio"] < 3e-3 and 0.02 < row["ratio"] < 50 and row["audited_us"] > 10


def test_given_outputs_are_used(bench):
    source = candidate(
        "def mla_paged_decode(*inputs, out, lse):\n    o, l = honest(*inputs)\n    return out.copy_(o), lse.copy_(l)\n"
    )
    bench, runner = bench(source)
    bench.check(workload(bench, "few-short"))
    assert runner.side.buffers.keys() == {"out", "lse"} and runner.side.taken[0] is runner.side.buffers["out"]


@pytest.mark.parametrize(
    "kind, words, cheat",
    [
        (
            "wrong-answer",
            "must be",
            "kept = []\ndef mla_paged_decode(*inputs):\n    kept.append(honest(*inputs))\n    return kept[0]",
        ),
        (
            "wrong-answer",
            "must be a plain torch.Tensor",
            "def mla_paged_decode(*inputs):\n    return [list(x) for x in honest(*inputs)]",
        ),
        ("wrong-answer", "must return a tuple", "def mla_paged_decode(*inputs):\n    return None"),
        (
            "wrong-answer",
            "float64",
            "def mla_paged_decode(*inputs):\n    out, lse = honest(*inputs)\n    return out, lse.double()",
        ),
        (
            "cheat",
            "replaced torch.cuda.synchronize",
            "torch.cuda.synchronize = lambda *_: 0\ndef mla_paged_decode(*i):\n    return honest(*i)",
        ),
        ("crash", "boom", "def mla_paged_decode(*inputs):\n    raise ValueError('boom')"),
    ],
)
def test_bad_candidate_is_refused(bench, monkeypatch, kind, words, cheat):
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)  # what the candidate replaces is put back
    bench, _ = bench(candidate(cheat))
    with pytest.raises(Failure) as caught:
        for name in ("few-short", "few-short"):
            bench.check(workload(bench, name))
    assert caught.value.kind == kind and words in caught.value.message and caught.value.row["workload"] == "few-short"


def test_stale_answer_in_a_timed_call_is_caught(bench):
    """The buffers' contents change before every sample: an answer kept by pointer is wrong from the second one on."""
    source = candidate(
        "kept = {}\ndef mla_paged_decode(*inputs):\n"
        "    key = tuple(value.data_ptr() for value in inputs[:-1])\n"
        "    kept[key] = kept.get(key) or honest(*inputs)\n"
        "    return tuple(value.clone() for value in kept[key])\n"
    )
    bench, _ = bench(source)
    with pytest.raises(Failure) as caught:
        bench.time(workload(bench, "few-short"))
    assert caught.value.kind == "wrong-answer"


def test_reported_time_below_the_audited_one_is_refused(bench):
    bench, runner = bench(HONEST)
    sample = runner.steps["sample"]
    runner.steps["sample"] = lambda request, fds: (reply := sample(request, fds)) | {"us": reply["us"] / 10}
    with pytest.raises(Failure) as caught:
        bench.time(workload(bench, "even"))
    assert caught.value.kind == "cheat" and "by the evaluator's clock" in caught.value.message


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"us": "1", "flips": 1},
        {"us": float("nan"), "flips": 1},
        {"us": -1.0, "flips": 1},
        {"us": 1.0, "flips": 10**9},
    ],
)
def test_impossible_sample_is_refused(bench, reply):
    bench, runner = bench(HONEST)
    runner.steps["sample"] = lambda request, fds: reply
    with pytest.raises(Failure) as caught:
        bench.time(workload(bench, "few-short"))
    assert caught.value.kind == "cheat" and "reports" in caught.value.message


@pytest.mark.parametrize(
    "outputs",
    [
        None,
        7,
        [{}],
        [{"dtype": "load", "shape": [1], "offset": 0}],
        [{"dtype": "float32", "shape": [1 << 40], "offset": 0}],
        [{"dtype": "float32", "shape": [1], "offset": -4}],
        [{"dtype": "float32", "shape": [-1], "offset": 0}],
    ],
)
def test_impossible_outputs_are_refused(bench, outputs):
    bench, runner = bench(HONEST)
    runner.steps["fetch"] = lambda request, fds: {"outputs": outputs}
    with pytest.raises(Failure) as caught:
        bench.check(workload(bench, "few-short"))
    assert caught.value.kind == "cheat"


def test_lengths_rotate_between_requests():
    task = load_task("mla-paged-decode")
    number = next(i for i, w in enumerate(task.workloads) if w.batch == 16)
    plain, rotated = (gpu_side.variant(task, number, rotate) for rotate in (0, 1))
    assert plain is task.workloads[number] and rotated.lens == plain.lens[1:] + plain.lens[:1]

"""The measuring loops on a CPU, with a stopwatch that is told its readings: what is called, checked and repeated."""

import gc
import math
import random
from types import SimpleNamespace

import pytest
import torch

from kernels import cupti, measure, serving, timing
from kernels.bench import Bench, Inputs, bind
from kernels.reference import mla_paged_decode_reference
from kernels.timing import ATTEMPTS, MAX_SPIN_CYCLES, PAIRS, SPIN_CYCLES, WARMUP, Stopwatch
from kernels.workloads import Workload, page_table

WORKLOAD = Workload(2000, "small", -1, (5, 1, 9), num_pages=64)
SAMPLES = WARMUP + PAIRS


def honest(*arguments):
    out, lse = mla_paged_decode_reference(*arguments, dtype=torch.float32)
    return out.bfloat16(), lse


def with_outputs(*arguments, out, lse):
    found = honest(*arguments)
    out.copy_(found[0])
    lse.copy_(found[1])
    return out, lse


class ToldStopwatch:
    """Does everything in a stopwatch's order and reads what it was told."""

    flush = SimpleNamespace(kind="dirty")

    def __init__(self, reading):
        self.reading = reading
        self.taken = 0

    def gpu_us(self, call, before, after):
        before()
        call()
        after()
        self.taken += 1
        return self.reading(self.taken), True

    def wall_us(self, call, before):
        return self.gpu_us(call, before, lambda: None)[0]


class CpuBench(Bench):
    """Two small caches, and an honest kernel in FlashInfer's place."""

    def __init__(self, reading=lambda taken: 10.0):
        self.device, self.seed, self.choose = torch.device("cpu"), 3, random.Random(3)
        self.stopwatch, self.name, self.versions = ToldStopwatch(reading), "a CPU", {"torch": torch.__version__}
        self.build_s, self.copy_tb_s = {}, 1.0
        self.caches = [tuple(torch.randn(64, 1, dim).bfloat16() for dim in (512, 64)) for _ in range(2)]

    def contenders(self, candidate, inputs):
        return super().contenders(candidate, inputs) | {"fa3": bind(with_outputs, inputs.arguments(), inputs.outputs())}

    def small_inputs(self):
        return Inputs(WORKLOAD, page_table(WORKLOAD, 0), self.caches[0], self.seed, self.device)

    def run_row(self, candidate):
        return measure._run_row(candidate, self, self.small_inputs(), measure._by_events, "cuda-events", PAIRS)


@pytest.fixture(autouse=True)
def no_gpu_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments, out, lse):
        self.calls += 1
        return self.function(*arguments, out=out, lse=lse)


def test_a_sample_is_a_rehearsal_and_a_timed_call():
    candidate, bench = Counted(with_outputs), CpuBench()
    row = bench.run_row(candidate)
    assert row["status"] == "ok" and row["ratio"] == 1.0
    assert [len(samples) for samples in row["samples"].values()] == [PAIRS, PAIRS]
    assert candidate.calls == 1 + 2 * SAMPLES
    assert bench.stopwatch.taken == 2 * SAMPLES
    assert 1e-4 < row["error_ratio"] < 4e-3 and 1e-4 < row["baseline_error_ratio"] < 4e-3


def test_no_two_calls_see_the_same_queries():
    seen = []

    def candidate(*arguments):
        seen.append(arguments[0].sum().item())
        return honest(*arguments)

    assert CpuBench().run_row(candidate)["status"] == "ok"
    assert len(set(seen)) > 0.95 * len(seen) == 0.95 * (1 + 2 * SAMPLES)


@pytest.mark.parametrize(
    ("readings", "status", "attempts"),
    [
        ((1.0,), "ok", 1),
        ((1.0, 1.04), "ok", 1),
        ((1.0, 1.3), "unstable", ATTEMPTS),
    ],
)
def test_a_wide_spread_is_timed_again_and_then_said(readings, status, attempts):
    bench = CpuBench(lambda taken: readings[(taken - 1) // 2 % len(readings)])
    row = bench.run_row(with_outputs)
    assert row["status"] == status
    assert bench.stopwatch.taken == attempts * 2 * SAMPLES


def test_a_steady_second_attempt_is_the_one_that_counts():
    bench = CpuBench(lambda taken: (5.0, 9.0)[(taken - 1) // 2 % 2] if taken <= 2 * SAMPLES else 7.0)
    row = bench.run_row(with_outputs)
    assert (row["status"], row["ours_us"], row["spread"]) == ("ok", 7.0, 0.0)
    assert bench.stopwatch.taken == 2 * 2 * SAMPLES


def cheats():
    answers, first, count = {}, {}, [0]

    def cached_by_pointer(*arguments):
        key = arguments[0].data_ptr()
        if key not in answers:
            answers[key] = honest(*arguments)
        return tuple(answer.clone() for answer in answers[key])

    def cached_by_pointer_and_handed_out(*arguments):
        return answers.setdefault("kept", honest(*arguments))

    def only_the_first_call(*arguments, out, lse):
        if not first:
            first["done"] = with_outputs(*arguments, out=out, lse=lse)
        return out, lse

    def right_until_it_is_timed(*arguments):
        count[0] += 1
        out, lse = honest(*arguments)
        return (out if count[0] < 3 else torch.zeros_like(out)), lse

    def zeros(*arguments):
        return torch.zeros_like(arguments[0]), honest(*arguments)[1]

    def not_a_number(*arguments):
        return torch.full_like(arguments[0], math.nan), honest(*arguments)[1]

    def all_but_the_last_token(*arguments):
        *rest, kv_indptr, kv_indices, sm_scale = arguments
        return honest(*rest, torch.clamp(kv_indptr, max=kv_indptr[-1] - 1), kv_indices, sm_scale)

    def natural_logarithm(*arguments):
        out, lse = honest(*arguments)
        return out, lse * math.log(2)

    def coarse(*arguments):
        out, lse = honest(*arguments)
        return (out.float() * 1.006).bfloat16(), lse

    def nothing(*arguments):
        return None

    return [v for v in locals().values() if callable(v)]


@pytest.mark.parametrize("number", range(len(cheats())))
def test_a_cheat_has_no_time(number):
    candidate = cheats()[number]
    row = CpuBench().run_row(candidate)
    assert (row["status"], row["ours_us"], row["ratio"]) == ("wrong", None, None), candidate.__name__
    assert row["reason"]


class FakeFlashInfer:
    """plan() and run() of an honest kernel; `plans` counts."""

    plans = 0

    def __init__(self, backend, device, graph_buffers=None):
        self.table = None

    def plan(self, inputs):
        FakeFlashInfer.plans += 1
        self.table = inputs.kv_indptr, inputs.kv_indices

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse):
        return with_outputs(q_nope, q_pe, ckv_cache, kpe_cache, *self.table, 0.1352337747812271, out=out, lse=lse)


@pytest.fixture
def served(monkeypatch):
    """A bench whose CUDA graphs are plain loops of four layers and whose FlashInfer is honest."""
    monkeypatch.setattr(serving, "LAYERS", 4)
    monkeypatch.setattr(serving, "PLAN_INPUTS", ("device",))
    monkeypatch.setattr(serving, "FlashInferMLA", FakeFlashInfer)
    monkeypatch.setattr(serving, "_capture", lambda device, layers, name: lambda: [layer() for layer in layers])
    monkeypatch.setattr(FakeFlashInfer, "plans", 0)
    bench = CpuBench()
    bench.build_s = {"fa3": 0.1}
    return bench


@pytest.mark.parametrize("candidate", [honest, with_outputs])
def test_a_step_runs_every_layer_on_its_cache_and_plans_once(served, candidate):
    counted = Counted(candidate) if candidate is with_outputs else candidate
    row = serving._step_row(counted, served, served.small_inputs(), PAIRS)
    assert (row["status"], row["baseline"], row["ratio"]) == ("ok", "fa3", 1.0)
    assert row["step_us"] == row["graph_us"] == {"ours": 10.0, "fa3": 10.0}
    assert row["plan_us"] == {"fa3": {"device": 10.0}} and row["plan_inputs"] == {"fa3": "device"}
    planned_alone, checked, steps = 2 * (WARMUP + serving.PLAN_SAMPLES), 1, 2 * SAMPLES
    assert FakeFlashInfer.plans == planned_alone + checked + steps
    if candidate is with_outputs:
        assert counted.calls == 4 * (checked + steps + 2 * SAMPLES)


def test_a_step_that_leaves_layers_out_is_wrong(served):
    left_out = {"layers": 0}

    def every_other_cache(*arguments, out, lse):
        if arguments[2] is served.caches[0][0]:
            return with_outputs(*arguments, out=out, lse=lse)
        left_out["layers"] += 1
        return out, lse

    statuses = set()
    for seed in range(6):
        served.choose = random.Random(seed)
        statuses.add(serving._step_row(every_other_cache, served, served.small_inputs(), 5)["status"])
    assert left_out["layers"] and "wrong" in statuses


def test_a_call_plans_every_time(served):
    row = serving._call_row(with_outputs, served, served.small_inputs(), PAIRS)
    assert (row["status"], row["ratio"]) == ("ok", 1.0)
    assert FakeFlashInfer.plans == 2 * (WARMUP + serving.PLAN_SAMPLES) + 1 + 2 * SAMPLES


@pytest.fixture
def gpu(monkeypatch):
    """CUDA's events and spin kernel, with answers told: `gpu.finished` says whether the spin was over when asked."""
    state = SimpleNamespace(finished=[], spins=[])

    class Event:
        def __init__(self, enable_timing=False):
            pass

        def record(self):
            pass

        def query(self):
            return state.finished.pop(0) if state.finished else True

        def elapsed_time(self, end):
            return 0.0125

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", state.spins.append)
    return state


def test_a_call_that_was_not_queued_in_time_is_taken_again_behind_a_longer_spin(gpu):
    stopwatch, order = Stopwatch(torch.device("cpu"), "none"), []
    gpu.finished = [True, True, False, False]
    call, before, after = (lambda name=name: order.append(name) for name in ("call", "before", "after"))
    assert stopwatch.gpu_us(call, before, after) == (12.5, True)
    assert order == ["before", "call", "after"] * 3
    assert gpu.spins == [SPIN_CYCLES, 2 * SPIN_CYCLES, 4 * SPIN_CYCLES]
    assert stopwatch.gpu_us(call, before, after) == (12.5, True)
    assert gpu.spins[3:] == [4 * SPIN_CYCLES], "what the host needed once it needs again"


def test_a_call_that_waits_for_the_gpu_is_told_apart_and_does_not_slow_the_others(gpu):
    stopwatch = Stopwatch(torch.device("cpu"), "none")
    assert stopwatch.gpu_us(lambda: None) == (12.5, False)
    assert gpu.spins[-1] == MAX_SPIN_CYCLES
    gpu.finished = [False]
    assert stopwatch.gpu_us(lambda: None) == (12.5, True)
    assert gpu.spins[-1] == SPIN_CYCLES


def test_cupti_takes_a_call_again_and_keeps_the_last_span(gpu):
    recording, order = cupti.Recording(torch.device("cpu")), []
    gpu.finished = [True, False, False]
    assert recording.take(lambda: order.append("call"), lambda: order.append("before"))
    assert recording.take(lambda: order.append("call"), lambda: order.append("before"))
    assert order == ["before", "call"] * 3
    assert gpu.spins == [SPIN_CYCLES, 1, 2 * SPIN_CYCLES, 1, SPIN_CYCLES, 1]
    recording._events = [
        (10 * i, 10 * i + w, "spin_kernel" if i % 3 != 1 else "k") for i, w in enumerate([1, 4, 1, 1, 5, 1, 1, 6, 1])
    ]
    assert recording.spans_us() == [5, 6]


def test_garbage_collection_is_off_inside_and_as_before_outside():
    assert gc.isenabled()
    with timing.garbage_collection_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with timing.garbage_collection_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

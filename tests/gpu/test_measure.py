"""The measurements on a real GPU: honest kernels get numbers, and every way to look fast without the work is seen."""

import ctypes
import math

import pytest
import torch

from kernels import baselines
from kernels import device as device_facts
from kernels.measure import measure_call, measure_cupti, measure_host, measure_run, measure_step
from kernels.reference import mla_paged_decode_reference
from kernels.timing import MeasurementError, Stopwatch
from kernels.workloads import load_workloads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SEED = 11
SMALL = load_workloads()[0], load_workloads()[27]  # 8 tokens of one request, 457 tokens of 16


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda")


def honest(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    """Attention over all tokens with a mask by request, in fp32; reads no tensor on the host, so it can be captured."""
    batch, heads, _ = q_nope.shape
    position = torch.arange(kv_indices.numel(), device=q_nope.device)
    request = torch.searchsorted(kv_indptr[1:].contiguous(), position.int(), right=True)
    keys, rope_keys = ckv_cache[kv_indices.long(), 0].float(), kpe_cache[kv_indices.long(), 0].float()
    scores = (q_nope.float().flatten(0, 1) @ keys.T + q_pe.float().flatten(0, 1) @ rope_keys.T).view(
        batch, heads, -1
    ) * sm_scale
    mine = request == torch.arange(batch, device=q_nope.device)[:, None]
    scores = scores.masked_fill(~mine[:, None], -math.inf)
    out = (torch.softmax(scores, -1).flatten(0, 1) @ keys).view(batch, heads, -1)
    return out.to(q_nope.dtype), torch.logsumexp(scores, -1) / math.log(2)


def with_outputs(*arguments, out, lse):
    result = honest(*arguments)
    out.copy_(result[0])
    lse.copy_(result[1])
    return out, lse


def statuses(record):
    return [row["status"] for row in record["rows"]]


@pytest.mark.parametrize("flush", ["dirty", "clean", "hot"])
def test_run_scope_measures_and_records_its_conditions(device, flush):
    record = measure_run(honest, SMALL, seed=SEED, device=device, flush=flush)
    assert "wrong" not in statuses(record)
    assert (record["scope"], record["timer"], record["flush"], record["statistic"]) == (
        "run",
        "cuda-events",
        flush,
        "median",
    )
    assert 0.5 < record["floor_us"] < 10
    assert record["copy_tb_s"] > 0.05
    for row in record["rows"]:
        assert len(row["samples"]["ours"]) == 30
        assert row["ours_p10"] <= row["ours_us"] <= row["ours_p90"]
        assert row["error_ratio"] < 5e-3
        if not record["baseline_error"]:
            assert row["baseline"] in baselines.flashinfer_backends(device)
            assert row["ratio"] == pytest.approx(row["baseline_us"] / row["ours_us"])
            assert row["baseline_error_ratio"] < 5e-3


def test_outputs_given_or_returned_are_the_same_kernel(device):
    record = measure_run(with_outputs, SMALL, seed=SEED, device=device)
    assert "wrong" not in statuses(record)


def cheats(device):
    stream, answers, first = torch.cuda.Stream(device), {}, {}

    def another_stream(*arguments):
        out = torch.empty_like(arguments[0]), arguments[0].new_empty(arguments[0].shape[:2], dtype=torch.float32)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            with_outputs(*arguments, out=out[0], lse=out[1])
        for tensor in out:
            tensor.record_stream(stream)
        return out

    def cached_by_pointer(*arguments):
        key = arguments[0].data_ptr(), arguments[4].data_ptr()
        if key not in answers:
            answers[key] = honest(*arguments)
        return tuple(answer.clone() for answer in answers[key])

    def only_the_first_call(*arguments, out, lse):
        key = arguments[0].data_ptr()
        if key not in first:
            first[key] = with_outputs(*arguments, out=out, lse=lse)
        return out, lse

    def zeros(*arguments):
        return torch.zeros_like(arguments[0]), honest(*arguments)[1]

    def not_a_number(*arguments):
        return torch.full_like(arguments[0], math.nan), honest(*arguments)[1]

    def half_the_tokens(*arguments):
        *rest, kv_indices, sm_scale = arguments
        return honest(*rest, kv_indices[: max(kv_indices.numel() // 2, 1)], sm_scale)

    def natural_logarithm(*arguments):
        out, lse = honest(*arguments)
        return out, lse * math.log(2)

    def half_precision_lse(*arguments):
        out, lse = honest(*arguments)
        return out, lse.bfloat16()

    return [v for v in locals().values() if callable(v) and hasattr(v, "__name__")]


@pytest.mark.parametrize("number", range(8))
def test_a_cheat_is_wrong(device, number):
    candidate = cheats(device)[number]
    record = measure_run(candidate, SMALL[1:], seed=SEED, device=device, use_baseline=False)
    assert statuses(record) == ["wrong"], candidate.__name__
    assert record["rows"][0]["reason"]
    assert record["rows"][0]["ratio"] is None
    assert record["summary"]["wrong"] == [SMALL[1].index]


def test_launch_gaps_are_not_in_a_sample_and_a_waiting_call_is_told_apart(device):
    stopwatch = Stopwatch(device, "none")

    def slow_to_launch():
        for _ in range(300):
            torch.cuda._sleep(0)

    def waiting():
        torch.cuda._sleep(0)
        torch.cuda.synchronize(device)

    us, queued = stopwatch.gpu_us(slow_to_launch)
    assert queued
    assert us / 300 < stopwatch.floor_us() + 2
    assert not stopwatch.gpu_us(waiting)[1]


def test_a_flush_leaves_nothing_in_the_window(device):
    floors = {flush: Stopwatch(device, flush).floor_us() for flush in ("dirty", "clean", "none")}
    assert max(floors.values()) < min(floors.values()) + 2


def test_cold_reads_take_longer_than_hot_ones(device):
    data = torch.ones(16 << 20, dtype=torch.uint8, device=device)
    times = {}
    for flush in ("dirty", "clean", "hot"):
        stopwatch = Stopwatch(device, flush)
        times[flush] = sorted(stopwatch.gpu_us(lambda: data.view(torch.int64).sum())[0] for _ in range(15))[7]
    assert times["hot"] < times["clean"] and times["hot"] < times["dirty"]


class AccessPolicyWindow(ctypes.Structure):
    """CUaccessPolicyWindow, in the 64 bytes of a CUstreamAttrValue."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("hit_ratio", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("rest", ctypes.c_char * 36),
    ]


def test_persisting_lines_do_not_survive_the_flush(device):
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("persisting L2 accesses need compute capability 8.0")
    data = torch.ones(8 << 20, dtype=torch.uint8, device=device).view(torch.int64)
    stopwatch = Stopwatch(device, "dirty")
    cuda, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.Stream(device)
    window = AccessPolicyWindow(data.data_ptr(), data.nbytes, 1.0, 2, 1)  # hits persist, misses stream

    def median_us():
        with torch.cuda.stream(stream):
            return sorted(stopwatch.gpu_us(data.sum)[0] for _ in range(21))[10]

    ordinary = median_us()
    assert cuda.cuCtxSetLimit(6, ctypes.c_size_t(16 << 20)) == 0
    assert cuda.cuStreamSetAttribute(ctypes.c_void_p(stream.cuda_stream), 1, ctypes.byref(window)) == 0
    guarded = median_us()
    stopwatch.flush.end_persistence = lambda: None
    unguarded = median_us()
    assert cuda.cuStreamSetAttribute(ctypes.c_void_p(stream.cuda_stream), 1, ctypes.byref(AccessPolicyWindow())) == 0
    assert unguarded < 0.9 * ordinary, "this GPU keeps persisting lines through a flush"
    assert guarded > 0.95 * ordinary


def test_cupti_reads_less_than_events_and_sees_every_kernel(device):
    events = measure_run(with_outputs, SMALL, seed=SEED, device=device, use_baseline=False)
    cupti = measure_cupti(with_outputs, SMALL, seed=SEED, device=device, use_baseline=False)
    assert "wrong" not in statuses(cupti)
    assert cupti["timer"] == "cupti"
    for a, b in zip(events["rows"], cupti["rows"], strict=True):
        assert 0.5 * a["ours_us"] < b["ours_us"] < a["ours_us"] + 1


def test_step_scope_has_its_parts_and_the_table_follows_from_them(device):
    record = measure_step(with_outputs, SMALL[1:], seed=SEED, device=device, pairs=10)
    assert statuses(record) != ["wrong"]
    assert (record["scope"], record["timer"], record["layers"]) == ("step", "wall", 61)
    assert 1 <= record["caches"] <= 61
    row = record["rows"][0]
    assert row["graph_us"]["ours"] <= row["step_us"]["ours"] * 1.1
    if record["baseline_error"]:
        pytest.skip(record["baseline_error"])
    assert row["plan_inputs"]["fa2"] == min(row["plan_us"]["fa2"], key=row["plan_us"]["fa2"].get)
    table = record["runs_per_plan"]
    assert list(table) == ["1", "2", "5", "10", "20", "50", "61", "100", "never"]
    assert sorted(table.values(), reverse=True) == list(table.values())
    assert table["61"] == pytest.approx(row["ratio"], rel=0.05)


def test_step_scope_says_when_a_kernel_cannot_be_captured(device):
    def reads_a_tensor(*arguments):
        arguments[4].tolist()
        return honest(*arguments)

    with pytest.raises(MeasurementError, match="cannot be captured in a CUDA graph"):
        measure_step(reads_a_tensor, SMALL[1:], seed=SEED, device=device, pairs=5)
    torch.cuda.synchronize(device)


def test_call_scope_and_host_cost(device):
    record = measure_call(with_outputs, SMALL, seed=SEED, device=device, pairs=10)
    assert (record["scope"], record["timer"]) == ("call", "wall")
    assert "wrong" not in statuses(record)
    host = measure_host(with_outputs, SMALL, seed=SEED, device=device, calls=20)
    assert all(0 < h["ours_us"] < r["ours_us"] for h, r in zip(host["rows"], record["rows"], strict=True))


def test_flashinfer_passes_the_gate_it_sets(device):
    try:
        backends = baselines.build(device)
    except baselines.BaselineUnavailable as reason:
        pytest.skip(str(reason))
    for backend in backends:
        plans = {}

        def flashinfer(*arguments, out, lse):
            key = arguments[4].data_ptr()
            if key not in plans:
                plans[key] = baselines.FlashInferMLA(backend, device)
                plans[key].plan(baselines.PlanMetadata.of(arguments[4], arguments[5], "device"))
            return plans[key].run(*arguments[:4], out, lse)

        record = measure_run(flashinfer, SMALL, seed=SEED, device=device)
        assert "wrong" not in statuses(record)
        for row in record["rows"]:
            same = sorted(row["samples"][backend])[15]
            assert row["ours_us"] == pytest.approx(same, rel=0.1)


def test_device_facts(device):
    snapshot = device_facts.snapshot(device)
    assert snapshot["sm_clock_mhz"] is None or 200 < snapshot["sm_clock_mhz"] < 4000
    facts = device_facts.describe(device)
    assert facts["l2_bytes"] > 0 and facts["multiprocessors"] > 0


def test_reference_agrees_with_the_masked_formula(device):
    q_nope, q_pe = torch.randn(3, 16, 512, device=device).bfloat16(), torch.randn(3, 16, 64, device=device).bfloat16()
    caches = torch.randn(50, 1, 512, device=device).bfloat16(), torch.randn(50, 1, 64, device=device).bfloat16()
    table = torch.tensor([0, 7, 8, 40], dtype=torch.int32, device=device), torch.randperm(50, device=device).int()[:40]
    wanted = mla_paged_decode_reference(q_nope, q_pe, *caches, *table, 0.1352337747812271)
    out, lse = honest(q_nope, q_pe, *caches, *table, 0.1352337747812271)
    assert (lse - wanted[1]).abs().max() < 1e-4
    assert (out.double() - wanted[0]).abs().max() < 2e-2

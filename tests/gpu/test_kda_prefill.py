"""KDA prefill on a real GPU: both implementations against fp64, and what only hardware shows."""

import pytest
import torch

from kernels import kda_baselines, kda_check, kda_task
from kernels.kda_measure import measure_kda
from kernels.kda_prefill import Schedule, choose_schedule, implementation, kda_prefill, kda_prefill_triton
from kernels.kda_reference import kda_reference
from kernels.kda_regimes import REGIMES, error_ratio, kda_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BOTH = pytest.mark.parametrize("prefill", [kda_prefill, kda_prefill_triton])
LIMIT = {"checkpoint": 2e-2, "collinear keys": 2e-2}


def inputs(lengths, heads=2, **options):
    return kda_inputs(lengths, heads, **({"dtype": torch.bfloat16, "device": "cuda"} | options))


def errors(prefill, arguments, keywords, schedule=None):
    found = prefill(*arguments, **keywords, schedule=schedule)
    return max(error_ratio(a, b) for a, b in zip(found, kda_reference(*arguments, **keywords), strict=True))


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(prefill, regime):
    assert errors(prefill, *inputs([300, 0, 65, 17, 1], regime=regime)) < LIMIT.get(regime, 6e-3)


@BOTH
@pytest.mark.parametrize(
    "schedule",
    [Schedule(128, 8, 3), Schedule(64, 4, 3), Schedule(32, 4, 2), Schedule(64, 4, 3, 4), Schedule(32, 4, 2, 1)],
    ids=str,
)
def test_states_reach_through_many_chunks(prefill, schedule):
    """Without decay a mistake in any chunk, segment or transfer stays in everything behind it."""
    if schedule.warps == 8 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a schedule for Hopper")
    assert errors(prefill, *inputs([2100, 130], regime="weak decay"), schedule) < 1e-2


@BOTH
def test_segmented_agrees_with_serial(prefill):
    arguments, keywords = inputs([3000, 900], regime="weak decay")
    serial = prefill(*arguments, **keywords, schedule=Schedule(64, 4, 3))
    cut = prefill(*arguments, **keywords, schedule=Schedule(64, 4, 3, 8))
    assert all(error_ratio(a, b) < 6e-3 for a, b in zip(cut, serial, strict=True))


def test_both_implementations_agree():
    arguments, keywords = inputs([513], heads=5, regime="weak decay")
    first, second = (prefill(*arguments, **keywords) for prefill in (kda_prefill, kda_prefill_triton))
    assert all(error_ratio(a, b) < 5e-3 for a, b in zip(first, second, strict=True))


def test_the_check_that_ships_passes():
    rows = kda_check.run("cuda")
    assert len(rows) >= len(REGIMES) and all(row["ok"] for row in rows), rows


@BOTH
def test_equal_inputs_give_equal_bits(prefill):
    arguments, keywords = inputs([700, 64, 33], heads=8, regime="weak decay")
    first = prefill(*arguments, **keywords)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(prefill(*arguments, **keywords), first, strict=True))


@BOTH
def test_later_tokens_change_no_bit_of_earlier_outputs(prefill):
    arguments, keywords = inputs([200])
    before, _ = prefill(*arguments, **keywords)
    for tensor in arguments:
        tensor[:, 110:] = torch.randn_like(tensor[:, 110:])
    after, _ = prefill(*arguments, **keywords)
    assert torch.equal(after[:, :110], before[:, :110])


def test_half_precision_inputs():
    arguments, keywords = inputs([300, 65], dtype=torch.float16, regime="weak decay")
    o, _ = kda_prefill(*arguments, **keywords)
    assert o.dtype == torch.float16
    assert errors(kda_prefill, arguments, keywords) < 6e-3


@BOTH
def test_strides_are_honored(prefill):
    (q, k, v, g, beta), keywords = inputs([150], batch=2)
    wanted = prefill(q, k, v, g, beta, **keywords)
    fused = torch.cat([q, k, v], dim=-1)
    heads_first = g.transpose(1, 2).contiguous().transpose(1, 2)
    target = torch.full((2, 150, 2, 384), torch.nan, dtype=torch.bfloat16, device="cuda")
    found = prefill(*fused.split(128, dim=-1), heads_first, beta, **keywords, out=target[..., 128:256])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert target[..., :128].isnan().all() and target[..., 256:].isnan().all()


def test_rows_off_16_bytes_run_on_the_portable_source():
    arguments, keywords = inputs([100])
    wide = torch.zeros(*arguments[0].shape[:3], 132, dtype=torch.bfloat16, device="cuda")
    wide[..., 1:129] = arguments[0]
    assert errors(kda_prefill, (wide[..., 1:129], *arguments[1:]), keywords) < 6e-3


@BOTH
def test_a_captured_graph_follows_values_and_lengths(prefill):
    arguments, keywords = inputs([100, 60, 40], regime="weak decay")
    prefill(*arguments, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = prefill(*arguments, **keywords)
    for lengths in ([100, 60, 40], [0, 1, 199], [64, 136, 0]):
        keywords["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        for tensor in arguments[:4]:
            tensor.normal_()
        o.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        wanted = kda_reference(*arguments, **keywords)
        assert max(error_ratio(a, b) for a, b in zip((o, final), wanted, strict=True)) < 6e-3


def test_few_heads_and_long_sequences_are_cut():
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    target = "sm_90" if implementation("cuda") != "triton" else "cuda"
    assert choose_schedule(target=target, sms=sms, sequences=1, heads=2, tokens=8192).segment
    arguments, keywords = inputs([8192], regime="weak decay")
    cut = kda_prefill(*arguments, **keywords)
    whole = kda_prefill(
        *arguments, **keywords, schedule=Schedule(64, 4, 3) if target == "sm_90" else Schedule(32, 4, 2)
    )
    assert all(error_ratio(a, b) < 1e-2 for a, b in zip(cut, whole, strict=True))


@pytest.mark.parametrize("name", [kda_baselines.FLA, kda_baselines.FLASH_KDA])
def test_a_baseline_runs_its_own_kernels_and_agrees(name):
    if not kda_baselines.installed(name):
        pytest.skip(f"{name} is not installed")
    arguments, keywords = inputs([300, 64, 100], heads=4)
    keywords.pop("gate")
    call = kda_baselines.prepare(name, *arguments, **keywords)
    found = [x.clone() for x in call()]
    kda_baselines.assert_backend(name, kda_baselines.kernels_of(call))
    wanted = kda_reference(*arguments, **keywords)
    assert max(error_ratio(a, b) for a, b in zip(found, wanted, strict=True)) < 8e-3


def test_a_baseline_that_fails_is_missing_from_its_row_and_the_others_are_timed(monkeypatch):
    def prepare(name, q, k, v, g, beta, **keywords):
        def call():
            if name == kda_baselines.FLA:
                raise RuntimeError("no such kernel\nand more of it")
            return kda_prefill_triton(q, k, v, g, beta, **keywords)

        return call

    monkeypatch.setattr(kda_baselines, "prepare", prepare)
    monkeypatch.setattr(kda_baselines, "assert_backend", lambda name, kernels: None)
    names = (kda_baselines.FLA, kda_baselines.FLASH_KDA)
    record = measure_kda(torch.device("cuda"), kda_task.AWKWARD[2:3], baselines=names)
    (row,) = record["rows"]
    assert set(row["us"]) == {"ours", kda_baselines.FLASH_KDA} and row["status"] in ("ok", "unstable")
    assert row["missing"] == {kda_baselines.FLA: f"{kda_baselines.FLA} failed: RuntimeError: no such kernel"}

"""The portable KDA kernels in Triton's interpreter: test_kda_prefill.py runs this file with TRITON_INTERPRET=1.

The interpreter computes in fp32 and runs one program after another: it shows the algorithm, not rounding, races or
speed.
"""

import pytest
import torch

from kernels.kda_prefill import Schedule, implementation, kda_prefill
from kernels.kda_reference import kda_reference
from kernels.kda_regimes import REGIMES, error_ratio, kda_inputs

SERIAL = Schedule(block_v=128, warps=8, stages=2)
BITS = torch.int32


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def errors(arguments, keywords, schedule=SERIAL):
    found = kda_prefill(*arguments, **keywords, schedule=schedule)
    return tuple(error_ratio(a, b) for a, b in zip(found, kda_reference(*arguments, **keywords), strict=True))


LIMIT = 1e-5


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(regime):
    assert max(errors(*kda_inputs([100], regime=regime, state=False))) < LIMIT


@pytest.mark.parametrize("lengths", [[1], [15], [16, 17], [63, 0, 64], [65], [0, 0, 1, 0]], ids=str)
def test_lengths_side_by_side(lengths):
    assert max(errors(*kda_inputs(lengths, regime="weak decay"))) < LIMIT


@pytest.mark.parametrize("tokens", [7, 64])
def test_batch_of_equal_lengths(tokens):
    assert max(errors(*kda_inputs([tokens], batch=2, state=False))) < LIMIT


@pytest.mark.parametrize("lengths, segment", [([200], 1), ([230], 2), ([0, 70, 0, 130], 1), ([65], 4), ([0], 1)])
def test_segmented_equals_serial(lengths, segment):
    """Without decay, so that what a segment starts from shows in its last output."""
    arguments, keywords = kda_inputs(lengths, regime="weak decay")
    serial = kda_prefill(*arguments, **keywords, schedule=SERIAL)
    cut = kda_prefill(*arguments, **keywords, schedule=Schedule(128, 8, 2, segment))
    assert all(error_ratio(a, b) < LIMIT for a, b in zip(cut, serial, strict=True))


def test_segments_of_a_batch():
    arguments, keywords = kda_inputs([130], batch=2, regime="weak decay")
    assert max(errors(arguments, keywords, Schedule(128, 8, 2, 1))) < LIMIT


def test_the_block_of_columns_changes_nothing():
    arguments, keywords = kda_inputs([70])
    wide = kda_prefill(*arguments, **keywords, schedule=Schedule(128, 8, 2))
    narrow = kda_prefill(*arguments, **keywords, schedule=Schedule(32, 4, 2))
    # not bit for bit: NumPy's products, by which the interpreter computes, sum in an order that shapes and CPUs decide
    assert max(error_ratio(a, b) for a, b in zip(narrow, wide, strict=True)) < 1e-6


def test_a_sequence_continues_from_its_final_state():
    arguments, keywords = kda_inputs([100], regime="weak decay")
    whole, final = kda_prefill(*arguments, **keywords)
    keywords["cu_seqlens"] = None
    o1, keywords["initial_state"] = kda_prefill(*(x[:, :37] for x in arguments), **keywords)
    o2, end = kda_prefill(*(x[:, 37:] for x in arguments), **keywords)
    assert error_ratio(torch.cat([o1, o2], 1), whole) < LIMIT and error_ratio(end, final) < LIMIT


def test_an_empty_sequence_keeps_its_state():
    arguments, keywords = kda_inputs([0, 5, 0])
    _, final = kda_prefill(*arguments, **keywords)
    assert torch.equal(final[[0, 2]], keywords["initial_state"][[0, 2]])
    _, final = kda_prefill(*arguments, **(keywords | {"initial_state": None}))
    assert not final[[0, 2]].any()


@pytest.mark.parametrize("changed_from", [1, 16, 40, 64])
def test_later_tokens_change_no_bit_of_earlier_outputs(changed_from):
    arguments, keywords = kda_inputs([80])
    before, _ = kda_prefill(*arguments, **keywords, schedule=SERIAL)
    for tensor in arguments:
        tensor[:, changed_from:] = torch.randn_like(tensor[:, changed_from:]) * 3
    after, _ = kda_prefill(*arguments, **keywords, schedule=SERIAL)
    assert torch.equal(after[:, :changed_from].view(BITS), before[:, :changed_from].view(BITS))
    assert not torch.equal(after, before)


def test_sequences_do_not_touch():
    """Neighbors that hold NaN stay where they are."""
    arguments, keywords = kda_inputs([20, 40, 9])
    alone, state = kda_prefill(*arguments, **keywords, schedule=SERIAL)
    for tensor in arguments:
        tensor[:, :20], tensor[:, 60:] = torch.nan, torch.nan
    o, final = kda_prefill(*arguments, **keywords, schedule=SERIAL)
    assert torch.equal(o[:, 20:60], alone[:, 20:60]) and torch.equal(final[1], state[1])


def test_strides_are_honored():
    (q, k, v, g, beta), keywords = kda_inputs([40], heads=2, batch=2)
    wanted = kda_prefill(q, k, v, g, beta, **keywords)
    fused = torch.cat([q, k, v], dim=-1)
    heads_first = g.transpose(1, 2).contiguous().transpose(1, 2)
    every_second = torch.stack([beta, torch.full_like(beta, torch.nan)], dim=-1)[..., 0]
    target = torch.full((2, 40, 2, 300), torch.nan)
    found = kda_prefill(*fused.split(128, dim=-1), heads_first, every_second, **keywords, out=target[..., 100:228])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert target[..., :100].isnan().all() and target[..., 228:].isnan().all()


def test_inputs_are_left_as_they_are():
    arguments, keywords = kda_inputs([30])
    tensors = (*arguments, keywords["initial_state"], keywords["A_log"], keywords["dt_bias"], keywords["cu_seqlens"])
    copies = [tensor.clone() for tensor in tensors]
    kda_prefill(*arguments, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_lengths_may_be_32_bit_and_end_at_the_last_token():
    arguments, keywords = kda_inputs([30, 50])
    wanted = kda_prefill(*arguments, **keywords)
    keywords["cu_seqlens"] = torch.tensor([0, 30, 1000], dtype=torch.int32)  # beyond the 80 tokens there are
    assert all(torch.equal(a, b) for a, b in zip(kda_prefill(*arguments, **keywords), wanted, strict=True))


def test_tokens_of_no_sequence_are_not_written():
    arguments, keywords = kda_inputs([30, 50])
    keywords["cu_seqlens"] = torch.tensor([0, 30, 60])
    out = torch.full_like(arguments[2], 7)
    kda_prefill(*arguments, **keywords, out=out)
    assert (out[:, 60:] == 7).all() and (out[:, :60] != 7).all()


def test_nothing_to_do():
    arguments, keywords = kda_inputs([5])
    keywords |= {"cu_seqlens": torch.tensor([0]), "initial_state": None}
    o, final = kda_prefill(*arguments, **keywords)
    assert o.shape == (1, 5, 1, 128) and final.shape == (0, 1, 128, 128)
    arguments, keywords = kda_inputs([0], batch=2)
    for schedule in (None, Schedule(128, 8, 2, 1)):
        o, final = kda_prefill(*arguments, **keywords, schedule=schedule)
        assert o.shape == (2, 0, 1, 128) and torch.equal(final, keywords["initial_state"])


def test_what_runs_here():
    assert implementation("cpu") == "triton"

"""KDA prefill as a task: its workloads, its inputs, and a gate that lets nothing wrong through."""

import re

import pytest
import torch

from kernels.kda_prefill import kda_prefill
from kernels.kda_task import (
    AWKWARD,
    DEFINITION,
    MIXED,
    TECHNIQUES,
    WORKLOADS,
    KDAWorkload,
    compare,
    keywords,
    make_inputs,
    reference,
)
from kernels.tasks import load_task

CPU = torch.device("cpu")
SMALL = KDAWorkload(0, "small", 2, (3, 0, 9))


@pytest.fixture(scope="module")
def answer():
    o, state = reference(make_inputs(SMALL, 1, CPU))
    return o, state


def test_the_task_is_listed():
    task = load_task("kda-prefill")
    assert (task.name, task.device, task.entry_point) == ("kda-prefill", "cuda", "kda_prefill")
    assert len(task.workloads) == 14 and [w.index for w in task.workloads] == list(range(14))
    assert {task.workloads[i].index for i in task.feedback} < set(range(14))
    assert task.workloads[1].lens == MIXED and sum(MIXED) == 8192
    assert len({w.index for w in (*task.workloads, *task.awkward)}) == 14 + len(AWKWARD)


def test_bytes_that_must_move():
    """96 heads, 8,192 tokens: five bf16 rows of 128 and a bf16 number a token and head, and two fp32 states a head."""
    assert WORKLOADS[0].bytes_moved == 96 * (8192 * 1282 + 2 * 65536)
    assert WORKLOADS[0].tokens == 8192 and WORKLOADS[0].batch == 1


def test_inputs_follow_the_definition_and_the_seed():
    first, again, other = (make_inputs(SMALL, seed, CPU) for seed in (1, 1, 2))
    q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, state, starts = first
    assert {tuple(x.shape) for x in (q, k, v, g)} == {(1, 12, 2, 128)} and beta.shape == (1, 12, 2)
    assert {x.dtype for x in (q, k, v, g, beta)} == {torch.bfloat16}
    assert {x.dtype for x in (A_log, dt_bias, state)} == {torch.float32} and state.shape == (3, 2, 128, 128)
    assert starts.tolist() == [0, 3, 3, 12] and (scale, lower_bound) == (128**-0.5, -5.0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if isinstance(a, torch.Tensor))
    assert not torch.equal(first[0], other[0])


def test_keywords_are_those_of_the_kernel():
    from inspect import signature

    assert set(keywords(make_inputs(SMALL, 1, CPU))) < set(signature(kda_prefill).parameters)


def test_the_gate_passes_a_rounded_answer(answer):
    o, state = answer
    errors = compare((o.bfloat16(), state.float()), answer)
    assert errors.ok and 1e-4 < errors.error_ratio < 4e-3 and errors.lse_error < 1e-6


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda o, s: o, "returned Tensor, must return (o, final_state)"),
        (lambda o, s: (o.float(), s), "o is torch.float32 [1, 12, 2, 128], must be torch.bfloat16 [1, 12, 2, 128]"),
        (lambda o, s: (o, s.bfloat16()), "final_state is torch.bfloat16"),
        (lambda o, s: (o, None), "final_state is NoneType, must be torch.float32"),
        (lambda o, s: (o[:, :11], s), "o is torch.bfloat16 [1, 11, 2, 128]"),
        (lambda o, s: (torch.zeros_like(o), s), "o has error ratio 1.00e+00, must be at most 6e-03"),
        (lambda o, s: (o, s.transpose(2, 3).contiguous()), "final_state has error ratio"),
        (lambda o, s: (o * 1.01, s), "o has error ratio"),
        (lambda o, s: (o.index_fill(1, torch.tensor([4]), torch.nan), s), "o has error ratio inf"),
        (lambda o, s: (o, s.index_fill(0, torch.tensor([1]), torch.inf)), "final_state has error ratio inf"),
    ],
)
def test_the_gate_stops_a_wrong_answer(answer, spoil, reason):
    errors = compare(spoil(answer[0].bfloat16(), answer[1].float()), answer)
    assert not errors.ok and reason in errors.reason


def test_techniques_are_regular_expressions_and_the_definition_names_the_function():
    assert all(re.compile(pattern) for pattern in TECHNIQUES.values())
    assert (
        "`kda_prefill(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens)`" in DEFINITION
    )

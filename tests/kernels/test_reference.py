"""The reference against an independent formula, and the gate against everything that must not pass it."""

import math
import re

import pytest
import torch

from kernels.reference import ERROR_RATIO_LIMIT, compare, mla_paged_decode_reference

SM_SCALE = 0.1352337747812271


def make(lens=(5, 0, 3), page_size=1, pages=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q_nope, q_pe = (torch.randn(len(lens), 4, d, generator=generator).bfloat16() for d in (32, 8))
    caches = [torch.randn(pages, page_size, d, generator=generator).bfloat16() for d in (32, 8)]
    counts = [-(-n // page_size) for n in lens]
    kv_indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    kv_indices = torch.randperm(pages, generator=generator)[: sum(counts)].int()
    return q_nope, q_pe, *caches, kv_indptr, kv_indices, SM_SCALE


def token_by_token(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, lens):
    """The definition in plain Python numbers, one (request, head) at a time."""
    page_size = ckv_cache.shape[1]
    out, lse = (
        torch.zeros(q_nope.shape, dtype=torch.float64),
        torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float64),
    )
    for b, length in enumerate(lens):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].tolist()
        tokens = [(pages[t // page_size], t % page_size) for t in range(length)]
        for h in range(q_nope.shape[1]):
            weights = []
            for page, slot in tokens:
                score = sum(float(a) * float(c) for a, c in zip(q_nope[b, h], ckv_cache[page, slot]))
                score += sum(float(a) * float(c) for a, c in zip(q_pe[b, h], kpe_cache[page, slot]))
                weights.append(math.exp(score * sm_scale))
            if weights:
                lse[b, h] = math.log2(sum(weights))
                rows = [w * ckv_cache[page, slot].double() for w, (page, slot) in zip(weights, tokens)]
                out[b, h] = sum(rows) / sum(weights)
    return out, lse


@pytest.mark.parametrize(("lens", "page_size"), [((5, 0, 3), 1), ((1,), 1), ((7, 4, 9, 1), 4)])
def test_reference_is_the_definition(lens, page_size):
    inputs = make(lens, page_size)
    kv_lens = torch.tensor(lens, dtype=torch.int32) if page_size > 1 else None
    out, lse = mla_paged_decode_reference(*inputs, kv_lens)
    wanted_out, wanted_lse = token_by_token(*inputs, lens)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, wanted_out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-10, atol=1e-12)


def test_reference_reads_no_page_that_is_not_listed_and_nothing_behind_the_last_offset():
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale = make()
    wanted = mla_paged_decode_reference(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale)
    unlisted = torch.ones(32, dtype=torch.bool).index_fill(0, kv_indices.long(), False)
    ckv_cache[unlisted] = kpe_cache[unlisted] = math.nan
    longer = torch.cat([kv_indices, torch.tensor([2_147_480_000], dtype=torch.int32)])
    found = mla_paged_decode_reference(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, longer, sm_scale)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.fixture
def answer():
    reference = mla_paged_decode_reference(*make())
    return (reference[0].bfloat16(), reference[1].float()), reference


def test_a_right_answer_passes_with_small_errors(answer):
    outputs, reference = answer
    errors = compare(outputs, reference)
    assert errors.ok and errors.reason == ""
    assert 0 < errors.error_ratio < 4e-3
    assert errors.max_abs < 1e-2 and errors.lse_error < 1e-5
    assert reference[1][1].isinf().all(), "the fixture has an empty request"


def spoiled(outputs, which, at, value):
    outputs = [o.clone() for o in outputs]
    outputs[which][at] = value
    return tuple(outputs)


@pytest.mark.parametrize(
    ("which", "at", "value", "message"),
    [
        (0, (0, 1, 2), math.nan, r"out\[0, 1, 2\] is nan"),
        (0, (2, 3, 31), 1e4, r"out\[2, 3, 31\] is 9984"),
        (0, (1, 0, 0), 0.02, r"out\[1, 0, 0\] is 0.02\d*, must be 0; 1 elements differ"),
        (0, (0, 0, 0), math.inf, r"out\[0, 0, 0\] is inf"),
        (1, (0, 2), math.nan, r"lse\[0, 2\] is nan"),
        (1, (0, 2), -math.inf, r"lse\[0, 2\] is -inf"),
        (1, (1, 2), -1e30, r"lse\[1, 2\] is -1e\+30, must be -inf"),
        (1, (1, 2), 0.0, r"lse\[1, 2\] is 0, must be -inf"),
        (1, (1, 2), math.nan, r"lse\[1, 2\] is nan"),
    ],
)
def test_one_wrong_element_fails_and_is_named(answer, which, at, value, message):
    errors = compare(spoiled(answer[0], which, at, value), answer[1])
    assert not errors.ok
    assert re.match(message, errors.reason), errors.reason


def test_zeros_fail_however_small_the_outputs_are(answer):
    _, (out, lse) = answer
    small = out * 1e-4
    errors = compare((torch.zeros_like(small).bfloat16(), lse.float()), (small, lse))
    assert errors.max_abs < 1e-2
    assert not errors.ok and errors.reason == f"out has error ratio 1.00e+00, must be at most {ERROR_RATIO_LIMIT:.2e}"


def test_one_wrong_request_of_many_small_ones_fails():
    generator = torch.Generator().manual_seed(1)
    out, lse = 1e-3 * torch.randn(64, 16, 512, generator=generator).double(), torch.zeros(64, 16).double()
    wrong = out.clone()
    wrong[17] = 0
    assert (wrong - out).norm() / out.norm() < 0.2
    errors = compare((wrong.bfloat16(), lse.float()), (out, lse))
    assert not errors.ok and errors.error_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_accepts_nothing(answer, bad):
    outputs, reference = answer
    errors = compare(outputs, spoiled(reference, 0, (0, 0, 0), bad))
    assert not errors.ok and "the reference's out is not finite" in errors.reason
    assert not compare(spoiled(outputs, 0, (0, 0, 0), bad), spoiled(reference, 0, (0, 0, 0), bad)).ok


def test_shape_dtype_and_type_are_exact(answer):
    (out, lse), reference = answer

    class Lazy(torch.Tensor):
        pass

    cases = {
        "returned Tensor, must return (out, lse)": out,
        "returned NoneType, must return (out, lse)": None,
        "returned tuple, must return (out, lse)": (out,),
        "out is torch.float32 [3, 4, 32] on cpu, must be torch.bfloat16 [3, 4, 32] on cpu": (out.float(), lse),
        "lse is torch.bfloat16 [3, 4] on cpu, must be torch.float32 [3, 4] on cpu": (out, lse.bfloat16()),
        "lse is torch.float32 [4, 3] on cpu, must be torch.float32 [3, 4] on cpu": (out, lse.T),
        "out is Lazy, must be a plain torch.Tensor": (out.as_subclass(Lazy), lse),
        "lse is float, must be a plain torch.Tensor": (out, 1.0),
    }
    for message, outputs in cases.items():
        errors = compare(outputs, reference)
        assert (errors.ok, errors.reason) == (False, message)
        assert errors.error_ratio == math.inf
    assert compare((out.half(), lse), reference, out_dtype=torch.float16).ok


def test_the_error_ratio_limit_is_the_callers(answer):
    outputs, reference = answer
    ratio = compare(outputs, reference).error_ratio
    assert compare(outputs, reference, error_ratio_limit=ratio * 1.01).ok
    assert not compare(outputs, reference, error_ratio_limit=ratio * 0.99).ok


def test_no_requests_at_all():
    reference = mla_paged_decode_reference(*make(lens=()))
    errors = compare((reference[0].bfloat16(), reference[1].float()), reference)
    assert errors.ok and errors.error_ratio == 0.0

"""The portable kernel in Triton's interpreter: test_mla_paged_decode.py runs this file with TRITON_INTERPRET=1.

The interpreter runs programs one after another, so the last program of a group is always the one that merges.
"""

import math

import pytest
import torch
from mla_inputs import paged_inputs

from kernels import mla_paged_decode_triton as portable
from kernels.mla_paged_decode import MLAInputError, implementation, mla_paged_decode
from kernels.reference import compare, mla_paged_decode_reference


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def errors_of(lengths, **options):
    arguments, kv_lens = paged_inputs(lengths, **options)
    outputs = mla_paged_decode(*arguments, kv_lens=kv_lens)
    return compare(outputs, mla_paged_decode_reference(*arguments, kv_lens), out_dtype=arguments[0].dtype)


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [0],
        [0, 0, 0],
        [63, 64, 65],
        [300, 0, 1, 70],
        [0, 0, 700],  # one request in several pieces: a merge
        [5, 0, 2000, 3],
        [1] * 70,  # the plan looks at more requests than there are threads in a warp
    ],
)
def test_lengths(lengths):
    errors = errors_of(lengths)
    assert errors.ok, errors.reason


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_heads(heads):
    errors = errors_of([130, 0, 33], heads=heads, dtype=torch.float16)
    assert errors.ok, errors.reason


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_page_sizes_with_a_partly_filled_last_page(page_size, dtype):
    errors = errors_of([129, 1, 0, page_size, page_size + 1], page_size=page_size, dtype=dtype)
    assert errors.ok, errors.reason


@pytest.mark.parametrize("page_size", [1, 16])
def test_slices_of_fused_tensors(page_size):
    errors = errors_of([200, 31], page_size=page_size, fused=True)
    assert errors.ok, errors.reason


def test_indptr_that_starts_above_zero_and_garbage_on_both_sides():
    errors = errors_of([90, 0, 40], first=3, tail=100)
    assert errors.ok, errors.reason


def test_shared_pages():
    errors = errors_of([50, 60, 70], shared_pages=9)
    assert errors.ok, errors.reason


def test_a_merge_of_several_levels(monkeypatch):
    """70 pieces of 8 tokens in groups of 4: 18 groups, then 5, then 2, then 1."""
    monkeypatch.setattr(portable, "MIN_CHUNK", 8)
    monkeypatch.setattr(portable, "FAN_IN", 4)
    monkeypatch.setattr(portable, "_num_sms", lambda device: 80)
    errors = errors_of([560, 9], dtype=torch.float16)
    assert errors.ok, errors.reason
    assert portable._arrivals_of_stream[torch.device("cpu"), 0].numel() >= 4 * 160


@pytest.mark.parametrize("lengths", [[70, 0, 700, 3, 0, 5, 64], [0] * 9, [1] * 9])
def test_a_batch_of_several_blocks_in_the_plan(monkeypatch, lengths):
    monkeypatch.setattr(portable, "BATCH_BLOCKS", (1, 2))
    errors = errors_of(lengths)
    assert errors.ok, errors.reason


def test_counters_are_zero_after_every_launch():
    for lengths in ([700, 3], [0], [900] * 3):
        assert errors_of(lengths).ok
        assert all(counters.count_nonzero() == 0 for counters in portable._arrivals_of_stream.values())
    assert portable._arrivals_of_stream


def test_scores_far_below_any_sentinel():
    """Tokens with scores near -1e6 are still the whole softmax, and pieces of them still merge to weights of sum 1."""
    arguments, _ = paged_inputs([1, 300], dtype=torch.float16)
    query, cache = torch.full_like(arguments[0], 40.0), arguments[2]
    cache.masked_fill_(~cache.isnan(), -40.0)
    arguments = (query, *arguments[1:6], 1.25)
    out, lse = mla_paged_decode(*arguments)
    reference = mla_paged_decode_reference(*arguments)
    assert reference[1].max() < -1e6
    assert compare((out, lse), reference, out_dtype=torch.float16).ok


def test_scores_of_minus_infinity():
    """More than a tile of them before the first finite score: a product of bf16 numbers can be beyond fp32."""
    arguments, _ = paged_inputs([300])
    query, cache, pages = arguments[0], arguments[2], arguments[5][:300].long()
    query[..., 0] = 1e30
    cache[pages, 0, 0] = torch.where(torch.arange(300) < 200, -1e30, 0.0).bfloat16()
    out, lse = mla_paged_decode(*arguments)
    assert compare((out, lse), mla_paged_decode_reference(*arguments)).ok


def test_kv_lens_below_the_pages_and_below_zero():
    arguments, _ = paged_inputs([40, 40, 40], page_size=1)
    kv_lens = torch.tensor([40, 17, -3], dtype=torch.int32)
    out, lse = mla_paged_decode(*arguments, kv_lens=kv_lens)
    reference = mla_paged_decode_reference(*arguments, kv_lens.clamp(min=0))
    assert compare((out, lse), reference).ok
    assert out[2].count_nonzero() == 0 and torch.all(lse[2] == -math.inf)


def test_kv_lens_above_the_pages_reads_no_other_page():
    arguments, _ = paged_inputs([40, 24], page_size=1, tail=50)
    outputs = mla_paged_decode(*arguments, kv_lens=torch.tensor([400, 400], dtype=torch.int32))
    assert compare(outputs, mla_paged_decode_reference(*arguments)).ok


def test_given_outputs_are_written_and_returned():
    arguments, _ = paged_inputs([70, 5])
    out = torch.full_like(arguments[0], math.nan)
    lse = torch.full(out.shape[:2], math.nan)
    returned = mla_paged_decode(*arguments, out=out, lse=lse)
    assert returned[0] is out and returned[1] is lse
    assert compare(returned, mla_paged_decode_reference(*arguments)).ok


def test_no_requests_and_no_pages():
    arguments, _ = paged_inputs([], tail=0)
    out, lse = mla_paged_decode(*arguments)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
    arguments, _ = paged_inputs([0, 0], tail=0)
    assert arguments[5].numel() == 0
    out, lse = mla_paged_decode(*arguments)
    assert out.count_nonzero() == 0 and torch.all(lse == -math.inf)


def test_equal_inputs_give_equal_bits():
    arguments, _ = paged_inputs([800, 90, 0])
    first, second = mla_paged_decode(*arguments), mla_paged_decode(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_changed_values_in_the_same_buffers_are_seen():
    """Lengths and rows change under unchanged addresses, as in a decoding loop."""
    arguments, _ = paged_inputs([60, 60])
    mla_paged_decode(*arguments)
    arguments[4].copy_(torch.tensor([0, 11, 90], dtype=torch.int32))
    arguments[2].copy_(arguments[2].flip(2))
    assert compare(mla_paged_decode(*arguments), mla_paged_decode_reference(*arguments)).ok


def test_a_layout_is_checked_once_and_addresses_every_time(monkeypatch):
    from kernels import mla_paged_decode_arguments as module

    calls = []
    check_layout = module.check_layout
    monkeypatch.setattr(module, "_passed", set())
    monkeypatch.setattr(module, "check_layout", lambda *tensors: (calls.append(1), check_layout(*tensors)))
    arguments, _ = paged_inputs([9, 4], fused=True)
    mla_paged_decode(*arguments)
    mla_paged_decode(*arguments[:5], arguments[5][:-2].clone(), arguments[6])  # another length of kv_indices
    assert len(calls) == 1
    shifted = torch.zeros(2 * 16 * 576 + 4, dtype=torch.bfloat16)[4:].view(2, 16, 576)[..., :512]
    assert shifted.stride() == arguments[0].stride()
    with pytest.raises(MLAInputError, match="q_nope starts 8 bytes past a multiple of 16 bytes"):
        mla_paged_decode(shifted, *arguments[1:])
    assert len(calls) == 1


def test_the_memory_of_checked_layouts_is_bounded(monkeypatch):
    from kernels import mla_paged_decode_arguments as module

    monkeypatch.setattr(module, "_passed", set())
    monkeypatch.setattr(module, "_MAX_PASSED", 2)
    for batch in range(1, 6):
        mla_paged_decode(*paged_inputs([1] * batch)[0])
        assert len(module._passed) <= 2


def test_implementation_names_the_back_end():
    assert implementation("cpu") == "triton"


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_custom_op_keeps_its_contract(page_size):
    arguments, kv_lens = paged_inputs([20, 3], page_size=page_size)
    out, lse = torch.empty_like(arguments[0]), torch.empty(2, 16)
    torch.library.opcheck(torch.ops.mla.paged_decode.default, (*arguments, kv_lens, out, lse))


def test_torch_compile_keeps_the_op_in_one_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    arguments, _ = paged_inputs([20, 33], fused=True)
    step = torch.compile(lambda *tensors: mla_paged_decode(*tensors)[0] * 2, fullgraph=True, backend=backend)
    out = step(*arguments)
    (graph,) = graphs
    assert "mla.paged_decode" in " ".join(str(node.target) for node in graph.graph.nodes)
    assert torch.equal(out, mla_paged_decode(*arguments)[0] * 2)


def test_torch_compile_with_functionalization():
    arguments, _ = paged_inputs([20, 33])
    step = torch.compile(lambda *tensors: mla_paged_decode(*tensors), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(step(*arguments), mla_paged_decode(*arguments)))


def test_misuse_is_found_while_tracing():
    arguments, _ = paged_inputs([20, 33])
    step = torch.compile(lambda *tensors: mla_paged_decode(*tensors), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"q_pe has shape \[2, 16, 32\]; wanted \[2, 16, 64\]"):
        step(arguments[0], arguments[1][..., :32].contiguous(), *arguments[2:])

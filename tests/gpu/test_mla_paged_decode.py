"""MLA paged decode on a GPU: general inputs, and what a server does with a kernel. Both back ends pass one list."""

import concurrent.futures
import itertools
import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mla_inputs import paged_inputs

from kernels.mla_paged_decode import MLAInputError, implementation, mla_paged_decode
from kernels.mla_paged_decode_triton import mla_paged_decode_triton
from kernels.reference import compare, mla_paged_decode_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GiB = 2**30
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["best", "triton"])
def decode(request):
    if request.param == "triton":
        return mla_paged_decode_triton
    if implementation("cuda") == "triton":
        pytest.skip("mla_paged_decode runs the Triton kernel on this GPU, which is tested anyway")
    return mla_paged_decode


def inputs(lengths, **options):
    return paged_inputs(lengths, device="cuda", **options)


def check(decode, arguments, kv_lens=None, **keywords):
    outputs = decode(*arguments, kv_lens=kv_lens, **keywords)
    errors = compare(outputs, mla_paged_decode_reference(*arguments, kv_lens), out_dtype=arguments[0].dtype)
    assert errors.ok, errors.reason
    return outputs


def poisoned(arguments):
    out = torch.full_like(arguments[0], math.nan, memory_format=torch.contiguous_format)
    return {"out": out, "lse": torch.full(out.shape[:2], math.nan, device=out.device)}


def need_memory(size):
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip(f"needs {size / GiB:.0f} GiB of free GPU memory")


LENGTHS = [
    [1], [0], [0, 0, 0], [31], [32], [33], [63, 64, 65], [5000], [40_000],
    [300, 0, 1, 70], [0, 0, 7000], [1] * 65, [1000] * 130, [9000] + [400] * 63, [0, 20_000, 0, 3] * 5,
    [17] * 300, list(range(700)), [0] * 50 + [3000] + [0] * 50,
]  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_lengths(decode, lengths):
    arguments, _ = inputs(lengths)
    check(decode, arguments, **poisoned(arguments))


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_heads_page_sizes_and_dtypes(decode, heads, dtype, page_size):
    lengths = [1500, 0, 1, page_size, page_size + 1, 3 * page_size - 1, 77]
    check(decode, *inputs(lengths, heads=heads, dtype=dtype, page_size=page_size, fused=True))


def test_large_batch(decode):
    check(decode, inputs([i % 90 for i in range(5000)])[0])


def test_a_million_tokens_beside_empty_requests(decode):
    need_memory(16 * GiB)
    check(decode, inputs([0, 1_000_000, 0, 5], tail=0)[0])


def test_pages_past_the_reach_of_32_bit_offsets(decode):
    """Page 4,194,304 times 512 elements is 2^31."""
    need_memory(12 * GiB)
    lengths, pages = [700, 0, 90], 4_300_000
    cache = torch.empty(pages, 1, 576, dtype=torch.bfloat16, device="cuda")
    arguments, _ = inputs(lengths)
    indices = arguments[5].clone()
    indices[:790] = torch.randperm(790, device="cuda").int() + (pages - 800)
    cache[-900:] = math.nan
    cache[indices[:790].long()] = torch.randn(790, 1, 576, device="cuda").bfloat16()
    for ckv, kpe in (
        (cache[..., :512], cache[..., 512:]),
        (cache[..., :512].contiguous(), cache[..., 512:].contiguous()),
    ):
        check(decode, (*arguments[:2], ckv, kpe, arguments[4], indices, arguments[6]))


@pytest.mark.parametrize("page_size", [1, 64])
def test_slices_of_fused_tensors(decode, page_size):
    check(decode, *inputs([900, 31, 0], page_size=page_size, fused=True))


def test_queries_expanded_and_transposed(decode):
    arguments, _ = inputs([80, 300])
    transposed = arguments[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert transposed.stride() == (512, 1024, 1)
    check(decode, (transposed, *arguments[1:]))
    check(decode, (arguments[0][:1].expand(2, 16, 512), *arguments[1:]))


def test_indptr_that_starts_above_zero_and_indices_of_odd_alignment(decode):
    arguments, _ = inputs([90, 0, 4000], first=3, tail=100)
    for shift in range(4):
        indices = torch.cat([arguments[5][:1].expand(shift), arguments[5]])[shift:]
        indptr = torch.cat([arguments[4][:1].expand(shift), arguments[4]])[shift:]
        check(decode, (*arguments[:4], indptr, indices, arguments[6]))


def test_shared_and_repeated_pages(decode):
    check(decode, inputs([500, 60, 2000], shared_pages=50)[0])
    arguments, _ = inputs([500])
    arguments[5][:500] = arguments[5][0].clone()
    check(decode, arguments)


def test_kv_lens_below_and_above_the_pages(decode):
    arguments, _ = inputs([400, 400, 400, 40], tail=500)
    kv_lens = torch.tensor([400, 17, -3, 100_000], dtype=torch.int32, device="cuda")
    expected = mla_paged_decode_reference(*arguments, kv_lens.clamp(0, 400))
    errors = compare(decode(*arguments, kv_lens=kv_lens), expected)
    assert errors.ok, errors.reason


@pytest.mark.parametrize("sm_scale", [0.0, -0.3, 1e-6, 40.0])
def test_scales(decode, sm_scale):
    arguments, _ = inputs([400, 3])
    check(decode, (*arguments[:6], sm_scale))


def test_scores_far_below_any_sentinel(decode):
    arguments, _ = inputs([1, 3000], dtype=torch.float16)
    query, cache = torch.full_like(arguments[0], 40.0), arguments[2]
    cache.masked_fill_(~cache.isnan(), -40.0)
    check(decode, (query, *arguments[1:6], 1.25))


def test_scores_of_minus_infinity(decode):
    """More than a piece of them before the first finite score: a product of bf16 numbers can be beyond fp32."""
    arguments, _ = inputs([3000])
    query, cache, pages = arguments[0], arguments[2], arguments[5][:3000].long()
    query[..., 0] = 1e30
    cache[pages, 0, 0] = torch.where(torch.arange(3000, device="cuda") < 2000, -1e30, 0.0).bfloat16()
    check(decode, arguments)


def test_no_requests_and_no_pages(decode):
    out, lse = decode(*inputs([], tail=0)[0])
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
    arguments, _ = inputs([0, 0], tail=0)
    assert arguments[5].numel() == 0
    check(decode, arguments, **poisoned(arguments))


def test_error_is_that_of_the_output_dtype(decode):
    """Narrower accumulation or partial results would show: rounding the exact result to bf16 costs 1.7e-3."""
    arguments, _ = inputs([3000, 200, 9000])
    out, lse = decode(*arguments)
    expected, expected_lse = mla_paged_decode_reference(*arguments)
    assert compare((out, lse), (expected, expected_lse), error_ratio_limit=4e-3).ok
    assert (lse - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize("lengths", [[9000], [9000] + [400] * 63, [17] * 300])
def test_equal_inputs_give_equal_bits(decode, lengths):
    arguments, _ = inputs(lengths)
    first = decode(*arguments)
    for _ in range(50):
        again = decode(*arguments, **poisoned(arguments))
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_back_to_back_launches_with_changing_lengths(decode):
    """No synchronization in between; rows are appended to the same buffers, as in decoding."""
    steps, start = 40, [0, 500, 31, 1]
    arguments, _ = inputs([n + steps for n in start])
    whole = arguments[4].tolist()
    pages = [arguments[5][whole[b] : whole[b + 1]].clone() for b in range(4)]
    indptr, indices = arguments[4].clone(), torch.full_like(arguments[5], 2_147_480_000)
    outputs, tables = [], []
    for step in range(steps):
        table = torch.cat([pages[b][: start[b] + step] for b in range(4)])
        indptr.copy_(torch.tensor([0, *(sum(start[: b + 1]) + (b + 1) * step for b in range(4))], dtype=torch.int32))
        indices[: len(table)].copy_(table)
        outputs.append(decode(*arguments[:4], indptr, indices, arguments[6]))
        tables.append((indptr.clone(), indices.clone()))
    for output, table in zip(outputs, tables):
        errors = compare(output, mla_paged_decode_reference(*arguments[:4], *table, arguments[6]))
        assert errors.ok, errors.reason


def test_two_streams_at_once(decode):
    jobs = [inputs([6000, 0, 90], seed=1)[0], inputs([800] * 40, seed=2)[0]]
    expected = [decode(*job) for job in jobs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = [[], []]
    for _ in range(200):
        for stream, job, result in zip(streams, jobs, results):
            with torch.cuda.stream(stream):
                result.append(decode(*job))
    torch.cuda.synchronize()
    for result, wanted in zip(results, expected):
        assert all(torch.equal(a, b) for output in result for a, b in zip(output, wanted))


def capture(decode, arguments, kv_lens=None, *, stream=None):
    outputs = poisoned(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            decode(*arguments, kv_lens=kv_lens, **outputs)
    return graph, (outputs["out"], outputs["lse"])


@pytest.mark.parametrize("page_size", [1, 16])
def test_graph_replay_with_other_lengths(decode, page_size):
    """Captured with short requests and room in kv_indices; replayed with lengths from none to that room."""
    room = [4000, 4000, 64, 4000]
    arguments, kv_lens = inputs(room, page_size=page_size, tail=0)
    bounds = arguments[4].clone()
    decode(*arguments, kv_lens=kv_lens)  # compiles
    arguments[4].copy_(torch.arange(5, dtype=torch.int32))
    if kv_lens is not None:
        kv_lens.fill_(3)
    graph, outputs = capture(decode, arguments, kv_lens)
    everything = arguments[5].clone()
    for lengths in (room, [1, 1, 1, 1], [0, 0, 0, 0], [12_000, 0, 0, 64], [0, 5, 64, 3999], room):
        if page_size > 1:
            counts = [-(-n // page_size) for n in lengths]
            kv_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        else:
            counts = lengths
        total = sum(counts)
        arguments[4].copy_(torch.tensor([sum(counts[:b]) for b in range(5)], dtype=torch.int32))
        arguments[5].fill_(2_147_480_000)
        arguments[5][:total] = everything[torch.randperm(int(bounds[4]), device="cuda")[:total]]
        for cache in arguments[2:4]:
            cache.nan_to_num_(nan=0.25)  # the last page is full now where it was not
        for output in outputs:
            output.fill_(math.nan)
        graph.replay()
        errors = compare(outputs, mla_paged_decode_reference(*arguments, kv_lens))
        assert errors.ok, (lengths, errors.reason)


def test_graphs_captured_on_one_stream_and_replayed_on_two(decode):
    jobs = [inputs([7000, 12], seed=1)[0], inputs([1500] * 8, seed=2)[0]]
    expected = [decode(*job) for job in jobs]
    torch.cuda.synchronize()
    captured_on = torch.cuda.Stream()
    captured = [capture(decode, job, stream=captured_on) for job in jobs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(100):
        for stream, (graph, _) in zip(streams, captured):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = decode(*jobs[0])
    torch.cuda.synchronize()
    for (_, outputs), wanted in zip(captured, expected):
        assert all(torch.equal(a, b) for a, b in zip(outputs, wanted))
    assert torch.equal(eager[0], expected[0][0])


def test_two_branches_of_one_graph(decode):
    jobs = [inputs([7000, 12], seed=1)[0], inputs([6000, 300], seed=2)[0]]
    expected = [decode(*job) for job in jobs]
    torch.cuda.synchronize()
    graph, side, outputs = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [poisoned(job) for job in jobs]
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for stream, job, output in zip((main, side), jobs, outputs):
            with torch.cuda.stream(stream):
                for _ in range(4):
                    decode(*job, **output)
        main.wait_stream(side)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    for output, wanted in zip(outputs, expected):
        assert torch.equal(output["out"], wanted[0]) and torch.equal(output["lse"], wanted[1])


def test_first_launch_of_a_stream_inside_a_capture(decode):
    job, _ = inputs([5000, 3])
    expected = decode(*job)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph, outputs = capture(decode, job, stream=stream)
    with torch.cuda.stream(stream):
        before_replay = decode(*job)
        graph.replay()
        after_replay = decode(*job)
    torch.cuda.synchronize()
    for result in (before_replay, outputs, after_replay):
        assert all(torch.equal(a, b) for a, b in zip(result, expected))


def test_a_thread_that_has_not_used_the_gpu(decode):
    arguments, _ = inputs([5000, 3])
    expected, outputs = decode(*arguments), poisoned(arguments)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(decode, *arguments, **outputs).result()
    assert torch.equal(outputs["out"], expected[0]) and torch.equal(outputs["lse"], expected[1])


def test_tensors_on_another_device_than_the_current_one(decode):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments, _ = paged_inputs([700, 0, 33], device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, _ = check(decode, arguments)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0


def test_mixed_devices_are_refused(decode):
    arguments, _ = inputs([5])
    with pytest.raises(MLAInputError, match="kv_indptr is on cpu, q_nope on cuda:0; move them to one device"):
        decode(*arguments[:4], arguments[4].cpu(), *arguments[5:])


@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
def test_torch_compile(backend):
    arguments, _ = inputs([900, 33], fused=True)
    step = torch.compile(lambda *tensors: mla_paged_decode(*tensors)[0].float() * 2, fullgraph=True, backend=backend)
    with torch.inference_mode():
        expected = mla_paged_decode(*arguments)[0].float() * 2
        for _ in range(3):
            assert torch.equal(step(*arguments), expected)


def test_a_killed_process_leaves_nothing_that_harms_the_next(decode):
    endless = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]\n"
        "from mla_inputs import paged_inputs\n"
        f"from {decode.__module__} import {decode.__name__}\n"
        "arguments, _ = paged_inputs([9000, 5], device='cuda')\n"
        f"{decode.__name__}(*arguments); torch.cuda.synchronize(); print('running', flush=True)\n"
        f"while True: {decode.__name__}(*arguments)\n"
    )
    for _ in range(2):
        command = [sys.executable, "-c", endless, str(ROOT), str(ROOT / "tests")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout.readline() == "running\n"
        finally:
            child.kill()
        assert child.wait() == -signal.SIGKILL
        check(decode, inputs([9000, 5])[0])


def random_lengths(draw):
    """Batches as servers see them: uniform, Zipf, one long request among short ones, and many empty ones."""
    batch = draw.choice([1, 1, 2, 3, 7, 16, 40, 64, 65, 129, 200])
    longest = draw.choice([1, 40, 300, 2000])
    kind = draw.choice(["uniform", "zipf", "one", "sparse"])
    if kind == "uniform":
        return [draw.randint(0, longest) for _ in range(batch)]
    if kind == "zipf":
        return [min(int(longest / draw.randint(1, batch)), longest) for _ in range(batch)]
    if kind == "one":
        lengths = [draw.randint(0, 40) for _ in range(batch)]
        lengths[draw.randrange(batch)] = 4 * longest
        return lengths
    return [draw.randint(1, longest) if draw.random() < 0.2 else 0 for _ in range(batch)]


def test_thousands_of_random_launches(decode):
    """Against the reference, with pages, kv_indptr[0], tails, strides, values and lengths drawn anew."""
    draw = random.Random(20)
    pool = torch.randn(60_000, 1, 576, device="cuda").bfloat16()
    query_pool = torch.randn(200, 16, 576, device="cuda").bfloat16()
    pending = []
    for launch in range(5000):
        lengths = random_lengths(draw)
        first, tail = draw.choice([0, 0, 3]), draw.choice([0, 5, 1000])
        total = sum(lengths)
        table = torch.full((first + total + tail,), 2_147_480_000, dtype=torch.int32, device="cuda")
        table[first : first + total] = torch.randint(0, len(pool), (total,), dtype=torch.int32, device="cuda")
        indptr = torch.tensor(list(itertools.accumulate(lengths, initial=first)), dtype=torch.int32, device="cuda")
        query = query_pool[torch.randperm(200, device="cuda")[: len(lengths)]]
        scale = draw.choice([0.135, 0.05, 0.5])
        arguments = (query[..., :512], query[..., 512:], pool[..., :512], pool[..., 512:], indptr, table, scale)
        pending.append((arguments, lengths, decode(*arguments, **poisoned(arguments))))
        if len(pending) == 50:
            for job, of_lengths, (out, lse) in pending:
                expected, expected_lse = batched_reference(job, of_lengths)
                about = f"one of the 50 launches up to {launch}, lengths {of_lengths}"
                torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2, msg=about)
                torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4, msg=about)
            pending.clear()
    assert launch == 4999


def batched_reference(arguments, lengths):
    """fp32 reference of all requests at once, padded to the longest: fast enough for thousands of launches."""
    q_nope, q_pe, ckv, kpe, indptr, indices, scale = arguments
    longest = max(max(lengths), 1)
    position = torch.arange(longest, device="cuda")
    count = (indptr[1:] - indptr[:-1])[:, None]
    valid = position[None, :] < count
    entry = (indptr[:-1, None] + position[None, :]).long().masked_fill(~valid, 0)
    page = indices[entry].long().masked_fill(~valid, 0) if len(indices) else torch.zeros_like(entry)
    keys = torch.cat([ckv[page, 0], kpe[page, 0]], -1).float().masked_fill(~valid[..., None], 0.0)
    scores = torch.einsum("bhd,bnd->bhn", torch.cat([q_nope, q_pe], -1).float(), keys) * scale
    scores.masked_fill_(~valid[:, None, :], -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)
    return weights @ keys[..., :512], torch.logsumexp(scores, -1) / math.log(2)

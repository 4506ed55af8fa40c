"""MLA paged decode in plain Triton: the path for every GPU without a tuned kernel, for Triton's interpreter, and for readers.

One launch of independent programs, a program an item = (request, piece of its tokens). No program waits for another,
so the grid need not be co-resident:

1. plan    every program reads kv_indptr, picks the chunk size that fills the grid and finds its own item;
2. attend  online softmax over the tokens of the piece;
3. merge   of every FAN_IN neighboring pieces the program that arrives last merges them and goes on one level up, until
           one piece is left. The groups depend on the lengths alone, so equal inputs give equal bits.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .mla_paged_decode import HEAD_DIM_CKV, HEAD_DIM_KPE, MLAInputError, checked_launch

CANDIDATES = tl.constexpr(8)  # chunk sizes that the plan tries
CHUNK_UNIT = tl.constexpr(8)  # chunks and pieces are multiples of this many tokens
STRIDE_UNIT = tl.constexpr(8)  # strides arrive in units of 8 elements, so the compiler sees rows aligned to 16 bytes
CKV = tl.constexpr(HEAD_DIM_CKV)
KPE = tl.constexpr(HEAD_DIM_KPE)
QUARTER = tl.constexpr(HEAD_DIM_CKV // 4)


@triton.jit
def _pages_and_length(kv_indptr, kv_lens, request, mask, PAGE_SIZE: tl.constexpr):
    """Where the pages of a request (or of a block of requests) start in kv_indices, and how many tokens it has."""
    first_page = tl.load(kv_indptr + request, mask=mask, other=0)
    length = (tl.load(kv_indptr + request + 1, mask=mask, other=0) - first_page) * PAGE_SIZE
    if kv_lens is not None:
        length = tl.minimum(length, tl.load(kv_lens + request, mask=mask, other=0))
    return first_page, tl.maximum(length, 0)


@triton.jit
def _pieces(length, chunk):
    """An empty request has a piece as well: the one that writes its zeros."""
    return tl.maximum((length + chunk - 1) // chunk, 1)


@triton.jit
def _choose_chunk(
    kv_indptr, kv_lens, batch, items, slots, MIN_CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr
):
    """The smallest candidate whose pieces fit the grid; the largest one always does (tokens / chunk + batch <= items)."""
    tokens = (tl.load(kv_indptr + batch) - tl.load(kv_indptr)) * PAGE_SIZE
    low = tl.maximum((tokens + slots - 1) // slots, MIN_CHUNK)
    high = tl.maximum(tokens // tl.maximum(slots - batch, (slots + 1) // 2) + 1, MIN_CHUNK)
    chunk = low + ((high - low) * tl.arange(0, CANDIDATES) + CANDIDATES - 2) // (CANDIDATES - 1)
    chunk = (chunk + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT
    needed = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, batch, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        _, length = _pages_and_length(kv_indptr, kv_lens, request, request < batch, PAGE_SIZE)
        pieces = _pieces(length[:, None], chunk[None, :])
        needed += tl.sum(tl.where((request < batch)[:, None], pieces, 0), 0)
    return tl.min(tl.where(needed <= items, chunk, 2**30))


@triton.jit
def _add4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _find_request(kv_indptr, kv_lens, batch, chunk, item, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr):
    """(request, its first item, unsplit requests before it) of an item; the request is `batch` past the last item."""
    found = 0
    first_item = 0
    unsplit = 0
    items = 0
    for start in range(0, batch, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        _, length = _pages_and_length(kv_indptr, kv_lens, request, request < batch, PAGE_SIZE)
        pieces = tl.where(request < batch, _pieces(length, chunk), 0)
        before = ((items + tl.cumsum(pieces, 0) <= item) & (request < batch)).to(tl.int32)
        single = (pieces == 1).to(tl.int32)
        found_here, first_here, unsplit_here, items_here = tl.reduce(
            (before, before * pieces, before * single, pieces), 0, _add4
        )
        found += found_here
        first_item += first_here
        unsplit += unsplit_here
        items += items_here
    return found, first_item, unsplit


@triton.jit
def _finite(row_max):
    """The maximum to subtract: 0 for heads that saw nothing but -inf, as (-inf) - (-inf) is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _lse(row_max, row_sum):
    return tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))


@triton.jit
def _store_quarters(a0, a1, a2, a3, scale, lse_value, out, lse, row, mask):
    at = out + row[:, None] * CKV + tl.arange(0, QUARTER)[None, :]
    dtype = out.dtype.element_ty
    tl.store(at, (a0 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + QUARTER, (a1 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + 2 * QUARTER, (a2 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + 3 * QUARTER, (a3 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(lse + row, lse_value, mask=mask)


@triton.jit(
    do_not_specialize=[
        "batch", "items", "slots", "partial_slots",
        "q_nope_b", "q_nope_h", "q_pe_b", "q_pe_h", "ckv_page", "ckv_row", "kpe_page", "kpe_row",
    ],
    do_not_specialize_on_alignment=["kv_indptr", "kv_indices", "kv_lens", "lse", "partial_lse", "arrivals"],
)  # fmt: skip
def _mla_paged_decode(
    q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, kv_lens, out, lse,
    partial_out,  # [slot, head block, BLOCK_H, 512]
    partial_lse,  # fp32 [slot, head block, BLOCK_H]
    arrivals,  # int32 [level, slot, head block]: zero before and after every launch
    scale_log2e, batch, items, slots, partial_slots,
    q_nope_b, q_nope_h, q_pe_b, q_pe_h, ckv_page, ckv_row, kpe_page, kpe_row,  # strides / STRIDE_UNIT
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, MIN_CHUNK: tl.constexpr, FAN_IN: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MERGE_STAGES: tl.constexpr,
    MMA_DTYPE: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    item = tl.program_id(0) // HEAD_BLOCKS
    head_block = tl.program_id(0) % HEAD_BLOCKS

    # 1. plan
    chunk = _choose_chunk(kv_indptr, kv_lens, batch, items, slots, MIN_CHUNK, PAGE_SIZE, BLOCK_B)
    request, first_item, unsplit = _find_request(kv_indptr, kv_lens, batch, chunk, item, PAGE_SIZE, BLOCK_B)
    if request < batch:
        first_page, length = _pages_and_length(kv_indptr, kv_lens, request, True, PAGE_SIZE)
        pieces = _pieces(length, chunk)
        piece = item - first_item
        even = ((length + pieces - 1) // pieces + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT
        begin = piece * even
        count = tl.minimum(even, length - begin)

        # 2. attend. The 512 dimensions in four quarters: four independent chains of matrix instructions, and one row
        # address serves four loads.
        heads = tl.arange(0, BLOCK_H)
        head = head_block * BLOCK_H + heads
        head_mask = (head < HEADS)[:, None]
        dim = tl.arange(0, QUARTER)[None, :]
        pe_dim = tl.arange(0, KPE)[None, :]
        request64 = request.to(tl.int64)
        q_row = q_nope + request64 * (q_nope_b * STRIDE_UNIT) + head[:, None] * (q_nope_h * STRIDE_UNIT) + dim
        q0 = tl.load(q_row, mask=head_mask, other=0.0).to(MMA_DTYPE)
        q1 = tl.load(q_row + QUARTER, mask=head_mask, other=0.0).to(MMA_DTYPE)
        q2 = tl.load(q_row + 2 * QUARTER, mask=head_mask, other=0.0).to(MMA_DTYPE)
        q3 = tl.load(q_row + 3 * QUARTER, mask=head_mask, other=0.0).to(MMA_DTYPE)
        q_pe_row = q_pe + request64 * (q_pe_b * STRIDE_UNIT) + head[:, None] * (q_pe_h * STRIDE_UNIT) + pe_dim
        qr = tl.load(q_pe_row, mask=head_mask, other=0.0).to(MMA_DTYPE)
        row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_H], tl.float32)
        acc0 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc1 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc2 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc3 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        pages = kv_indices + first_page
        for offset in tl.range(0, count, BLOCK_N, num_stages=STAGES):
            token = begin + offset + tl.arange(0, BLOCK_N)
            valid = token < begin + count
            page = tl.load(pages + token // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
            ckv_offset = page * (ckv_page * STRIDE_UNIT)
            kpe_offset = page * (kpe_page * STRIDE_UNIT)
            if PAGE_SIZE > 1:
                ckv_offset += (token % PAGE_SIZE) * (ckv_row * STRIDE_UNIT)
                kpe_offset += (token % PAGE_SIZE) * (kpe_row * STRIDE_UNIT)
            # Rows past the end are zeros, not whatever a page holds: 0 * NaN is NaN.
            ckv_at = ckv + ckv_offset[:, None] + dim
            k0 = tl.load(ckv_at, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            k1 = tl.load(ckv_at + QUARTER, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            k2 = tl.load(ckv_at + 2 * QUARTER, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            k3 = tl.load(ckv_at + 3 * QUARTER, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            r = tl.load(kpe + kpe_offset[:, None] + pe_dim, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            score = tl.dot(q0, k0.T) + tl.dot(q1, k1.T) + (tl.dot(q2, k2.T) + tl.dot(qr, r.T, tl.dot(q3, k3.T)))
            score = tl.where(valid[None, :], score * scale_log2e, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            decay = tl.exp2(row_max - _finite(new_max))
            weight = tl.exp2(score - _finite(new_max)[:, None]).to(MMA_DTYPE)
            row_sum = row_sum * decay + tl.sum(weight.to(tl.float32), 1)  # of the rounded weights, as the products use
            row_max = new_max
            acc0 = tl.dot(weight, k0, acc0 * decay[:, None])
            acc1 = tl.dot(weight, k1, acc1 * decay[:, None])
            acc2 = tl.dot(weight, k2, acc2 * decay[:, None])
            acc3 = tl.dot(weight, k3, acc3 * decay[:, None])
        scale = 1.0 / tl.where(row_sum > 0, row_sum, 1.0)
        result_lse = _lse(row_max, row_sum)
        out_row = request64 * HEADS + head

        # 3. merge
        if pieces == 1:
            _store_quarters(acc0, acc1, acc2, acc3, scale, result_lse, out, lse, out_row, head < HEADS)
        else:
            first_slot = first_item - unsplit
            slot_row = ((first_slot + piece) * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
            _store_quarters(acc0, acc1, acc2, acc3, scale, result_lse, partial_out, partial_lse, slot_row, heads >= 0)
            ckv_dim = tl.arange(0, CKV)[None, :]
            level = 0
            step = 1  # pieces in one node of this level
            node = piece
            nodes = pieces
            merging = True
            while merging:
                group = node // FAN_IN
                members = tl.minimum(nodes - group * FAN_IN, FAN_IN)
                leader = first_slot + group * FAN_IN * step
                counter = arrivals + (level * partial_slots + leader) * HEAD_BLOCKS + head_block
                # Every thread's stores come before the release: Triton 3.6 puts no barrier before an atomic.
                tl.debug_barrier()
                merging = tl.atomic_add(counter, 1, sem="acq_rel") == members - 1
                if merging:
                    tl.store(counter, 0)
                    member = tl.arange(0, FAN_IN)[:, None]
                    rows = ((leader + member * step) * HEAD_BLOCKS + head_block) * BLOCK_H + heads[None, :]
                    lses = tl.load(partial_lse + rows, mask=member < members, other=float("-inf"), cache_modifier=".cg")
                    row_max = _finite(tl.max(lses, 0))
                    merged_lse = _lse(row_max, tl.sum(tl.exp2(lses - row_max[None, :]), 0))
                    merged = tl.zeros([BLOCK_H, CKV], tl.float32)
                    for one in tl.range(0, members, num_stages=MERGE_STAGES):
                        row = ((leader + one * step) * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
                        weight = tl.exp2(tl.load(partial_lse + row, cache_modifier=".cg") - _finite(merged_lse))
                        part = tl.load(partial_out + row[:, None] * CKV + ckv_dim, cache_modifier=".cg")
                        merged += part.to(tl.float32) * weight[:, None]
                    node = group
                    nodes = (nodes + FAN_IN - 1) // FAN_IN
                    if nodes == 1:
                        tl.store(out + out_row[:, None] * CKV + ckv_dim, merged.to(out.dtype.element_ty), mask=head_mask)
                        tl.store(lse + out_row, merged_lse, mask=head < HEADS)
                        merging = False
                    else:
                        # In place of the first member, once every thread has read it.
                        tl.debug_barrier()
                        row = (leader * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
                        tl.store(partial_out + row[:, None] * CKV + ckv_dim, merged.to(partial_out.dtype.element_ty))
                        tl.store(partial_lse + row, merged_lse)
                        level += 1
                        step *= FAN_IN


INTERPRETED = not isinstance(_mla_paged_decode, triton.JITFunction)


def require_device(device: torch.device) -> None:
    """Raise MLAInputError unless the kernel runs on tensors of this device."""
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        raise MLAInputError(
            f"the tensors are on {device}; wanted a GPU. Move them there, or set TRITON_INTERPRET=1 before Python "
            "starts to run the kernel's source on cpu tensors in Triton's interpreter (slow, for checking)"
        )


class Config(NamedTuple):
    """How the kernel is cut for one device and head count."""

    block_h: int  # heads of one program
    block_n: int  # tokens of one tile
    merge_stages: int
    stages: int  # of Triton's pipeliner, which spends three on the page numbers
    warps: int
    min_chunk: int  # tokens of the smallest piece
    fan_in: int  # pieces merged at a time
    programs_per_sm: int


def launch(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse) -> None:
    """Run the kernel on checked arguments, on the current stream of their device."""
    device = q_nope.device
    batch, heads = q_nope.shape[:2]
    config = _config(device, heads)
    head_blocks = triton.cdiv(heads, config.block_h)
    slots = max(config.programs_per_sm * _num_sms(device) // head_blocks, 1)
    max_tokens = kv_indices.shape[0] * ckv_cache.shape[1]
    items = min(max(slots, (slots + 1) // 2 + batch), batch + max_tokens // config.min_chunk)
    # Split requests hold fewer than 2 * tokens / chunk <= 2 * slots pieces.
    partial_slots = 2 * slots
    partials = min(partial_slots, items) * head_blocks * config.block_h
    interpreted_bf16 = INTERPRETED and q_nope.dtype == torch.bfloat16
    partial_dtype = torch.float32 if INTERPRETED else q_nope.dtype
    partial_out = torch.empty((partials, HEAD_DIM_CKV), dtype=partial_dtype, device=device)
    partial_lse = torch.empty((partials,), dtype=torch.float32, device=device)
    written = torch.empty_like(out, dtype=torch.float32) if interpreted_bf16 else out
    _mla_paged_decode[(items * head_blocks,)](
        q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, written, lse,
        partial_out, partial_lse, _arrivals(device, partial_slots * head_blocks, config.fan_in),
        sm_scale * math.log2(math.e), batch, items, slots, partial_slots,
        *(stride // STRIDE_UNIT.value for t in (q_nope, q_pe, ckv_cache, kpe_cache) for stride in t.stride()[:2]),
        HEADS=heads, PAGE_SIZE=ckv_cache.shape[1], MIN_CHUNK=config.min_chunk, FAN_IN=config.fan_in,
        BLOCK_B=next(block for block in BATCH_BLOCKS if batch <= block or block == BATCH_BLOCKS[-1]),
        BLOCK_H=config.block_h, BLOCK_N=config.block_n, STAGES=config.stages, MERGE_STAGES=config.merge_stages,
        MMA_DTYPE=_mma_dtype(q_nope.dtype), num_warps=config.warps,
    )  # fmt: skip
    if interpreted_bf16:
        out.copy_(written)


BATCH_BLOCKS = (1, 64, 1024)  # requests that the plan looks at in one step: few, as each is a compilation


def _config(device, heads):
    return Config(block_h=16, block_n=64, stages=3, merge_stages=4, warps=8, min_chunk=64, fan_in=8, programs_per_sm=2)


def _mma_dtype(dtype):
    """Triton's interpreter multiplies the bit patterns of bf16 numbers, so it is given fp32."""
    if INTERPRETED:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@functools.cache
def _num_sms(device):
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


_arrivals_of_stream: dict[tuple, torch.Tensor] = {}


def _arrivals(device, slots, fan_in):
    """Zeroed counters. The kernel leaves them zero, so that a stream's launches, which never overlap, share them.

    A captured launch may be replayed on any stream, so it zeroes counters of its own as a part of the graph.
    """
    levels = max(math.ceil(math.log(slots, fan_in)), 1) + 1
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(levels * slots, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    arrivals = _arrivals_of_stream.get((device, stream))
    if arrivals is None or arrivals.numel() < levels * slots:
        arrivals = _arrivals_of_stream[device, stream] = torch.zeros(levels * slots, dtype=torch.int32, device=device)
    return arrivals


def mla_paged_decode_triton(
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, *, kv_lens=None, out=None, lse=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_paged_decode` on this back end whatever the device has: same arguments, same errors."""
    if isinstance(q_nope, torch.Tensor):
        require_device(q_nope.device)
    return checked_launch(
        launch, q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens=kv_lens, out=out, lse=lse
    )

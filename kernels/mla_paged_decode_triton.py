"""MLA paged decode in plain Triton: for every GPU without a tuned kernel, for Triton's interpreter, and for readers.

One launch of independent programs; a program takes one item = (request, piece of its tokens) for up to 16 heads. No
program waits for another one, so the grid need not be co-resident:

1. plan    every program reads kv_indptr, picks the chunk size that fills the grid, and finds its own item;
2. attend  online softmax over the tokens of the piece;
3. merge   of every FAN_IN neighboring pieces the program that arrives last merges them and goes one level up, until
           one piece is left. Groups depend on the lengths alone, so equal inputs give equal bits.
"""

import functools
import math
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

from .mla_paged_decode_arguments import HEAD_DIM_CKV, HEAD_DIM_KPE, MLAInputError, checked_launch

MIN_CHUNK = 64  # tokens: a smaller piece saves less than its merge costs
FAN_IN = 8  # pieces merged at a time
MERGE_STAGES = 4  # of Triton's pipeliner: partial results in flight while merging, and one
BLOCK_H = 16  # heads of one program: the fewest rows that tl.dot takes
BATCH_BLOCKS = (1, 64, 1024)  # requests that the plan looks at in one step: few, as each is a compilation
NUM_WARPS = 8
SHARED_MEMORY = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}  # bytes

CKV = tl.constexpr(HEAD_DIM_CKV)
KPE = tl.constexpr(HEAD_DIM_KPE)
QUARTER = tl.constexpr(HEAD_DIM_CKV // 4)
CANDIDATES = tl.constexpr(8)  # chunk sizes that the plan tries
CHUNK_UNIT = tl.constexpr(8)  # chunks and pieces are multiples of this many tokens
STRIDE_UNIT = tl.constexpr(8)  # strides arrive in units of 8 elements, so the compiler sees rows aligned to 16 bytes
LARGE = tl.constexpr(2**30)  # above every chunk size


@triton.jit
def _pages_and_length(kv_indptr, kv_lens, request, mask, PAGE_SIZE: tl.constexpr):
    """Where the pages of a request (or of a block of requests) start in kv_indices, and how many tokens it has."""
    first_page = tl.load(kv_indptr + request, mask=mask, other=0)
    length = (tl.load(kv_indptr + request + 1, mask=mask, other=0) - first_page) * PAGE_SIZE
    if kv_lens is not None:
        length = tl.minimum(length, tl.load(kv_lens + request, mask=mask, other=0))
    return first_page, length


@triton.jit
def _pieces(length, chunk):
    """An empty request (length 0 or less) has a piece as well: the one that writes its zeros."""
    return tl.maximum((length + chunk - 1) // chunk, 1)


@triton.jit
def _choose_chunk(
    kv_indptr, kv_lens, batch, items, slots,
    MIN_CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest candidate whose pieces fit the grid; the largest always does, as tokens / chunk + batch <= items."""
    tokens = (tl.load(kv_indptr + batch) - tl.load(kv_indptr)) * PAGE_SIZE
    low = tl.maximum((tokens + slots - 1) // slots, MIN_CHUNK)
    high = tl.maximum(tokens // tl.maximum(slots - batch, (slots + 1) // 2) + 1, MIN_CHUNK)
    chunk = low + ((high - low) * tl.arange(0, CANDIDATES) + CANDIDATES - 2) // (CANDIDATES - 1)
    chunk = (chunk + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT
    needed = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, 1 if ONE_BLOCK else batch, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        _, length = _pages_and_length(kv_indptr, kv_lens, request, request < batch, PAGE_SIZE)
        pieces = _pieces(length[:, None], chunk[None, :])
        needed += tl.sum(tl.where((request < batch)[:, None], pieces, 0), 0)
    return tl.min(tl.where(needed <= items, chunk, LARGE))


@triton.jit
def _find_request(
    kv_indptr, kv_lens, batch, chunk, item, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr
):
    """(request, its first item, unsplit requests before it) of an item; the request is `batch` past the last item."""
    found = 0
    first_item = 0
    unsplit = 0
    items = 0
    for start in range(0, 1 if ONE_BLOCK else batch, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        _, length = _pages_and_length(kv_indptr, kv_lens, request, request < batch, PAGE_SIZE)
        pieces = tl.where(request < batch, _pieces(length, chunk), 0)
        before = ((items + tl.cumsum(pieces, 0) <= item) & (request < batch)).to(tl.int32)
        single = (pieces == 1).to(tl.int64)
        both = tl.sum(before * (1 + (single << 32)), 0)  # two counts in one exchange between warps
        found += both.to(tl.int32)
        unsplit += (both >> 32).to(tl.int32)
        first_item += tl.sum(before * pieces, 0)
        if not ONE_BLOCK:
            items += tl.sum(pieces, 0)
    return found, first_item, unsplit


@triton.jit
def _load_quarters(row, mask, DTYPE: tl.constexpr):
    at = row[:, None] + tl.arange(0, QUARTER)[None, :]
    x0 = tl.load(at, mask=mask[:, None], other=0.0).to(DTYPE)
    x1 = tl.load(at + QUARTER, mask=mask[:, None], other=0.0).to(DTYPE)
    x2 = tl.load(at + 2 * QUARTER, mask=mask[:, None], other=0.0).to(DTYPE)
    x3 = tl.load(at + 3 * QUARTER, mask=mask[:, None], other=0.0).to(DTYPE)
    return x0, x1, x2, x3


@triton.jit
def _store_quarters(x0, x1, x2, x3, scale, row_lse, out, lse, row, mask):
    at = out + row[:, None] * CKV + tl.arange(0, QUARTER)[None, :]
    dtype = out.dtype.element_ty
    tl.store(at, (x0 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + QUARTER, (x1 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + 2 * QUARTER, (x2 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(at + 3 * QUARTER, (x3 * scale[:, None]).to(dtype), mask=mask[:, None])
    tl.store(lse + row, row_lse, mask=mask)


@triton.jit
def _finite(row_max):
    """The maximum to subtract: 0 for heads that saw nothing but -inf, as (-inf) - (-inf) is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _largest(x):
    """The largest magnitude of a row, 1 where its inverse would be infinite."""
    largest = tl.max(tl.abs(x), 1)
    return tl.where(largest > 1e-30, largest, 1.0)


@triton.jit
def _lse(row_max, row_sum):
    return tl.where(row_sum > 0, row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0)), float("-inf"))


@triton.jit(
    do_not_specialize=[
        "batch", "items", "slots", "partial_slots",
        "q_nope_b", "q_nope_h", "q_pe_b", "q_pe_h", "ckv_page", "ckv_row", "kpe_page", "kpe_row",
    ],
    do_not_specialize_on_alignment=["kv_indptr", "kv_indices", "kv_lens", "lse", "partial_scale", "partial_lse", "arrivals"],
)  # fmt: skip
def _mla_paged_decode(
    q_nope, q_pe, ckv, kpe, kv_indptr, kv_indices, kv_lens, out, lse,
    partial_out,  # fp16 [slot, head block, BLOCK_H, 512], in units of the row's largest: no bits lost to the exponent
    partial_scale,  # fp32 [slot, head block, BLOCK_H]: that unit
    partial_lse,  # fp32 [slot, head block, BLOCK_H]
    arrivals,  # int32 [level, slot, head block]: zero before and after every launch
    scale_log2e, batch, items, slots, partial_slots,
    q_nope_b, q_nope_h, q_pe_b, q_pe_h, ckv_page, ckv_row, kpe_page, kpe_row,  # strides / STRIDE_UNIT
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, MMA_DTYPE: tl.constexpr,
    MIN_CHUNK: tl.constexpr, FAN_IN: tl.constexpr, BLOCK_B: tl.constexpr, ONE_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    item = tl.program_id(0) // HEAD_BLOCKS
    head_block = tl.program_id(0) % HEAD_BLOCKS

    # 1. plan
    chunk = _choose_chunk(kv_indptr, kv_lens, batch, items, slots, MIN_CHUNK, PAGE_SIZE, BLOCK_B, ONE_BLOCK)
    request, first_item, unsplit = _find_request(kv_indptr, kv_lens, batch, chunk, item, PAGE_SIZE, BLOCK_B, ONE_BLOCK)
    if request < batch:
        first_page, length = _pages_and_length(kv_indptr, kv_lens, request, True, PAGE_SIZE)
        pieces = _pieces(length, chunk)
        piece = item - first_item
        even = ((length + pieces - 1) // pieces + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT
        begin = piece * even
        count = tl.minimum(even, length - begin)

        # 2. attend. The 512 dimensions go in four quarters: their products are independent chains of matrix
        # instructions, and one row address serves four loads, which saves two fifths of the instructions of a tile.
        heads = tl.arange(0, BLOCK_H)
        head = head_block * BLOCK_H + heads
        pe_dim = tl.arange(0, KPE)[None, :]
        request64 = request.to(tl.int64)
        q_row = q_nope + request64 * (q_nope_b * STRIDE_UNIT) + head * (q_nope_h * STRIDE_UNIT)
        q0, q1, q2, q3 = _load_quarters(q_row, head < HEADS, MMA_DTYPE)
        q_pe_row = q_pe + request64 * (q_pe_b * STRIDE_UNIT) + head * (q_pe_h * STRIDE_UNIT)
        qr = tl.load(q_pe_row[:, None] + pe_dim, mask=(head < HEADS)[:, None], other=0.0).to(MMA_DTYPE)
        row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        # Sums of the weights by column: of the weights as they are, which lse is made of, and as the products round them.
        weight_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        rounded_sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        acc0 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc1 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc2 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        acc3 = tl.zeros([BLOCK_H, QUARTER], tl.float32)
        pages = kv_indices + first_page
        # From 0, not from begin: behind a start that it does not know Triton 3.8 drops cp.async and spills.
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
            k0, k1, k2, k3 = _load_quarters(ckv + ckv_offset, valid, MMA_DTYPE)
            r = tl.load((kpe + kpe_offset)[:, None] + pe_dim, mask=valid[:, None], other=0.0).to(MMA_DTYPE)
            score = tl.dot(q0, k0.T) + tl.dot(q1, k1.T) + (tl.dot(q2, k2.T) + tl.dot(qr, r.T, tl.dot(q3, k3.T)))
            score = tl.where(valid[None, :], score * scale_log2e, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            decay = tl.exp2(row_max - _finite(new_max))
            exact = tl.exp2(score - _finite(new_max)[:, None])
            weight = exact.to(MMA_DTYPE)
            weight_sums = weight_sums * decay[:, None] + exact
            rounded_sums = rounded_sums * decay[:, None] + weight.to(tl.float32)
            row_max = new_max
            acc0 = tl.dot(weight, k0, acc0 * decay[:, None])
            acc1 = tl.dot(weight, k1, acc1 * decay[:, None])
            acc2 = tl.dot(weight, k2, acc2 * decay[:, None])
            acc3 = tl.dot(weight, k3, acc3 * decay[:, None])
        rounded_sum = tl.sum(rounded_sums, 1)
        scale = 1.0 / tl.where(rounded_sum > 0, rounded_sum, 1.0)
        row_lse = _lse(row_max, tl.sum(weight_sums, 1))
        out_row = request64 * HEADS + head

        # 3. merge
        if pieces == 1:
            _store_quarters(acc0, acc1, acc2, acc3, scale, row_lse, out, lse, out_row, head < HEADS)
        else:
            first_slot = first_item - unsplit  # only split requests have slots
            row = ((first_slot + piece) * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
            largest = tl.maximum(_largest(acc0), tl.maximum(_largest(acc1), tl.maximum(_largest(acc2), _largest(acc3))))
            _store_quarters(acc0, acc1, acc2, acc3, 1 / largest, row_lse, partial_out, partial_lse, row, heads >= 0)
            tl.store(partial_scale + row, scale * largest)
            dim = tl.arange(0, CKV)[None, :]
            level = 0
            nodes = pieces  # results left on this level
            node = piece
            step = 1  # slots from one node to the next
            while nodes > 1:
                node = node // FAN_IN
                leader = first_slot + node * FAN_IN * step
                members = tl.minimum(nodes - node * FAN_IN, FAN_IN)
                counter = arrivals + (level * partial_slots + leader) * HEAD_BLOCKS + head_block
                # Every thread's stores come before the release: Triton 3.6 puts no barrier before an atomic.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel") < members - 1:
                    nodes = 0  # a later program merges
                else:
                    tl.store(counter, 0)
                    nodes = (nodes + FAN_IN - 1) // FAN_IN
                    member = tl.arange(0, FAN_IN)[:, None]
                    rows = ((leader + member * step) * HEAD_BLOCKS + head_block) * BLOCK_H + heads[None, :]
                    lses = tl.load(partial_lse + rows, mask=member < members, other=float("-inf"), cache_modifier=".cg")
                    row_max = _finite(tl.max(lses, 0))
                    row_sum = tl.sum(tl.exp2(lses - row_max[None, :]), 0)
                    row_lse = _lse(row_max, row_sum)
                    merged = tl.zeros([BLOCK_H, CKV], tl.float32)
                    for one in tl.range(0, members, num_stages=MERGE_STAGES):
                        row = ((leader + one * step) * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
                        weight = tl.exp2(tl.load(partial_lse + row, cache_modifier=".cg") - row_max)
                        weight *= tl.load(partial_scale + row, cache_modifier=".cg")
                        part = tl.load(partial_out + row[:, None] * CKV + dim, cache_modifier=".cg")
                        merged += part.to(tl.float32) * weight[:, None]
                    # By the sum, not by exp2(row_lse): that is rounded, coarsely where scores are large.
                    merged *= (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
                    if nodes == 1:
                        tl.store(
                            out + out_row[:, None] * CKV + dim,
                            merged.to(out.dtype.element_ty),
                            mask=(head < HEADS)[:, None],
                        )
                        tl.store(lse + out_row, row_lse, mask=head < HEADS)
                    else:
                        tl.debug_barrier()  # in place of the first member, once every thread has read it
                        row = (leader * HEAD_BLOCKS + head_block).to(tl.int64) * BLOCK_H + heads
                        largest = _largest(merged)
                        merged *= (1 / largest)[:, None]
                        tl.store(partial_out + row[:, None] * CKV + dim, merged.to(partial_out.dtype.element_ty))
                        tl.store(partial_lse + row, row_lse)
                        tl.store(partial_scale + row, largest)
                        level += 1
                        step *= FAN_IN


INTERPRETED = not isinstance(_mla_paged_decode, triton.JITFunction)


def mla_paged_decode_triton(
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, *, kv_lens=None, out=None, lse=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_paged_decode` on this back end whatever the device has: same arguments, same errors."""
    if isinstance(q_nope, torch.Tensor):
        require_device(q_nope.device)
    return checked_launch(
        _this, q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens=kv_lens, out=out, lse=lse
    )


def _this(device):
    return launch


def require_device(device: torch.device) -> None:
    """Raise MLAInputError unless the kernel runs on tensors of this device."""
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        raise MLAInputError(
            f"the tensors are on {device}; wanted a GPU. Move them there, or set TRITON_INTERPRET=1 before Python "
            "starts to run the kernel's source on cpu tensors in Triton's interpreter (slow, for checking)"
        )


def launch(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse) -> None:
    """Launch on the current stream of the tensors' device, which must be the current device. Writes `out` and `lse`."""
    device, dtype = q_nope.device, q_nope.dtype
    batch, heads = q_nope.shape[:2]
    page_size = ckv_cache.shape[1]
    head_blocks = triton.cdiv(heads, BLOCK_H)
    slots = max(_num_sms(device) // head_blocks, 1)
    items = min(max(slots, (slots + 1) // 2 + batch), batch + kv_indices.shape[0] * page_size // MIN_CHUNK)
    # A request that is split into n pieces has more than (n - 1) * chunk tokens, so there are fewer pieces of split
    # requests than 2 * tokens / chunk <= 2 * slots.
    partial_slots = 2 * slots
    partial_rows = min(partial_slots, items) * head_blocks * BLOCK_H
    partial_out = torch.empty((partial_rows, HEAD_DIM_CKV), dtype=torch.float16, device=device)
    partial_scale, partial_lse = torch.empty((2, partial_rows), dtype=torch.float32, device=device)
    written = out if _value_dtype(dtype) == dtype else torch.empty_like(out, dtype=_value_dtype(dtype))
    _mla_paged_decode[(items * head_blocks,)](
        q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, written, lse,
        partial_out, partial_scale, partial_lse, _arrivals(device, partial_slots, head_blocks),
        sm_scale * math.log2(math.e), batch, items, slots, partial_slots,
        *(stride // STRIDE_UNIT.value for t in (q_nope, q_pe, ckv_cache, kpe_cache) for stride in t.stride()[:2]),
        **_constants(heads, page_size, dtype, batch, _shared_memory(device)),
        **_options(torch.version.hip is None),
    )  # fmt: skip
    if written is not out:
        out.copy_(written)


def _constants(heads, page_size, dtype, batch, shared_memory):
    """The compile-time arguments: the largest tile that fits, with a second buffer where there is room for it."""
    mma_dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    block_n, stages = 16, 2
    if shared_memory >= 96 * 1024:
        block_n, stages = 64, 3
    if shared_memory >= 168 * 1024:
        block_n, stages = 64, 5  # the pipeliner spends three stages on page numbers: five give two buffers
    return {
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "MMA_DTYPE": mma_dtypes[_value_dtype(dtype)],
        "MIN_CHUNK": MIN_CHUNK,
        "FAN_IN": FAN_IN,
        "BLOCK_B": next((block for block in BATCH_BLOCKS if batch <= block), BATCH_BLOCKS[-1]),
        "ONE_BLOCK": batch <= BATCH_BLOCKS[-1],
        "BLOCK_H": BLOCK_H,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "MERGE_STAGES": MERGE_STAGES,
    }


def _options(nvidia):
    """A program has an SM to itself and may have all registers; ptxas alone spills some to make room for a second."""
    return {"num_warps": NUM_WARPS, "maxnreg": 255} if nvidia else {"num_warps": NUM_WARPS}


def _value_dtype(dtype):
    """The dtype of products and partial results. Triton's interpreter multiplies the bit patterns of bf16 numbers."""
    return torch.float32 if INTERPRETED else dtype


@functools.cache
def _num_sms(device):
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device):
    """Bytes that one program may use for tiles. AMD's compilers keep tiles in registers, where a large one spills."""
    if device.type == "cpu":
        return SHARED_MEMORY["sm_90"]
    return 0 if torch.version.hip else torch.cuda.get_device_properties(device).shared_memory_per_block_optin


_arrivals_of_stream: dict[tuple, torch.Tensor] = {}


def _arrivals(device, slots, head_blocks):
    """Zeroed counters. Every launch leaves them zero, so the launches of a stream, which never overlap, share them.

    A captured launch may be replayed beside any stream: it gets its own, zeroed as a part of the graph.
    """
    levels = 1
    while FAN_IN**levels < slots:
        levels += 1
    size = levels * slots * head_blocks
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    arrivals = _arrivals_of_stream.get((device, stream))
    if arrivals is None or arrivals.numel() < size:
        arrivals = _arrivals_of_stream[device, stream] = torch.zeros(size, dtype=torch.int32, device=device)
    return arrivals


def cross_compile(arch: str, *, heads=16, page_size=1, batch=64, dtype=torch.bfloat16) -> dict:
    """Compile the kernel for an architecture that need not be here: "sm_90", or another of SHARED_MEMORY, or "gfx950".

    Returns kernel, variant, registers and spill_bytes of a thread, shared_bytes of a program, compiler, and the ptx
    (None for AMD). Needs a process without TRITON_INTERPRET.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nvidia = arch.startswith("sm_")
    constants = {**_constants(heads, page_size, dtype, batch, SHARED_MEMORY.get(arch, 0)), "kv_lens": None}
    if page_size > 1:
        del constants["kv_lens"]
    types = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    values, fp32, integers = (
        ("q_nope", "q_pe", "ckv", "kpe", "out"),
        ("lse", "partial_scale", "partial_lse"),
        ("kv_indptr", "kv_indices", "kv_lens", "arrivals"),
    )
    names = _mla_paged_decode.arg_names
    signature = {name: "i32" for name in names} | {"scale_log2e": "fp32"}
    signature |= {"partial_out": "*fp16"} | dict.fromkeys(values, "*" + types[dtype]) | dict.fromkeys(fp32, "*fp32")
    signature |= dict.fromkeys(integers, "*i32") | dict.fromkeys(constants, "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*values, "partial_out")}
    target = GPUTarget("cuda", int(arch[3:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    source = ASTSource(_mla_paged_decode, signature, constants, aligned)
    compiled = triton.compile(source, target=target, options=_options(nvidia))
    facts = _resources_nvidia(compiled.asm["cubin"]) if nvidia else _resources_amd(compiled.asm["amdgcn"])
    return {
        "kernel": Path(__file__).name,
        "variant": f"{arch}, heads={heads}, page_size={page_size}, batch<={constants['BLOCK_B']}",
        **facts,
        "shared_bytes": compiled.metadata.shared,
        "compiler": f"Triton {triton.__version__}",
        "ptx": compiled.asm.get("ptx"),
    }


def _resources_nvidia(cubin):
    """Without spills the kernel has no stack, so its stack is what is spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text).group(1)),
        "spill_bytes": int(re.search(r"STACK:(\d+)", text).group(1)),
    }


def _resources_amd(assembly):
    def number(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly).group(1))

    return {"registers": number("vgpr_count"), "spill_bytes": 4 * number("vgpr_spill_count")}

"""Kimi Delta Attention (KDA) prefill: one Triton source for NVIDIA sm_90, sm_100, AMD gfx950 and the interpreter.

    from kernels.kda_prefill import kda_prefill

    o, state = kda_prefill(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, cu_seqlens=cu_seqlens)

Chunks of 64 tokens, in two launches:

1. prologue    parallel over chunks and heads: norms, gates, the two triangular products inside a chunk, the inverse
               of one of them by forward substitution, and from these the operands of the recurrence;
2. recurrence  parallel over sequences, heads and columns of the state, serial over chunks: state and output.

Where sequences times heads are few, the chunks of a sequence are cut into segments (`Schedule.segment`): each segment
is summarized as an affine map of the state it starts from, a scan joins the maps, then all segments run at once.

Inside a chunk, exp of a sum of gates is only ever split at the start or the end of 16-token blocks, where nothing
overflows for gates above -5 a token. Steeper blocks, which only the softplus gate has, are computed channel by channel.

On Hopper the prologue is kda_prologue.cu, the same computation in CUDA C++. Source of the maths: Kimi Linear,
arXiv 2510.26692.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .kda_inputs import HEAD_DIM, KDAInputError, check

CHUNK = 64  # tokens
BLOCK = tl.constexpr(16)  # tokens between anchors
LOG2E = tl.constexpr(1.4426950408889634)
# base 2: relative to its start, a block that decays further would overflow
LARGEST_EXPONENT = tl.constexpr(120.0)
SCAN_BLOCK_V = 32
MIN_SEGMENT = 8  # chunks: shorter segments do not pay for the scan
MIN_SEGMENTS = 3  # a segment is run twice, so two of them gain nothing


# Where chunks are -----------------------------------------------------------------------------------------------------


@triton.jit
def _sequence(seq, cu_seqlens, seq_len, VARLEN: tl.constexpr):
    """First token, in its batch entry, and length of a sequence.

    `seq_len` is the length of all sequences, or with VARLEN the number of tokens there are. Sequences are then in batch
    entry 0, which callers get by batch strides of 0.
    """
    if VARLEN:
        start = tl.minimum(tl.load(cu_seqlens + seq).to(tl.int32), seq_len)
        return start, tl.minimum(tl.load(cu_seqlens + seq + 1).to(tl.int32), seq_len) - start
    else:
        return 0, seq_len


@triton.jit
def _first_slot(seq, start, seq_len, SPAN: tl.constexpr, VARLEN: tl.constexpr):
    """Slots of SPAN tokens: sequence n has its own from start // SPAN + n on, so no sum over earlier ones is needed."""
    if VARLEN:
        return start // SPAN + seq
    else:
        return seq * tl.cdiv(seq_len, SPAN)


@triton.jit
def _locate(slot, cu_seqlens, num_seqs, seq_len, SPAN: tl.constexpr, VARLEN: tl.constexpr):
    """The sequence that owns a slot, the slot's number in it, the sequence's first token and its length."""
    if VARLEN:
        seq = tl.full((), 0, tl.int32)
        above = num_seqs
        while above - seq > 1:
            middle = (seq + above) // 2
            start, _ = _sequence(middle, cu_seqlens, seq_len, VARLEN)
            if _first_slot(middle, start, seq_len, SPAN, VARLEN) <= slot:
                seq = middle
            else:
                above = middle
    else:
        seq = slot // tl.cdiv(seq_len, SPAN)
    start, length = _sequence(seq, cu_seqlens, seq_len, VARLEN)
    return seq, slot - _first_slot(seq, start, seq_len, SPAN, VARLEN), start, length


# Prologue -------------------------------------------------------------------------------------------------------------


@triton.jit
def _matrix(x, DTYPE: tl.constexpr):
    """[blocks, 16, D] -> [64, D], in the type that products take."""
    return tl.reshape(x.to(DTYPE), (x.shape[0] * x.shape[1], x.shape[2]))


@triton.jit
def _axes(D: tl.constexpr, N: tl.constexpr):
    """Block, token in the block and channel, to broadcast to [N, 16, D].

    Loads of four channels make the compiler give a warp one block and a thread all 16 tokens of its channels: sums over
    tokens then stay in a thread.
    """
    channel = tl.max_contiguous(tl.arange(0, D), 4)
    return tl.arange(0, N)[:, None, None], tl.arange(0, BLOCK)[None, :, None], channel[None, None, :]


@triton.jit
def _on_diagonal(blocks):
    """[n, 16, 16] -> [16 n, 16 n] with the blocks on the diagonal."""
    n: tl.constexpr = blocks.shape[0]
    same = tl.arange(0, n)[:, None, None, None] == tl.arange(0, n)[None, None, :, None]
    return tl.reshape(tl.where(same, blocks[:, :, None, :], 0), (n * BLOCK, n * BLOCK))


@triton.jit
def _normalized(first, left, ROW: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """Rows of q or k over their norms, [N, 16, D] in fp32, 0 past the end; `first` points to the chunk's first row."""
    block, row, column = _axes(D, N)
    x = tl.load(first + (block * (BLOCK * ROW) + column) + row * ROW, mask=row < left - block * BLOCK, other=0).to(
        tl.float32
    )
    return x * tl.rsqrt(tl.sum(x * x, 2) + 1e-6)[:, :, None]


@triton.jit
def _gates(
    first, left, A_log, dt_bias, lower_bound, ROW: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SAFE: tl.constexpr
):
    """Log decay of every token and channel, base 2, [N, 16, D]; 0 past the end, where the input reads as -inf."""
    block, row, column = _axes(D, N)
    at = first + (block * (BLOCK * ROW) + column) + row * ROW
    x = tl.load(at, mask=row < left - block * BLOCK, other=-float("inf")).to(tl.float32) + tl.load(dt_bias + column)
    rate = tl.exp2(tl.load(A_log) * LOG2E)
    if SAFE:
        root = tl.rsqrt(1 + tl.exp2(x * rate * -LOG2E))
        return root * root * (lower_bound * LOG2E)
    else:
        return -rate * (tl.maximum(x, 0) * LOG2E + tl.log2(1 + tl.exp2(tl.abs(x) * -LOG2E)))


@triton.jit
def _exact_diagonal(x, k, local):
    """The products inside blocks from differences of the decay, channel by channel: right for any decay. [64, 64]."""
    n: tl.constexpr = x.shape[0]
    row = tl.arange(0, BLOCK)[None, :, None]
    products = tl.zeros((n, BLOCK, BLOCK), tl.float32)
    for j in range(BLOCK):
        k_j = tl.sum(tl.where(row == j, k, 0), 1)[:, None, :]
        local_j = tl.sum(tl.where(row == j, local, 0), 1)[:, None, :]
        column = tl.sum(x * k_j * tl.exp2(tl.minimum(local - local_j, 0)), 2)
        products = tl.where(tl.arange(0, BLOCK)[None, None, :] == j, column[:, :, None], products)
    return _on_diagonal(products)


@triton.jit
def _prologue(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, w, qg, kg, ut, aqk, decay,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, g_batch, g_head, beta_batch, beta_head,
    scale, lower_bound, num_seqs, seq_len, num_heads,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, G_ROW: tl.constexpr, BETA_ROW: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Operands of the recurrence for one chunk of one head.

    With G the running sum of the gates (base 2) from the start of the chunk, G_C its last value, and
    M = (I + diag(beta) tril(K 2^G (K 2^-G)^T, -1))^-1 diag(beta):

    w [BT, D] = M (K 2^G);  ut [D, BT] = (M V)^T;  qg [BT, D] = Q 2^G;  kg [BT, D] = K 2^(G_C - G);
    aqk [BT, BT] = tril(Q 2^G (K 2^-G)^T);  decay [D] = 2^G_C.
    """
    pid = tl.program_id(0)
    slot = pid // num_heads
    head = pid % num_heads
    seq, chunk, start, length = _locate(slot, cu_seqlens, num_seqs, seq_len, BT, VARLEN)
    left = length - chunk * BT
    if left <= 0:
        return
    DTYPE: tl.constexpr = w.dtype.element_ty
    N: tl.constexpr = BT // BLOCK
    seq = seq.to(tl.int64)
    token = (start + chunk * BT).to(tl.int64)

    q += seq * q_batch + token * Q_ROW + head * q_head
    k += seq * k_batch + token * K_ROW + head * k_head
    v += seq * v_batch + token * V_ROW + head * v_head
    g += seq * g_batch + token * G_ROW + head * g_head
    beta += seq * beta_batch + token * BETA_ROW + head * beta_head
    A_log += head
    dt_bias += head * D
    block, row, column = _axes(D, N)
    gate = _gates(g, left, A_log, dt_bias, lower_bound, G_ROW, D, N, SAFE)
    local = tl.cumsum(gate, 1)  # G from the start of the block
    total = tl.sum(gate, 1)
    # decay before the block, after it, and between it and the middle of the chunk: sums of other blocks alone, so that
    # no bit depends on later tokens
    other = tl.arange(0, N)[None, :, None]
    before = tl.sum(tl.where(other < block, total[None, :, :], 0), 1)
    after = tl.sum(tl.where(other > block, total[None, :, :], 0), 1)
    between = ((other > block) & (other < N // 2)) | ((other < block) & (other >= N // 2))
    to_half = tl.exp2(tl.sum(tl.where(between, total[None, :, :], 0), 1))[:, None, :]
    last = tl.sum(total, 0)[None, :]
    decayed = tl.exp2(before)[:, None, :]
    growth = tl.exp2(local)

    tile = (slot.to(tl.int64) * num_heads + head) * (BT * D)
    in_tile = tile + (block * (BLOCK * D) + column)
    q_start = _normalized(q, left, Q_ROW, D, N) * scale * growth
    tl.store(qg + in_tile + row * D, (q_start * decayed).to(DTYPE))
    q_rows = _matrix(q_start, DTYPE)
    q_half = _matrix(q_start * to_half, DTYPE)

    kx = _normalized(k, left, K_ROW, D, N)
    k_start = kx * growth
    k_back = kx * tl.exp2(tl.minimum(-local, LARGEST_EXPONENT))
    if SAFE:
        k_end = k_back * tl.exp2(total)[:, None, :]
    else:
        k_end = kx * tl.exp2(total[:, None, :] - local)
    tl.store(kg + in_tile + row * D, (k_end * tl.exp2(after)[:, None, :]).to(DTYPE))
    k_decayed = _matrix(k_start * decayed, DTYPE)

    # blocks of the products: on the diagonal relative to the block's start, next to it relative to the end of the
    # column's block, and in the corner of blocks 2-3 by 0-1 relative to the middle of the chunk
    rows = tl.arange(0, BT)[:, None]
    cols = tl.arange(0, BT)[None, :]
    row_block = rows // BLOCK
    col_block = cols // BLOCK
    diagonal = (row_block == col_block) & (rows >= cols)
    adjacent = (row_block == col_block + 1) & (row_block % 2 == 1)
    corner = (row_block >= N // 2) & (col_block < N // 2)
    k_rows = _matrix(k_start, DTYPE)
    k_columns = tl.trans(_matrix(k_back, DTYPE))
    a_k = tl.dot(k_rows, k_columns)
    if not SAFE:
        steep = tl.min(total) < -LARGEST_EXPONENT
        if steep:  # rows anew from memory: held until here they would crowd out what the usual case needs
            kx = _normalized(k, left, K_ROW, D, N)
            a_k = _exact_diagonal(kx, kx, local)
    k_next = tl.trans(_matrix(k_end, DTYPE))
    a_k = tl.where(diagonal, a_k, 0)
    a_k = tl.where(adjacent, tl.dot(k_rows, k_next), a_k)
    k_half = _matrix(tl.where(block < N // 2, k_end, k_start) * to_half, DTYPE)
    a_k = tl.where(corner, tl.dot(k_half, tl.trans(k_half)), a_k)
    a_q = tl.dot(q_rows, k_columns)
    if not SAFE:
        if steep:
            qx = _normalized(q, left, Q_ROW, D, N) * scale
            kx = _normalized(k, left, K_ROW, D, N)
            a_q = _exact_diagonal(qx, kx, local)
    a_q = tl.where(diagonal, a_q, 0)
    a_q = tl.where(adjacent, tl.dot(q_rows, k_next), a_q)
    a_q = tl.where(corner, tl.dot(q_half, tl.trans(k_half)), a_q)
    square = (slot.to(tl.int64) * num_heads + head) * (BT * BT)
    tl.store(aqk + square + rows * BT + cols, a_q.to(DTYPE))

    token_in_chunk = tl.arange(0, BT)
    logit = tl.load(beta + token_in_chunk * BETA_ROW, mask=token_in_chunk < left, other=-float("inf")).to(tl.float32)
    root = tl.rsqrt(1 + tl.exp2(logit * -LOG2E))
    b = root * root
    a_k = tl.where(rows > cols, a_k * b[:, None], 0)

    # the inverse: forward substitution inside blocks, then block substitution for pairs of blocks and for the corner
    same = tl.arange(0, N)[:, None, None, None] == tl.arange(0, N)[None, None, :, None]
    a_block = tl.sum(tl.where(same, tl.reshape(a_k, (N, BLOCK, N, BLOCK)), 0), 2)
    i = tl.arange(0, BLOCK)[None, :, None]
    j = tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where((i == j) & (block >= 0), 1.0, 0.0)
    for step in tl.static_range(15):
        a_step = tl.sum(tl.where(j == step, a_block, 0), 2)
        x_step = tl.sum(tl.where(i == step, inverse, 0), 1)
        inverse -= a_step[:, :, None] * x_step[:, None, :]
    m = _on_diagonal(inverse)
    for level in tl.static_range(2):
        below = tl.where(adjacent if level == 0 else corner, a_k, 0)
        m -= tl.dot(tl.dot(m, below, input_precision=PRECISION), m, input_precision=PRECISION)
    m = (m * b[None, :]).to(DTYPE)

    d = tl.arange(0, D)
    tl.store(w + tile + rows * D + d[None, :], tl.dot(m, k_decayed).to(DTYPE))
    vx = tl.load(v + rows * V_ROW + d[None, :], mask=rows < left, other=0).to(DTYPE)
    tl.store(ut + tile + d[:, None] * BT + cols, tl.dot(tl.trans(vx), tl.trans(m)).to(DTYPE))
    tl.store(decay + (slot.to(tl.int64) * num_heads + head) * D + d[None, :], tl.exp2(last))


# Recurrence -----------------------------------------------------------------------------------------------------------


@triton.jit
def _recurrence(
    w, qg, kg, ut, aqk, decay, out, initial, final, summary, cu_seqlens,
    out_batch, out_row, out_head, num_seqs, seq_len, num_heads,
    D: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr,
    SEGMENT: tl.constexpr, SUMMARIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BV rows of the transposed state S [D, D] through the chunks of a sequence, or of a segment of SEGMENT chunks:

    U = ut - S w^T;  out = (S qg^T + U aqk^T)^T;  S <- S diag(decay) + U kg.

    The state is the left operand throughout and never leaves registers. With SUMMARIZE there is no output: row blocks
    of zeros give the segment's own state B, those of the identity with ut = 0 its transfer T, so that S <- S T + B.
    """
    NV: tl.constexpr = (2 if SUMMARIZE else 1) * D // BV
    DTYPE: tl.constexpr = w.dtype.element_ty
    pid = tl.program_id(0)
    v0 = pid % NV * BV
    head = pid // NV % num_heads
    index = pid // (NV * num_heads)
    if SEGMENT:
        seq, segment, start, length = _locate(index, cu_seqlens, num_seqs, seq_len, SEGMENT * BT, VARLEN)
        begin = segment * (SEGMENT * BT)
        ends = begin + SEGMENT * BT >= length
        if SUMMARIZE:
            if ends:  # nothing starts from the last segment
                return
        if (begin >= length) & (segment > 0):
            return
        chunks = tl.minimum(tl.cdiv(length - begin, BT), SEGMENT)
    else:
        seq = index
        start, length = _sequence(seq, cu_seqlens, seq_len, VARLEN)
        begin = 0
        ends = True
        chunks = tl.cdiv(length, BT)
    slot = _first_slot(seq, start, seq_len, BT, VARLEN) + begin // BT

    rows = v0 + tl.arange(0, BV)[:, None]
    d = tl.arange(0, D)[None, :]
    t = tl.arange(0, BT)
    of_sequence = (seq.to(tl.int64) * num_heads + head) * (D * D) + rows * D + d
    of_segment = (index.to(tl.int64) * num_heads + head) * (2 * D * D) + rows * D + d
    if SUMMARIZE:
        state = tl.where(rows - D == d, 1.0, 0.0)
    elif SEGMENT:
        state = tl.load(summary + of_segment)
    elif INITIAL:
        state = tl.load(initial + of_sequence)
    else:
        state = tl.zeros((BV, D), tl.float32)

    at_out = out + seq.to(tl.int64) * out_batch + (start + begin).to(tl.int64) * out_row + head * out_head
    at_out += t[:, None] * out_row + (v0 + tl.arange(0, BV))[None, :]
    tile = slot.to(tl.int64) * num_heads + head
    for i in tl.range(0, chunks, num_stages=STAGES):
        at = tile * (BT * D)
        wx = tl.load(w + at + t[:, None] * D + d)
        if SUMMARIZE:
            u = tl.load(ut + at + rows * BT + t[None, :], mask=rows < D, other=0)
        else:
            u = tl.load(ut + at + rows * BT + t[None, :])
        kx = tl.load(kg + at + t[:, None] * D + d)
        fade = tl.load(decay + tile * D + tl.arange(0, D))
        s = state.to(DTYPE)
        u = (u.to(tl.float32) - tl.dot(s, tl.trans(wx))).to(DTYPE)
        if not SUMMARIZE:
            qx = tl.load(qg + at + t[:, None] * D + d)
            a = tl.load(aqk + tile * (BT * BT) + t[:, None] * BT + t[None, :])
            o = tl.dot(u, tl.trans(a), tl.dot(s, tl.trans(qx)))
            tl.store(at_out, tl.trans(o).to(out.dtype.element_ty), mask=t[:, None] < length - begin - i * BT)
            at_out += BT * out_row
        state = tl.dot(u, kx, state * fade[None, :])
        tile += num_heads
    if SUMMARIZE:
        tl.store(summary + of_segment, state)
    elif ends:
        tl.store(final + of_sequence, state)


@triton.jit
def _scan(
    summary, initial, cu_seqlens, seq_len, num_heads,
    D: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Replaces every segment's own state B by the state that the segment starts from: S <- S T + B along a sequence."""
    NV: tl.constexpr = D // BV
    pid = tl.program_id(0)
    rows = (pid % NV * BV + tl.arange(0, BV))[:, None]
    d = tl.arange(0, D)
    head = pid // NV % num_heads
    seq = pid // (NV * num_heads)
    start, length = _sequence(seq, cu_seqlens, seq_len, VARLEN)
    in_state = rows * D + d[None, :]
    if INITIAL:
        state = tl.load(initial + (seq.to(tl.int64) * num_heads + head) * (D * D) + in_state)
    else:
        state = tl.zeros((BV, D), tl.float32)
    slot = _first_slot(seq, start, seq_len, SPAN, VARLEN)
    at = summary + (slot.to(tl.int64) * num_heads + head) * (2 * D * D)
    for _ in tl.range(1, tl.cdiv(length, SPAN), num_stages=STAGES):
        own = tl.load(at + in_state)
        transfer = tl.load(at + D * D + d[:, None] * D + d[None, :])
        tl.store(at + in_state, state)
        state = tl.dot(state, transfer, input_precision=PRECISION) + own
        at += num_heads * (2 * D * D)
    tl.store(at + in_state, state)


# Host side ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the recurrence is cut up. `segment` is in chunks; 0 runs every sequence in one piece."""

    block_v: int  # columns of the state a program
    warps: int
    stages: int  # buffers of the software pipeline
    segment: int = 0


def choose_schedule(*, target: str, sms: int, sequences: int, heads: int, tokens: int) -> Schedule:
    """The schedule for `sequences` sequences of `tokens` tokens together; from shapes, as lengths are on the device.

    `target` is "sm_90", "cuda" for any other NVIDIA GPU, "hip" or "cpu"; `sms` is its multiprocessors.
    """
    if target == "sm_90":
        block_v, warps, stages = (128, 8, 3) if 2 * sequences * heads > sms else (64, 4, 3)
    else:  # narrow enough for warp-level matrix instructions and for 100 KB of shared memory
        block_v, warps, stages = 32, 4, 2
    chunks = -(-tokens // (CHUNK * max(1, sequences)))
    segments = min(sms // max(1, sequences * heads * HEAD_DIM // block_v), chunks // MIN_SEGMENT)
    return Schedule(block_v, warps, stages, -(-chunks // segments) if segments >= MIN_SEGMENTS else 0)


@functools.cache
def _target(device: torch.device) -> tuple[str, int]:
    """What `choose_schedule` asks about a device, after checking that the kernels can run there."""
    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return "cpu", 1
    if device.type != "cuda":
        raise KDAInputError(
            f"q is on {device}; wanted a CUDA or ROCm device. With TRITON_INTERPRET=1 set before Python starts, "
            "Triton's interpreter runs the same source on cpu tensors (slow, for checking)"
        )
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip:
        return "hip", sms
    return "sm_90" if torch.cuda.get_device_capability(device) == (9, 0) else "cuda", sms


def _has_cuda_prologue(device: torch.device) -> bool:
    from . import kda_prologue_cuda

    return kda_prologue_cuda.available(device)


def implementation(device: torch.device | str) -> str:
    """What `kda_prefill` runs on bfloat16 tensors of this device: "cuda-sm90 + triton" or "triton"."""
    return "cuda-sm90 + triton" if _has_cuda_prologue(torch.device(device)) else "triton"


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float | None = None,
    gate: str = "safe",
    lower_bound: float = -5.0,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    schedule: Schedule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run whole prompts, or the next tokens of them, through one KDA layer's attention.

    Per head, with q and k L2-normalized (epsilon 1e-6 inside the root), q scaled, and the state S [V, K] in fp32:
    S <- S diag(exp(gate_t));  S <- S + sigmoid(beta_t) (v_t - S k_t) k_t^T;  o_t = S q_t.

    Args:
        q, k, v, g: [B, T, H, 128] bfloat16 or float16 (float32 in Triton's interpreter), one dtype, any strides with
            contiguous rows. g is the input of the gate, before bias and activation.
        beta: [B, T, H] logits, same dtype, any strides.
        A_log: [H] float32. dt_bias: [H * 128] or [H, 128] float32. Both contiguous.
        scale: factor on q; 128^-0.5 when None.
        gate: "safe" is lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), "softplus" is
            -exp(A_log) * softplus(g + dt_bias).
        lower_bound: of the safe gate, natural logarithm, in [-5, 0).
        initial_state: [N, H, 128, 128] float32 contiguous, V before K; zeros when None. It is not written.
        cu_seqlens: [N + 1] int64 or int32 on the device, from 0 up to at most T, not decreasing: where sequences that
            lie one behind the other start and end; then B is 1. When None every batch entry is a sequence and N is B.
        out: like v; allocated when None. Tokens of no sequence are not written.
        schedule: how the recurrence is cut up; chosen from the shapes when None.

    Returns:
        o [B, T, H, 128] in v's dtype, and the final states [N, H, 128, 128] float32. An empty sequence keeps its state.

    The host reads no tensor, so the call can be captured in a CUDA graph, and lengths may change between replays.
    Scratch: about 1.2 kB a token and head, plus 128 kB a segment and head where sequences are cut.

    Raises:
        KDAInputError: for every argument that cannot be honored. Contents are not read on the host.
    """
    check(q, k, v, g, beta, A_log, dt_bias, gate, lower_bound, initial_state, cu_seqlens, out)
    aligned = not any(t.data_ptr() % 16 or any(s % 8 for s in t.stride()[:3]) for t in (q, k, v, g))
    cuda = q.dtype == torch.bfloat16 and aligned and not dt_bias.data_ptr() % 16 and _has_cuda_prologue(q.device)
    return _run(
        cuda, q, k, v, g, beta, A_log, dt_bias, scale, gate, lower_bound, initial_state, cu_seqlens, out, schedule
    )


def kda_prefill_triton(
    q, k, v, g, beta, *, A_log, dt_bias, scale=None, gate="safe", lower_bound=-5.0, initial_state=None, cu_seqlens=None,
    out=None, schedule=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`kda_prefill` by the portable source alone, also where the CUDA prologue would run."""
    check(q, k, v, g, beta, A_log, dt_bias, gate, lower_bound, initial_state, cu_seqlens, out)
    return _run(
        False, q, k, v, g, beta, A_log, dt_bias, scale, gate, lower_bound, initial_state, cu_seqlens, out, schedule
    )


def _run(
    cuda_prologue, q, k, v, g, beta, A_log, dt_bias, scale, gate, lower_bound, initial_state, cu_seqlens, out, schedule
):
    device = q.device
    target, sms = _target(device)
    batch, tokens, heads, dim = q.shape
    varlen = cu_seqlens is not None
    sequences = cu_seqlens.numel() - 1 if varlen else batch
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = torch.empty(sequences, heads, dim, dim, dtype=torch.float32, device=device)
    if sequences * heads == 0:
        return out, final
    if varlen and cu_seqlens.dtype != torch.int64:
        cu_seqlens = cu_seqlens.long()
    if schedule is None:
        schedule = choose_schedule(target=target, sms=sms, sequences=sequences, heads=heads, tokens=batch * tokens)

    def slots(span):
        return tokens // span + sequences if varlen else batch * -(-tokens // span)

    # products take bf16 for fp16 inputs as well: operands relative to a block's start reach 2^115
    operand = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    chunks = slots(CHUNK)
    w, qg, kg, ut = torch.empty(4, chunks, heads, CHUNK * dim, dtype=operand, device=device)
    aqk = torch.empty(chunks, heads, CHUNK * CHUNK, dtype=operand, device=device)
    decay = torch.empty(chunks, heads, dim, dtype=torch.float32, device=device)
    operands = (w, qg, kg, ut, aqk, decay)
    safe = gate == "safe"
    scale = dim**-0.5 if scale is None else float(scale)
    lower_bound = float(lower_bound) if safe else 0.0
    strides = [(0 if varlen else t.stride(0), *t.stride()[1:3]) for t in (q, k, v, g, beta, out)]
    precision = "tf32" if target in ("sm_90", "cuda") else "ieee"
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if chunks == 0:
            pass
        elif cuda_prologue:
            from .kda_prologue_cuda import launch

            launch(
                q, k, v, g, beta, A_log, dt_bias, cu_seqlens, operands, strides[:5], scale, lower_bound, safe, sequences
            )
        else:
            _prologue[(chunks * heads,)](
                q, k, v, g, beta, A_log, dt_bias, cu_seqlens, *operands,
                *(s for stride in strides[:5] for s in stride[::2]), scale, lower_bound, sequences, tokens, heads,
                *(stride[1] for stride in strides[:5]),
                D=dim, BT=CHUNK, SAFE=safe, VARLEN=varlen, PRECISION=precision, num_warps=4,
            )  # fmt: skip
        options = {"VARLEN": varlen, "INITIAL": initial_state is not None, "D": dim}
        segment = schedule.segment if tokens else 0
        span, spans, summary = segment * CHUNK, sequences, None
        if segment:
            spans = slots(span)
            summary = torch.empty(spans, heads, 2, dim, dim, dtype=torch.float32, device=device)

        def recur(block_v, warps, stages, summarize):
            _recurrence[(spans * heads * (dim // block_v) * (2 if summarize else 1),)](
                *operands, out, initial_state, final, summary, cu_seqlens, *strides[5], sequences, tokens, heads,
                BT=CHUNK, BV=block_v, SEGMENT=segment, SUMMARIZE=summarize, STAGES=stages, num_warps=warps,
                **options,
            )  # fmt: skip

        if segment:
            recur(min(schedule.block_v, 64), 4, schedule.stages, True)
            _scan[(sequences * heads * (dim // SCAN_BLOCK_V),)](
                summary, initial_state, cu_seqlens, tokens, heads,
                BV=SCAN_BLOCK_V, SPAN=span, PRECISION=precision, STAGES=2, num_warps=4, **options,
            )  # fmt: skip
        recur(schedule.block_v, schedule.warps, schedule.stages, False)
    return out, final

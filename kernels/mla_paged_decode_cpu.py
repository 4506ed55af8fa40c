"""MLA paged decode as a task for any laptop: the GPU task's definition on small inputs, one CPU core, wall time.

The baseline is the plain PyTorch reference in fp32. It goes through the requests one by one; what there is to gain lies
in batching them, in reading shared pages once, and in leaving out copies and passes over the data.
"""

import math
from dataclasses import dataclass

NUM_PAGES = 1024
NUM_HEADS, HEAD_DIM_CKV, HEAD_DIM_KPE = 16, 512, 64
SM_SCALE = 0.1352337747812271  # 192^-0.5 (0.1 ln 40 + 1)^2, as in the GPU workloads
UNUSED_PAGE = 2147480000
TAIL = 5  # unused entries behind the page table of an awkward workload

DEFINITION = f"""\
Write a Python module (PyTorch, NumPy, the standard library; a C compiler is on the path) that defines

    mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale) -> (out, lse)

It is called on CPU tensors, contiguous, in this order:

| argument | shape | dtype |
|---|---|---|
| q_nope | [B, {NUM_HEADS}, {HEAD_DIM_CKV}] | bfloat16 |
| q_pe | [B, {NUM_HEADS}, {HEAD_DIM_KPE}] | bfloat16 |
| ckv_cache | [P, 1, {HEAD_DIM_CKV}] | bfloat16 |
| kpe_cache | [P, 1, {HEAD_DIM_KPE}] | bfloat16 |
| kv_indptr | [B + 1] | int32 |
| kv_indices | [N], N >= kv_indptr[B] | int32 |
| sm_scale | Python float | |

Outputs: `out` [B, {NUM_HEADS}, {HEAD_DIM_CKV}] bfloat16 and `lse` [B, {NUM_HEADS}] float32, exactly these dtypes.

For request b with rows I = kv_indices[kv_indptr[b]:kv_indptr[b + 1]], K = ckv_cache[I, 0], R = kpe_cache[I, 0]:

    s   = (q_nope[b] @ K.T + q_pe[b] @ R.T) * sm_scale      in float32
    out = softmax(s) @ K                                    the value row is the same K
    lse = log2(sum(exp(s)))                                 base 2

A request without rows gives out = 0 and lse = -inf. Pages may repeat and may be shared by requests. Pages that no
request refers to hold NaN, and entries of kv_indices beyond kv_indptr[B] are garbage: neither may be read.

Every element of both outputs must be within 1e-2 absolute or relative of an fp64 reference, and the error norm of `out`
may be at most 1.5 times the baseline's. Inputs must not be written to.

Timed is one call on the evaluator's clock, request to result, on one CPU core: all CPU time counts, that of other
threads included, while time spent waiting for a CPU that other programs use does not. A call during which a thread or
process begins costs its wall time on every CPU of the machine. Between calls the process is stopped with all its threads,
and it may leave no other process behind. Contents of every input change between calls while the buffers stay the same, so
nothing derived from contents can be kept from call to call; scratch buffers can. If the function takes `out` and `lse` as
keyword arguments, it is given buffers to write to and must return them.

The score is the geometric mean over the workloads of baseline time / your time. The baseline is a loop over requests in
plain PyTorch, in fp32. Workloads have 1 to 64 requests of 1 to 450 rows; in some, all requests begin with the same
pages.
"""

TECHNIQUES = {
    "batched": r"\bbmm\b|\bbaddbmm\b|\beinsum\b|\bmatmul\b|scaled_dot_product_attention",
    "padding": r"\bmask|\bpad\b|pad_sequence|\bclamp",
    "grouping": r"\bsort|\bargsort|bucket|\bgroup",
    "shared-prefix": r"prefix|\bunique\b|dedup|\bshared\b",
    "split-kv": r"split|\bmerge|partial",
    "online-softmax": r"online|running_max|\bm_new\b",
    "native-code": r"ctypes|cffi|load_inline|cpp_extension|torch\.compile|numba",
    "scratch-reuse": r"\bout=|_scratch|_buffer|_workspace",
}


@dataclass(frozen=True, slots=True)
class CpuWorkload:
    """Rows of each request; the first `shared` rows are the same pages for all of them."""

    index: int
    name: str
    lens: tuple[int, ...]
    shared: int = 0
    repeats: bool = False  # pages repeat at random, within and between requests
    tail: int = 0  # garbage entries behind the page table

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def tokens(self) -> int:
        return sum(self.lens)


_SHAPES = (
    ("many-short", tuple(1 + i % 9 for i in range(64)), 0),
    ("skewed", (240, *(4 + i for i in range(15))), 0),
    ("prefix", tuple(65 + i % 7 for i in range(32)), 64),
    ("even", (28,) * 16, 0),
    ("single", (400,), 0),
    ("few-short", (9, 17, 5, 30), 0),
    ("single-short", (40,), 0),
    ("two-long", (300, 450), 0),
    ("short-prefix", tuple(20 + i for i in range(16)), 16),
    ("many-mixed", tuple(1 + (7 * i) % 23 for i in range(64)), 0),
    ("prefix-skewed", (200, *(100 + i for i in range(15))), 96),
    ("medium", tuple(30 + 4 * i for i in range(12)), 0),
)
WORKLOADS = tuple(CpuWorkload(i, name, lens, shared) for i, (name, lens, shared) in enumerate(_SHAPES))
FEEDBACK = (0, 1, 2, 3, 4)
AWKWARD = (
    CpuWorkload(100, "one-row", (1,)),
    CpuWorkload(101, "empty-requests", (0, 3, 0, 0, 65, 0)),
    CpuWorkload(102, "all-empty", (0, 0)),
    CpuWorkload(103, "repeated-pages", (33, 1, 64, 7), repeats=True, tail=TAIL),
    CpuWorkload(104, "garbage-tail", (5, 127), tail=TAIL),
)


def make_inputs(workload: CpuWorkload, seed: int, device) -> tuple:
    """The definition's positional arguments on `device`; lengths, pages and values of each request follow the seed."""
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    lens = rng.permutation(workload.lens)
    pages = rng.permutation(NUM_PAGES)
    prefix, pages = pages[: workload.shared], pages[workload.shared :]
    own = int((lens - workload.shared).sum())
    rows = rng.choice(pages[: max(own // 2, 1)], own) if workload.repeats else pages[:own]
    parts, start = [], 0
    for length in lens - workload.shared:
        parts += [prefix, rows[start : start + length]]
        start += length
    indices = np.concatenate([*parts, np.full(workload.tail, UNUSED_PAGE)]).astype(np.int32)
    used = np.unique(indices[: workload.tokens])

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)

    ckv = torch.full((NUM_PAGES, 1, HEAD_DIM_CKV), math.nan, dtype=torch.bfloat16)
    kpe = torch.full((NUM_PAGES, 1, HEAD_DIM_KPE), math.nan, dtype=torch.bfloat16)
    ckv[used], kpe[used] = normal(len(used), 1, HEAD_DIM_CKV), normal(len(used), 1, HEAD_DIM_KPE)
    tensors = (
        normal(workload.batch, NUM_HEADS, HEAD_DIM_CKV),
        normal(workload.batch, NUM_HEADS, HEAD_DIM_KPE),
        ckv,
        kpe,
        torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)),
        torch.from_numpy(indices),
    )
    return (*(tensor.to(device) for tensor in tensors), SM_SCALE)


def reference(inputs: tuple) -> tuple:
    """(out, lse) in fp64."""
    from kernels.reference import mla_paged_decode_reference

    return mla_paged_decode_reference(*inputs)


def plain_pytorch(inputs: tuple):
    """The baseline on these inputs, as a callable without arguments."""
    import torch

    from kernels.reference import mla_paged_decode_reference

    def run():
        out, lse = mla_paged_decode_reference(*inputs, dtype=torch.float32)
        return out.to(torch.bfloat16), lse

    return run


def task():
    """The task as `kernels.tasks` lists it."""
    from kernels.tasks import Task

    def baseline(inputs):
        return "plain PyTorch, fp32", plain_pytorch(inputs)

    def compare(outputs, expected):
        from kernels.reference import compare

        return compare(outputs, expected)

    return Task(
        name="mla-paged-decode-cpu",
        title="MLA paged decode on one CPU core against plain PyTorch",
        device="cpu",
        entry_point="mla_paged_decode",
        definition=DEFINITION,
        workloads=WORKLOADS,
        feedback=FEEDBACK,
        awkward=AWKWARD,
        make_inputs=make_inputs,
        reference=reference,
        baseline=baseline,
        compare=compare,
        techniques=TECHNIQUES,
    )

"""What can be optimized: a task is a definition, its workloads, inputs, reference, baseline and gate.

Listing tasks and reading a definition imports no GPU library; `make_inputs`, `reference`, `baseline` and `compare` do.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.workloads import (
    FEEDBACK,
    HEAD_DIM_CKV,
    HEAD_DIM_KPE,
    NUM_HEADS,
    SM_SCALE,
    Workload,
    load_workloads,
    page_table,
)

if TYPE_CHECKING:
    import torch

    from kernels.reference import Errors

GARBAGE_INDEX = 2_147_480_000  # stands behind the used part of kv_indices: reading it cannot go unnoticed


class TaskError(ValueError):
    """A task that does not exist or cannot be loaded here."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel-optimization problem.

    `make_inputs(workload, seed, device)` gives the entry point's positional arguments, `reference(inputs)` the outputs
    in high precision, `compare(outputs, reference)` the verdict on them, `baseline(inputs)` the baseline's name and a
    callable without arguments that computes the outputs (whatever can be prepared ahead is prepared).
    """

    name: str
    title: str
    device: str  # "cuda" or "cpu"
    entry_point: str  # the function a candidate's module defines
    definition: str  # Markdown: inputs, outputs, rules, what is timed
    workloads: tuple[Workload, ...]
    feedback: tuple[int, ...]  # indices of the workloads whose results an author sees
    awkward: tuple[Workload, ...]  # small inputs that must be right but are not timed
    make_inputs: Callable[[Workload, int, "torch.device"], tuple]
    reference: Callable[[tuple], tuple]
    baseline: Callable[[tuple], tuple[str, Callable[[], tuple]]]
    compare: Callable[[tuple, tuple], "Errors"]
    techniques: dict[str, str] = field(default_factory=dict)  # name -> regular expression that confirms it in source


MLA_DEFINITION = f"""\
# mla-paged-decode: MLA decode attention over a paged KV cache (DeepSeek-V3/R1, tensor parallel 8), page size 1

Define `mla_paged_decode(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale)` in one Python file. It
may also take keywords `out=` and `lse=`: then it writes there. It returns `(out, lse)`.

| input | shape | dtype |
|---|---|---|
| q_nope | [B, {NUM_HEADS}, {HEAD_DIM_CKV}] | bfloat16 |
| q_pe | [B, {NUM_HEADS}, {HEAD_DIM_KPE}] | bfloat16 |
| ckv_cache | [P, 1, {HEAD_DIM_CKV}] | bfloat16 |
| kpe_cache | [P, 1, {HEAD_DIM_KPE}] | bfloat16 |
| kv_indptr | [B + 1] | int32, on the GPU, kv_indptr[0] = 0 |
| kv_indices | [N], N >= kv_indptr[B] | int32, on the GPU |
| sm_scale | Python float | {SM_SCALE} |

| output | shape | dtype |
|---|---|---|
| out | [B, {NUM_HEADS}, {HEAD_DIM_CKV}] | bfloat16 |
| lse | [B, {NUM_HEADS}] | float32, base 2 |

For request b with rows I = kv_indices[kv_indptr[b]:kv_indptr[b+1]], K = ckv_cache[I], R = kpe_cache[I]:
`s = (q_nope[b] K^T + q_pe[b] R^T) * sm_scale` in fp32, `out = softmax(s) K`, `lse = log2(sum(exp(s)))`.
The values are the same rows K. There is no mask. A request without tokens gives out = 0 and lse = -inf.

## Rules
- Right means: every element of out and lse within 1e-2 absolute or 1e-2 relative of an fp64 reference, -inf exactly
  where it is due, NaN nowhere, and the error ratio ||out - reference|| / ||reference|| of every request at most 1e-2
  and at most 1.5 times FlashInfer's own on the same inputs: accumulate in fp32.
- Pages that no request refers to hold NaN, and kv_indices may hold garbage behind kv_indptr[B]: do not read either.
- A page may stand in several requests. Lengths differ a hundredfold within a batch. Any B from 0 to 256 must be right.
- Values in the same buffers change between calls, lengths included: keep nothing that was derived from contents.
- All work is done on the current stream, inputs are left as they are, and the outputs are new tensors (or out=, lse=).

## What is timed
GPU time of one call (`run` scope): the call is queued behind a spinning kernel, so host time does not count, but
waiting for the GPU inside the call does. A call that cannot be captured in a CUDA graph is also held to its host time. The L2 cache
is cold: twice its size is written before every call.
47 workloads: B = 1 (8 to 2,708 tokens), B = 16 (457 to 17,257 in all), B = 64 (9,945 to 75,145 in all), P = 989,669.
The score is the geometric mean of FlashInfer's time divided by yours, FlashInfer's plan() done ahead and not counted.
Any wrong workload scores 0.
"""

MLA_TECHNIQUES = {
    "split-kv": r"(?i)split|partial",
    "tensor-cores": r"tl\.dot|mma\.sync|wgmma|warpgroup_mma|mma_v2",
    "single-launch-merge": r"atomic|ld\.acquire|st\.release|barrier",
    "device-side-schedule": r"(?i)indptr.*(cumsum|scan|shfl|ballot)|num_programs|gridDim",
    "async-copy": r"cp\.async(?!\.bulk)|async_copy",
    "tma": r"cp\.async\.bulk|tensor_descriptor|TensorDescriptor|\btma\b",
    "clusters": r"(?i)cluster",
    "persistent": r"(?i)persistent|cooperative",
    "warp-specialization": r"warp_specialize|setmaxnreg",
    "eviction-policy": r"evict_first|evict_last|L2::",
    "cuda-c++": r"__global__",
    "gluon": r"\bgluon\b",
}


def _awkward(number: int, name: str, lens: tuple[int, ...]) -> Workload:
    return Workload(2000 + number, f"awkward-{name}", -1, lens, num_pages=16_384)


MLA_AWKWARD = tuple(
    _awkward(number, name, lens)
    for number, (name, lens) in enumerate(
        {
            "no-requests": (),
            "one-token": (1,),
            "no-tokens-at-all": (0, 0, 0),
            "empty-requests-between": (0, 5, 0, 64, 1, 0),
            "around-tile-sizes": (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
            "one-long-among-short": (1, 2, 4097, 3, 1),
            "many-requests": tuple(1 + (37 * i) % 61 for i in range(200)),
        }.items()
    )
)


def mla_inputs(workload: Workload, seed: int, device: "torch.device") -> tuple:
    """Positional arguments of `mla_paged_decode` for a workload; pages that it does not refer to hold NaN.

    Awkward workloads (family -1) also get garbage behind the used part of kv_indices.
    """
    import torch

    kv_indptr, kv_indices = (torch.from_numpy(part).to(device) for part in page_table(workload, seed))
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device=device)

    pages, caches = kv_indices.long().unique(), []
    for dim in (HEAD_DIM_CKV, HEAD_DIM_KPE):
        cache = torch.full((workload.num_pages, 1, dim), torch.nan, dtype=torch.bfloat16, device=device)
        cache[pages] = normal(pages.numel(), 1, dim)
        caches.append(cache)
    if workload.family < 0:
        kv_indices = torch.cat([kv_indices, torch.full_like(kv_indptr, GARBAGE_INDEX)])
    queries = (normal(workload.batch, NUM_HEADS, dim) for dim in (HEAD_DIM_CKV, HEAD_DIM_KPE))
    return *queries, *caches, kv_indptr, kv_indices, SM_SCALE


def _mla_reference(inputs: tuple) -> tuple:
    from kernels.reference import mla_paged_decode_reference

    return mla_paged_decode_reference(*inputs)


def _mla_compare(outputs: tuple, reference: tuple) -> "Errors":
    from kernels.reference import compare

    return compare(outputs, reference)


def _mla_baseline(inputs: tuple) -> tuple[str, Callable[[], tuple]]:
    from kernels.baselines import FlashInferMLA, PlanMetadata, flashinfer_backends

    *tensors, kv_indptr, kv_indices, _ = inputs
    backend = flashinfer_backends(kv_indptr.device)[0]
    flashinfer = FlashInferMLA(backend, kv_indptr.device)
    flashinfer.plan(PlanMetadata.of(kv_indptr, kv_indices, "device"))
    return f"flashinfer-{backend}", lambda: flashinfer.run(*tensors, None, None)


def mla_paged_decode() -> Task:
    return Task(
        name="mla-paged-decode",
        title="MLA paged decode against FlashInfer",
        device="cuda",
        entry_point="mla_paged_decode",
        definition=MLA_DEFINITION,
        workloads=load_workloads(),
        feedback=FEEDBACK,
        awkward=MLA_AWKWARD,
        make_inputs=mla_inputs,
        reference=_mla_reference,
        baseline=_mla_baseline,
        compare=_mla_compare,
        techniques=MLA_TECHNIQUES,
    )


def _elsewhere(module: str) -> Callable[[], Task]:
    def load() -> Task:
        try:
            return importlib.import_module(module).task()
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise TaskError(f"{module.replace('.', '/')}.py is not in this version") from None

    return load


TASKS: dict[str, Callable[[], Task]] = {
    "mla-paged-decode": mla_paged_decode,
    "mla-paged-decode-cpu": _elsewhere("kernels.mla_paged_decode_cpu"),
    "kda-prefill": _elsewhere("kernels.kda_task"),
}


def load_task(name: str) -> Task:
    """The task of that name: one of TASKS, or of a file `kernels/<name>_task.py`. Raises TaskError if there is none."""
    own = f"kernels.{name.replace('-', '_')}_task"
    if name not in TASKS and re.fullmatch("[a-z0-9-]+", name) and importlib.util.find_spec(own):
        return importlib.import_module(own).task()
    if name not in TASKS:
        raise TaskError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]()

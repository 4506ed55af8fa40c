"""FlashInfer's MLA paged decode as the baseline: plan and run apart, every backend of the GPU, eager or in a graph."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from kernels.workloads import HEAD_DIM_CKV, HEAD_DIM_KPE, SM_SCALE

MIN_FLASHINFER = (0, 7)
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
PLAN_INPUTS = ("host", "host-indptr", "device")


class BaselineUnavailable(RuntimeError):
    """FlashInfer cannot be measured here; the message says why and what to do."""


def flashinfer_backends(device: torch.device) -> tuple[str, ...]:
    """FlashInfer's MLA backends for this GPU that take page size 1: fa3 on Hopper, fa2 from Ampere on."""
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        raise BaselineUnavailable("FlashInfer is not installed: pip install flashinfer-python") from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_FLASHINFER:
        wanted = ".".join(map(str, MIN_FLASHINFER))
        raise BaselineUnavailable(
            f"FlashInfer {version} is too old, {wanted} or newer is needed: pip install -U flashinfer-python"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise BaselineUnavailable(
            f"FlashInfer's MLA needs compute capability 8.0 or newer, this GPU has {major}.{minor}"
        )
    return ("fa3", "fa2") if (major, minor) == (9, 0) else ("fa2",)


@dataclass(frozen=True, slots=True)
class PlanMetadata:
    """What plan() reads, int32: `host` is all pinned host memory, `host-indptr` all but kv_indices, `device` none."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def of(cls, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, where: str) -> "PlanMetadata":
        batch = kv_indptr.numel() - 1
        tensors = [
            torch.arange(batch + 1, dtype=torch.int32, device=kv_indptr.device),
            kv_indptr,
            kv_indices,
            kv_indptr.diff(),
        ]
        if where != "device":
            tensors = [t if t is kv_indices and where == "host-indptr" else t.cpu().pin_memory() for t in tensors]
        return cls(*tensors)


class FlashInferMLA:
    """One planned FlashInfer wrapper with 16 heads, 512 + 64 dims, page size 1, bf16.

    With `graph_buffers` (batch, tokens) it is in CUDA-graph mode: plan() copies its metadata into buffers of that size,
    which a captured run() reads.
    """

    def __init__(self, backend: str, device: torch.device, graph_buffers: tuple[int, int] | None = None):
        from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

        self.backend = backend
        self._csr = MLAPlanMetadata.csr
        buffers = {}
        if graph_buffers:
            batch, tokens = graph_buffers
            sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": tokens, "kv_len_arr": batch}
            buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=bool(buffers), backend=backend, **buffers
        )

    def plan(self, inputs: PlanMetadata, num_heads: int = 16) -> None:
        self._wrapper.plan(
            metadata=self._csr(inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, inputs.kv_lens),
            num_heads=num_heads,
            head_dim_ckv=HEAD_DIM_CKV,
            head_dim_kpe=HEAD_DIM_KPE,
            page_size=1,
            causal=False,
            sm_scale=SM_SCALE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2",
        )

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse) -> tuple[torch.Tensor, torch.Tensor]:
        return self._wrapper.run(
            query=(q_nope, q_pe), kv_cache=(ckv_cache, kpe_cache), out=out, lse=lse, return_lse=True
        )


def build(device: torch.device, progress: Callable[[str], object] | None = None) -> dict[str, float]:
    """Compile (or load) FlashInfer's kernels for this GPU; seconds per backend that works.

    Raises BaselineUnavailable when none does. The first build of a backend takes about half a minute and needs nvcc.
    """
    seconds, failures = {}, []
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for backend in flashinfer_backends(device):
        if progress:
            progress(f"FlashInfer {backend}: loading, or building once (half a minute)")
        start = time.perf_counter()
        try:
            FlashInferMLA(backend, device).plan(PlanMetadata.of(indptr, indptr[:1], "device"))
        except (ImportError, OSError, RuntimeError) as error:
            failures.append(f"{backend}: {str(error).strip().splitlines()[-1][:200]}")
            continue
        seconds[backend] = time.perf_counter() - start
    if not seconds:
        raise BaselineUnavailable(f"FlashInfer's kernels could not be built, is nvcc on PATH? {'; '.join(failures)}")
    return seconds

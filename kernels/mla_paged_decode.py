"""Decode attention over a paged cache with multi-head latent attention (MLA): one launch, no plan, no host read.

    from kernels.mla_paged_decode import mla_paged_decode

    cache = torch.empty(num_pages, page_size, 576, dtype=torch.bfloat16, device="cuda")   # ckv and kpe side by side
    out, lse = mla_paged_decode(
        q[..., :512], q[..., 512:],              # [B, H, 576] query, latent part and rotary part
        cache[..., :512], cache[..., 512:],
        kv_indptr, kv_indices,                   # int32 [B + 1] and [N]: the pages of every request
        sm_scale, kv_lens=kv_lens,               # int32 [B], needed when page_size > 1
    )

The work is divided on the device from `kv_indptr` and `kv_lens`, so a captured CUDA graph follows lengths that change
between replays, up to the number of pages that `kv_indices` had at capture.
"""

import torch

from .mla_paged_decode_arguments import MLAInputError, check_layout, checked_launch

__all__ = ["MLAInputError", "implementation", "mla_paged_decode"]


def mla_paged_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    *,
    kv_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one new token per request to the request's cached tokens.

    Request b owns the pages `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`; its tokens fill them in order. With the rows
    K (ckv) and R (kpe) of those tokens, s = (q_nope K^T + q_pe R^T) * sm_scale, out = softmax(s) K and
    lse = log2(sum exp(s)).

    Args:
        q_nope: [B, H, 512] bf16 or fp16, H in 8, 16, 32, 64, 128; any strides with contiguous rows.
        q_pe: [B, H, 64], same dtype.
        ckv_cache: [P, page_size, 512], same dtype, page_size in 1, 16, 32, 64; any strides with contiguous rows.
        kpe_cache: [P, page_size, 64], same dtype.
        kv_indptr: int32 [B + 1], not decreasing; kv_indptr[0] may be above 0.
        kv_indices: int32 [N], N >= kv_indptr[B]; entries past kv_indptr[B] are never followed.
        sm_scale: factor on the scores before the softmax.
        kv_lens: int32 [B], tokens in each request, at most its pages times page_size. Needed when page_size > 1;
            without it every page is full.
        out: [B, H, 512] contiguous, dtype of q_nope; allocated when None.
        lse: [B, H] fp32 contiguous; allocated when None.

    Returns:
        (out, lse). lse is in base 2. A request without tokens gives out = 0 and lse = -inf.

    Raises:
        MLAInputError: for every argument that cannot be honored. Contents of tensors are not read on the host, so
            page numbers outside the cache and a decreasing kv_indptr are not detected.
    """
    if torch.compiler.is_compiling() or (isinstance(q_nope, torch.Tensor) and type(q_nope) is not torch.Tensor):
        out = q_nope.new_empty(q_nope.shape) if out is None else out
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32) if lse is None else lse
        _paged_decode_op(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse)
        return out, lse
    return checked_launch(
        _launch, q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens=kv_lens, out=out, lse=lse
    )


def implementation(device: torch.device | str) -> str:
    """What `mla_paged_decode` runs on tensors of this device: "cuda-sm90" or "triton"."""
    return _back_end(_with_index(torch.device(device)))[0]


# Back ends ------------------------------------------------------------------------------------------------------------

_back_ends: dict[torch.device, tuple] = {}


def _back_end(device):
    """(name, launch) of the best kernel for one device, chosen once a device."""
    chosen = _back_ends.get(device)
    if chosen is None:
        chosen = _back_ends[device] = _choose_back_end(device)
    return chosen


def _launch(device):
    return _back_end(device)[1]


def _choose_back_end(device):
    if device.type == "cuda":
        from . import mla_paged_decode_cuda

        if mla_paged_decode_cuda.available(device):
            return "cuda-sm90", mla_paged_decode_cuda.launch
    from . import mla_paged_decode_triton

    mla_paged_decode_triton.require_device(device)
    return "triton", mla_paged_decode_triton.launch


def _with_index(device):
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# torch.compile --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("mla::paged_decode", mutates_args=("out", "lse"))
def _paged_decode_op(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    kv_lens: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    checked_launch(
        _launch, q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens=kv_lens, out=out, lse=lse
    )


@_paged_decode_op.register_fake
def _(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse):
    check_layout(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, out, lse)

"""Arguments of MLA paged decode: what every back end can run, checked once a layout, and the launch behind the checks."""

import math

import torch

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
NUM_HEADS = (8, 16, 32, 64, 128)
PAGE_SIZES = (1, 16, 32, 64)
DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: rows are moved in 16-byte pieces
MAX_TOKENS = 2**30  # token positions are 32-bit on the device, with room for sums of two; row offsets are 64-bit
MAX_STRIDE = 2**32  # bytes between pages, tokens, requests or heads; 64-bit offsets are products with it


class MLAInputError(ValueError):
    """An argument that no back end can run; the message gives the value seen, the value wanted and the next step."""


def checked_launch(
    choose, q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, *, kv_lens, out, lse
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, allocate the outputs that are None, and run `choose(device)`, a launch, on the tensors' device."""
    _check(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, out, lse)
    if type(sm_scale) is not float:
        sm_scale = _as_float(sm_scale)
    elif not math.isfinite(sm_scale):
        raise MLAInputError(f"sm_scale is {sm_scale}; wanted a finite number")
    device = q_nope.device
    batch, heads = q_nope.shape[:2]
    if out is None:
        out = torch.empty((batch, heads, HEAD_DIM_CKV), dtype=q_nope.dtype, device=device)
    if lse is None:
        lse = torch.empty((batch, heads), dtype=torch.float32, device=device)
    if batch == 0:
        return out, lse
    launch = choose(device)
    arguments = (q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(*arguments)
    else:
        launch(*arguments)
    return out, lse


# Layouts that passed. A layout is everything the checks read except addresses and the length of kv_indices, which
# change from call to call and are looked at every time. Contents are never looked at.
_passed: set[tuple] = set()
_MAX_PASSED = 4096


def _check(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, out, lse):
    try:
        layout = (
            q_nope.dtype, q_nope.device, q_nope.shape, q_nope.stride(),
            q_pe.dtype, q_pe.device, q_pe.shape, q_pe.stride(),
            ckv_cache.dtype, ckv_cache.device, ckv_cache.shape, ckv_cache.stride(),
            kpe_cache.dtype, kpe_cache.device, kpe_cache.shape, kpe_cache.stride(),
            kv_indptr.dtype, kv_indptr.device, kv_indptr.shape, kv_indptr.stride(),
            kv_indices.dtype, kv_indices.device, kv_indices.stride(),
            None if kv_lens is None else (kv_lens.dtype, kv_lens.device, kv_lens.shape, kv_lens.stride()),
            None if out is None else (out.dtype, out.device, out.shape, out.stride()),
            None if lse is None else (lse.dtype, lse.device, lse.shape, lse.stride()),
        )  # fmt: skip
    except (AttributeError, TypeError):
        layout = None  # something is no tensor: the full check names it
    if layout not in _passed:
        check_layout(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, out, lse)
        if len(_passed) >= _MAX_PASSED:
            _passed.clear()
        _passed.add(layout)
    if kv_indices.shape[0] * ckv_cache.shape[1] > MAX_TOKENS:
        raise MLAInputError(
            f"kv_indices holds {kv_indices.shape[0]} pages of {ckv_cache.shape[1]} tokens; wanted at most {MAX_TOKENS} "
            "tokens in one call. Split the batch"
        )
    addresses = q_nope.data_ptr() | q_pe.data_ptr() | ckv_cache.data_ptr() | kpe_cache.data_ptr()
    if out is not None:
        addresses |= out.data_ptr()
        if out.data_ptr() == q_nope.data_ptr() != 0:
            raise MLAInputError("out and q_nope share memory, and q_nope is read while out is written; pass another")
    if addresses % ALIGNMENT:
        named = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache, "out": out}
        name, tensor = next((n, t) for n, t in named.items() if t is not None and t.data_ptr() % ALIGNMENT)
        raise MLAInputError(
            f"{name} starts {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT} bytes; wanted 0. "
            f"Start the slice at a multiple of {ALIGNMENT // tensor.element_size()} elements, or call .clone()"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q_nope, q_pe, ckv_cache, kpe_cache)):
        raise MLAInputError("an input requires grad, and decode has no backward; call it under torch.inference_mode()")


def check_layout(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_lens, out, lse) -> None:
    """Raise MLAInputError unless types, dtypes, devices, shapes and strides are ones that the back ends run."""
    required = {
        "q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache,
        "kv_indptr": kv_indptr, "kv_indices": kv_indices,
    }  # fmt: skip
    optional = {name: t for name, t in (("kv_lens", kv_lens), ("out", out), ("lse", lse)) if t is not None}
    for name, tensor in (required | optional).items():
        if not isinstance(tensor, torch.Tensor):
            raise MLAInputError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
        if tensor.device != q_nope.device:
            raise MLAInputError(f"{name} is on {tensor.device}, q_nope on {q_nope.device}; move them to one device")

    if q_nope.dtype not in DTYPES:
        raise MLAInputError(f"q_nope is {q_nope.dtype}; wanted torch.bfloat16 or torch.float16. Convert it with .to()")
    for name in ("q_pe", "ckv_cache", "kpe_cache", "out"):
        if name in required | optional:
            _check_dtype(name, (required | optional)[name], q_nope.dtype, "as q_nope")
    for name in ("kv_indptr", "kv_indices", "kv_lens"):
        if name in required | optional:
            _check_dtype(name, (required | optional)[name], torch.int32, "token and page numbers are 32-bit")
    if lse is not None:
        _check_dtype("lse", lse, torch.float32, "it is never narrowed")

    if q_nope.dim() != 3 or q_nope.shape[1] not in NUM_HEADS or q_nope.shape[2] != HEAD_DIM_CKV:
        raise MLAInputError(
            f"q_nope has shape {_shape(q_nope)}; wanted [B, H, {HEAD_DIM_CKV}] with H in {_listed(NUM_HEADS)}. "
            "Pad the heads to the next of these"
        )
    batch, heads = q_nope.shape[:2]
    _check_shape("q_pe", q_pe, (batch, heads, HEAD_DIM_KPE), "[B, H, 64], as q_nope")
    if ckv_cache.dim() != 3 or ckv_cache.shape[1] not in PAGE_SIZES or ckv_cache.shape[2] != HEAD_DIM_CKV:
        raise MLAInputError(
            f"ckv_cache has shape {_shape(ckv_cache)}; wanted [P, page_size, {HEAD_DIM_CKV}] "
            f"with page_size in {_listed(PAGE_SIZES)}. Add the page dimension with .unsqueeze(1) if rows are pages"
        )
    pages, page_size = ckv_cache.shape[:2]
    _check_shape("kpe_cache", kpe_cache, (pages, page_size, HEAD_DIM_KPE), "[P, page_size, 64], as ckv_cache")
    _check_shape("kv_indptr", kv_indptr, (batch + 1,), "[B + 1]")
    if kv_indices.dim() != 1:
        raise MLAInputError(f"kv_indices has shape {_shape(kv_indices)}; wanted [N]: the pages of request 0, 1, ...")
    if kv_lens is None and page_size > 1:
        raise MLAInputError(
            f"kv_lens is None and page_size is {page_size}; wanted the tokens of each request, int32 [B], "
            "as the last page may be partly filled"
        )
    if kv_lens is not None:
        _check_shape("kv_lens", kv_lens, (batch,), "[B]")
    if out is not None:
        _check_shape("out", out, (batch, heads, HEAD_DIM_CKV), "the shape of q_nope")
    if lse is not None:
        _check_shape("lse", lse, (batch, heads), "[B, H]")

    for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"):
        _check_rows(name, required[name])
    for name, tensor in (required | optional).items():
        if name in ("kv_indptr", "kv_indices", "kv_lens", "out", "lse") and not tensor.is_contiguous():
            raise MLAInputError(f"{name} has strides {tensor.stride()}; wanted a contiguous tensor. Call .contiguous()")


def _check_dtype(name, tensor, wanted, why):
    if tensor.dtype != wanted:
        raise MLAInputError(f"{name} is {tensor.dtype}; wanted {wanted}, {why}. Convert it with .to({wanted})")


def _check_shape(name, tensor, wanted, meaning):
    if tuple(tensor.shape) != wanted:
        raise MLAInputError(f"{name} has shape {_shape(tensor)}; wanted {list(wanted)}: {meaning}")


def _check_rows(name, tensor):
    """Rows of the last dimension must be contiguous and start at multiples of 16 bytes."""
    if tensor.stride(2) != 1:
        raise MLAInputError(f"{name} has strides {tensor.stride()}; wanted 1 in the last dimension. Call .contiguous()")
    unit = ALIGNMENT // tensor.element_size()
    if max(tensor.stride()) * tensor.element_size() >= MAX_STRIDE:
        raise MLAInputError(
            f"{name} has strides {tensor.stride()}; wanted less than {MAX_STRIDE // tensor.element_size()} elements. "
            "Take the view from a smaller buffer"
        )
    for dim in (0, 1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) % unit:
            raise MLAInputError(
                f"{name} has strides {tensor.stride()}; wanted multiples of {unit} elements ({ALIGNMENT} bytes) "
                "before the last dimension. Pad the rows, or call .contiguous()"
            )


def _as_float(sm_scale):
    if isinstance(sm_scale, torch.Tensor):
        raise MLAInputError("sm_scale is a Tensor; wanted a Python float, as reading a tensor would stall the host")
    try:
        value = float(sm_scale)
    except (TypeError, ValueError, OverflowError):
        raise MLAInputError(f"sm_scale is {repr(sm_scale)[:40]}; wanted a Python float") from None
    if not math.isfinite(value):
        raise MLAInputError(f"sm_scale is {value}; wanted a finite number")
    return value


def _shape(tensor):
    return list(tensor.shape)


def _listed(values):
    return ", ".join(map(str, values))

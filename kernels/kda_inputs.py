"""What a KDA prefill accepts: one clear error for every argument that cannot be honored."""

import math

import torch

HEAD_DIM = 128  # of keys and of values
GATES = ("safe", "softplus")
LOWEST_BOUND = -5.0  # natural logarithm; 16 tokens at this gate still fit fp32 when taken relative to the first
DTYPES = (torch.bfloat16, torch.float16)


class KDAInputError(ValueError):
    """An argument that cannot be run; the message gives the value seen, the value wanted and the next step."""


def check(q, k, v, g, beta, A_log, dt_bias, gate, lower_bound, initial_state, cu_seqlens, out) -> None:
    """Raise KDAInputError unless types, dtypes, devices, shapes and strides are ones that the kernels run."""
    required = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "out": out}
    given = required | {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise KDAInputError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor")
        if tensor.device != q.device:
            raise KDAInputError(f"{name} is on {tensor.device}, q on {q.device}; move them to one device")
    _check_gate(gate, lower_bound)

    dtypes = DTYPES if q.device.type != "cpu" else (torch.float32,)
    if q.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        why = "" if q.device.type != "cpu" else ": Triton's interpreter multiplies the bit patterns of narrower types"
        raise KDAInputError(f"q is {q.dtype}; wanted {wanted}{why}. Convert it with .to()")
    for name in ("k", "v", "g", "beta", "out"):
        if name in given:
            _check_dtype(name, given[name], q.dtype)
    for name in ("A_log", "dt_bias", "initial_state"):
        if name in given:
            _check_dtype(name, given[name], torch.float32)

    if q.dim() != 4 or q.shape[3] != HEAD_DIM:
        raise KDAInputError(f"q has shape {list(q.shape)}; wanted [B, T, H, {HEAD_DIM}]")
    batch, tokens, heads, _ = q.shape
    for name in ("k", "v", "g", "out"):
        if name in given:
            _check_shape(name, given[name], q.shape, "the shape of q")
    _check_shape("beta", beta, (batch, tokens, heads), "[B, T, H]")
    _check_shape("A_log", A_log, (heads,), "[H]")
    if tuple(dt_bias.shape) not in ((heads * HEAD_DIM,), (heads, HEAD_DIM)):
        raise KDAInputError(
            f"dt_bias has shape {list(dt_bias.shape)}; wanted [{heads * HEAD_DIM}] or [{heads}, {HEAD_DIM}]"
        )
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int64, torch.int32):
            raise KDAInputError(f"cu_seqlens is {cu_seqlens.dtype}; wanted torch.int64 or torch.int32")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise KDAInputError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; wanted [N + 1], starting with 0")
        if batch != 1:
            raise KDAInputError(
                f"q has {batch} batch entries and cu_seqlens is given; wanted one, all sequences side by side"
            )
        sequences = cu_seqlens.numel() - 1
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (sequences, heads, HEAD_DIM, HEAD_DIM), "[N, H, V, K]")

    for name in ("q", "k", "v", "g", "out"):
        if name in given and given[name].stride(3) != 1 and given[name].numel():
            raise KDAInputError(
                f"{name} has strides {given[name].stride()}; wanted 1 in the last dimension. Call .contiguous()"
            )
    for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens"):
        if name in given and not given[name].is_contiguous():
            raise KDAInputError(
                f"{name} has strides {given[name].stride()}; wanted a contiguous tensor. Call .contiguous()"
            )
    if torch.is_grad_enabled() and any(t.requires_grad for t in given.values()):
        raise KDAInputError(
            "an input requires grad, and this prefill has no backward; call it under torch.inference_mode()"
        )


def _check_gate(gate, lower_bound) -> None:
    if gate not in GATES:
        raise KDAInputError(f"gate is {gate!r}; wanted one of {', '.join(map(repr, GATES))}")
    if gate != "safe":
        return
    if (
        not isinstance(lower_bound, int | float)
        or not math.isfinite(lower_bound)
        or not LOWEST_BOUND <= lower_bound < 0
    ):
        raise KDAInputError(f"lower_bound is {lower_bound!r}; wanted a number in [{LOWEST_BOUND:g}, 0)")


def _check_dtype(name, tensor, wanted) -> None:
    if tensor.dtype != wanted:
        raise KDAInputError(f"{name} is {tensor.dtype}; wanted {wanted}. Convert it with .to({wanted})")


def _check_shape(name, tensor, wanted, meaning) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise KDAInputError(f"{name} has shape {list(tensor.shape)}; wanted {list(wanted)}: {meaning}")

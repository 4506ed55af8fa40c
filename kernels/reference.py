"""What a right answer is: MLA paged decode in fp64 on the gathered rows, and the gate that every kernel must pass."""

import math
from dataclasses import asdict, dataclass

import torch

ABSOLUTE_TOLERANCE = 1e-2
RELATIVE_TOLERANCE = 1e-2
ERROR_RATIO_MARGIN = 1.5  # how much larger than the baseline's own error ratio a kernel's may be
ERROR_RATIO_LIMIT = 1e-2  # without a baseline: about three times what bf16 inputs and a bf16 output cost


def mla_paged_decode_reference(
    q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens=None, *, dtype=torch.float64
):
    """Attention output and base-2 log-sum-exp, both in `dtype`.

    Shapes as in `mla_paged_decode`: q_nope [B, H, C], q_pe [B, H, R], caches [P, page_size, C or R], kv_indptr [B + 1],
    kv_indices [>= kv_indptr[B]], kv_lens [B] (needed when page_size > 1). Rows are gathered before they are upcast: the
    cache may be larger than the memory that is left. A request without tokens gives out = 0 and lse = -inf.
    """
    batch, heads, _ = q_nope.shape
    out = torch.zeros(batch, heads, ckv_cache.shape[-1], dtype=dtype, device=q_nope.device)
    lse = torch.full((batch, heads), -math.inf, dtype=dtype, device=q_nope.device)
    offsets = kv_indptr.tolist()
    for b in range(batch):
        pages = kv_indices[offsets[b] : offsets[b + 1]].long()
        keys, rope_keys = ckv_cache[pages].flatten(0, 1), kpe_cache[pages].flatten(0, 1)
        if kv_lens is not None:
            keys, rope_keys = keys[: int(kv_lens[b])], rope_keys[: int(kv_lens[b])]
        if len(keys) == 0:
            continue
        keys, rope_keys = keys.to(dtype), rope_keys.to(dtype)
        scores = (q_nope[b].to(dtype) @ keys.T + q_pe[b].to(dtype) @ rope_keys.T) * sm_scale
        lse[b] = torch.logsumexp(scores, dim=-1) / math.log(2)
        out[b] = torch.softmax(scores, dim=-1) @ keys
    return out, lse


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a kernel's outputs are from the reference, and whether that passes.

    `error_ratio` is ||out - reference|| / ||reference|| of the worst request, so that one wrong request of many cannot
    hide.
    """

    ok: bool
    reason: str  # empty when ok
    max_abs: float
    lse_error: float
    error_ratio: float

    def to_json(self) -> dict:
        return asdict(self)


def compare(outputs, reference, *, out_dtype=torch.bfloat16, error_ratio_limit: float = ERROR_RATIO_LIMIT) -> Errors:
    """Judge (out, lse) of a kernel against (out, lse) of `mla_paged_decode_reference`.

    Every element of out and lse must be within 1e-2 absolute or 1e-2 relative; -inf must stand exactly where the
    reference has it; NaN never passes, on either side. `error_ratio_limit` bounds what the elementwise gate lets
    through.
    """
    malformed = _malformed(outputs, reference, out_dtype)
    if malformed:
        return Errors(False, malformed, math.inf, math.inf, math.inf)
    out_reason, max_abs = _elementwise("out", outputs[0], reference[0])
    lse_reason, lse_error = _elementwise("lse", outputs[1], reference[1])
    error_ratio = _error_ratio(outputs[0], reference[0])
    ratio_reason = ""
    if not error_ratio <= error_ratio_limit:
        ratio_reason = f"out has error ratio {error_ratio:.2e}, must be at most {error_ratio_limit:.2e}"
    reason = out_reason or lse_reason or ratio_reason
    return Errors(not reason, reason, max_abs, lse_error, error_ratio)


def _malformed(outputs, reference, out_dtype) -> str:
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
        return f"returned {type(outputs).__name__}, must return (out, lse)"
    for name, value, wanted, dtype in zip(("out", "lse"), outputs, reference, (out_dtype, torch.float32)):
        if type(value) is not torch.Tensor:
            return f"{name} is {type(value).__name__}, must be a plain torch.Tensor"
        if (value.shape, value.dtype, value.device) != (wanted.shape, dtype, wanted.device):
            return (
                f"{name} is {value.dtype} {list(value.shape)} on {value.device}, "
                f"must be {dtype} {list(wanted.shape)} on {wanted.device}"
            )
    return ""


def _elementwise(name: str, value: torch.Tensor, wanted: torch.Tensor) -> tuple[str, float]:
    value = value.double()
    if wanted.isnan().any() or (wanted == math.inf).any():
        return f"the reference's {name} is not finite: the inputs reach NaN or infinity", math.inf
    difference = (value - wanted).abs()
    difference[(value == wanted) & wanted.isinf()] = 0.0  # -inf where -inf is due
    allowed = torch.clamp(RELATIVE_TOLERANCE * wanted.abs(), min=ABSOLUTE_TOLERANCE)
    allowed[wanted.isinf()] = 0.0
    wrong = ~(difference <= allowed)
    worst = difference.nan_to_num(nan=math.inf).max().item() if difference.numel() else 0.0
    if not wrong.any():
        return "", worst
    first = wrong.nonzero()[0].tolist()
    at = tuple(first)
    return (
        f"{name}{first} is {value[at].item():.6g}, must be {wanted[at].item():.6g}; {int(wrong.sum())} elements differ",
        worst,
    )


def _error_ratio(out: torch.Tensor, wanted: torch.Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    error = (out.double() - wanted).flatten(1).norm(dim=1)
    norm = wanted.flatten(1).norm(dim=1)
    ratios = torch.where(norm > 0, error / norm, error)
    return ratios.nan_to_num(nan=math.inf).max().item()

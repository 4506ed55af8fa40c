"""Inputs of KDA prefill in the regimes where implementations went wrong: saturated and unbounded gates, nearly equal
keys."""

import math

import torch

DIM = 128


def _saturated(x):
    x["g"] += 20  # every gate at lower_bound: 16 tokens decay by exp(-80)


def _weak_decay(x):
    x["g"] -= 12


def _collinear(x):
    x["k"] = torch.randn_like(x["k"][:, :1]) + 0.02 * x["k"]
    x["beta"].fill_(6)
    x["g"] -= 12


def _checkpoint(x):
    """Ranges seen in trained models: nearly equal keys, beta of about 0.95, small gates."""
    x["k"] = torch.randn_like(x["k"][:, :1]) + 0.02 * x["k"]
    x["beta"].fill_(3)
    x["A_log"].zero_()
    x["dt_bias"] = x["dt_bias"] * 6.4 - 7.8


def _softplus(x):
    x["A_log"].fill_(math.log(16))
    x["dt_bias"] -= 4
    x["gate"] = "softplus"


def _steep(x):
    """Single tokens that decay by exp(-50) and more, so blocks decay by more than fp32 can hold."""
    x["A_log"].fill_(math.log(16))
    x["g"] *= 3
    x["gate"] = "softplus"


REGIMES = {
    "random": lambda x: None,
    "saturated": _saturated,
    "weak decay": _weak_decay,
    "collinear keys": _collinear,
    "checkpoint": _checkpoint,
    "softplus": _softplus,
    "steep softplus": _steep,
}


def kda_inputs(lengths, heads=1, *, regime="random", batch=None, state=True, dtype=torch.float32, device="cpu", seed=0):
    """(positional arguments, keywords) of `kda_prefill`: sequences side by side, or `batch` entries of `lengths[0]`
    tokens."""
    torch.manual_seed(seed)
    shape = (batch or 1, lengths[0] if batch else sum(lengths), heads)
    x = {name: torch.randn(*shape, DIM, device=device) for name in "qkvg"}
    x |= {"beta": torch.randn(shape, device=device), "A_log": torch.rand(heads, device=device)}
    x |= {"dt_bias": torch.rand(heads * DIM, device=device), "gate": "safe"}
    REGIMES[regime](x)
    arguments = tuple(x.pop(name).to(dtype) for name in ("q", "k", "v", "g", "beta"))
    sequences = batch or len(lengths)
    x["initial_state"] = torch.randn(sequences, heads, DIM, DIM, device=device) if state else None
    x["cu_seqlens"] = None if batch else torch.tensor([0, *lengths], device=device).cumsum(0)
    return arguments, x


def error_ratio(value, wanted) -> float:
    """||value - wanted|| / ||wanted||, infinite where something is not finite."""
    if not value.isfinite().all():
        return math.inf
    error, norm = (value.double() - wanted.double()).norm().item(), wanted.double().norm().item()
    return error / norm if norm else error

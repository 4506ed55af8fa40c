"""What KDA prefill is compared with: FLA's chunk_kda and FlashKDA, each on its fastest public path, and proof of what
ran."""

import os
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

import torch

from kernels.baselines import BaselineUnavailable

FLA = "fla-safe-gate"  # chunk_kda with safe_gate=True: tensor cores inside 16-token blocks
FLA_UNSAFE = "fla"  # with safe_gate=False, what FlashKDA's published ratios compare with
FLASH_KDA = "flash-kda"
FLASH_KDA_BF16 = "flash-kda-bf16-state"
NAMES = (FLA, FLA_UNSAFE, FLASH_KDA, FLASH_KDA_BF16)

INSTALL = {
    FLA: "fla-core",
    FLA_UNSAFE: "fla-core",
    FLASH_KDA: "tokenspeed-flashkda",
    FLASH_KDA_BF16: "tokenspeed-flashkda",
}
# a kernel that only this path launches
_MARKERS = {
    FLA: "chunk_kda_fwd_kernel_intra_sub_chunk",
    FLA_UNSAFE: "chunk_kda_fwd_kernel_intra_token_parallel",
    FLASH_KDA: "_flash_kda_fwd_recurrence",
    FLASH_KDA_BF16: "_flash_kda_fwd_recurrence",
}
_MODULES = {"fla-core": "fla", "tokenspeed-flashkda": "flash_kda"}


def versions() -> dict[str, str]:
    """Versions of the baselines' packages that are installed."""
    return {package: metadata.version(package) for package, module in _MODULES.items() if find_spec(module)}


def installed(name: str) -> bool:
    """Whether the package of baseline `name` is installed."""
    return find_spec(_MODULES[INSTALL[name]]) is not None


def prepare(
    name: str, q, k, v, g, beta, *, A_log, dt_bias, scale=None, lower_bound=-5.0, initial_state, cu_seqlens=None
) -> Callable:
    """A callable without arguments that runs baseline `name` and returns (o, final state [N, H, V, K]).

    Inputs as for `kda_prefill` with the safe gate; the state is float32 in and out, except for FLASH_KDA_BF16.
    Raises BaselineUnavailable when it is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"there is no baseline {name!r}; there are {', '.join(NAMES)}")
    if not installed(name):
        raise BaselineUnavailable(f"{name} is not installed: pip install {INSTALL[name]}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if name in (FLA, FLA_UNSAFE):
        return _fla(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens, name == FLA)
    state = initial_state if name == FLASH_KDA else initial_state.bfloat16()
    return _flash_kda(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, state, cu_seqlens)


def _fla(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens, safe_gate):
    os.environ["FLA_FLASH_KDA"] = (
        "0"  # read at every call: otherwise chunk_kda hands over to FlashKDA where that is installed
    )
    from fla.ops.kda import chunk_kda

    @torch.inference_mode()
    def run():
        return chunk_kda(
            q, k, v, g, beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
        )  # fmt: skip

    return run


def _flash_kda(q, k, v, g, beta, A_log, dt_bias, scale, lower_bound, initial_state, cu_seqlens):
    import flash_kda

    out, final = torch.empty_like(v), torch.empty_like(initial_state)
    bias = dt_bias.view(q.shape[2], q.shape[3])

    def run():
        flash_kda.fwd(
            q, k, v, g, beta, scale, out, A_log, bias, lower_bound,
            initial_state=initial_state, final_state=final, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return out, final

    return run


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of the GPU kernels that one call launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    events = [
        e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def assert_backend(name: str, kernels: list[str]) -> None:
    """Raise RuntimeError unless the launched kernels are those of baseline `name`, and of no other."""
    ran = {marker for marker in _MARKERS.values() if any(marker in kernel for kernel in kernels)}
    if ran != {_MARKERS[name]}:
        raise RuntimeError(f"{name} ran other kernels than its own: {', '.join(kernels) or 'none'}")

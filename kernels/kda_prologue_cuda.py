"""Host side of kda_prologue.cu: compiled once a machine by NVRTC, launched on the current stream. Hopper only: run
nowhere else."""

import ctypes
import functools
import struct
import threading
from pathlib import Path

import torch

from .nvrtc import compile_cubin

SOURCE = Path(__file__).with_name("kda_prologue.cu")
KERNEL = "kda_prologue"
ARCH = "sm_90a"

# Mirrors of constants in kda_prologue.cu; tests/kernels/test_kda_prologue_cuda.py compares them with the source.
THREADS = 256
SHARED_BYTES = 113_920
PARAMS = struct.Struct("14Q15q2f3i4x")


@functools.cache
def available(device: torch.device) -> bool:
    """True on a Hopper GPU where NVRTC (packages cuda-bindings and nvidia-cuda-nvrtc) can be loaded."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


_functions: dict[tuple[int, bool], object] = {}
_lock = threading.Lock()


def _check(result):
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def _load(device: int, safe: bool):
    from cuda.bindings import driver

    cubin = compile_cubin(SOURCE, KERNEL, ARCH, {"KDA_SAFE": int(safe)})
    torch.cuda.current_stream(device)  # creates the device's primary context
    function = _check(driver.cuModuleGetFunction(_check(driver.cuModuleLoadData(cubin.code)), KERNEL.encode()))
    attribute = driver.CUfunction_attribute
    _check(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_BYTES))
    _check(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
    return function


def launch(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, operands, strides, scale, lower_bound, safe, sequences
) -> None:
    """Fill `operands` (w, qg, kg, ut, aqk, decay) on the current stream of the tensors' device, which must be the
    current one.

    bfloat16 q, k, v, g [B, T, H, 128] whose rows start at multiples of 16 bytes, beta [B, T, H]; `strides` holds the
    first three of each, 0 for the batch where `cu_seqlens` (int64) is given.
    """
    from cuda.bindings import driver

    _, tokens, heads, _ = q.shape
    params = PARAMS.pack(
        *(t.data_ptr() for t in (q, k, v, g, beta, A_log, dt_bias)),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        *(t.data_ptr() for t in operands),
        *(s for stride in strides for s in stride),
        scale, lower_bound, sequences, tokens, heads,
    )  # fmt: skip
    key = (q.device.index, safe)
    function = _functions.get(key)
    if function is None:
        with _lock:
            function = _functions.setdefault(key, _load(*key))
    block = ctypes.create_string_buffer(params, len(params))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    ctas = operands[0].shape[0] * heads
    stream = torch.cuda.current_stream(q.device).cuda_stream
    _check(
        driver.cuLaunchKernel(function, ctas, 1, 1, THREADS, 1, 1, SHARED_BYTES, stream, ctypes.addressof(pointers), 0)
    )

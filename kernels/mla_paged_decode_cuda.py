"""Host side of mla_paged_decode.cu: pick a compiled variant, keep its scratch, launch it. One launch, no plan, no read of a tensor.

Tensors arrive checked (kernels/mla_paged_decode.py). The variant follows from shapes alone, so a CUDA graph captured for some
``kv_indices`` length replays for any lengths within it.
"""

import contextlib
import ctypes
import functools
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from .nvrtc import CompileError, compile_cubin

SOURCE = Path(__file__).with_name("mla_paged_decode.cu")
ARCH = "sm_90a"

# The source's own figures, which it checks against these when it is compiled.
HEADS_A_CTA = 16
THREADS = 256
TILE = 32
SLOT_BYTES = 16 * 512 * 2 + 16 * 8 * 4
STAGE_BYTES = TILE * (512 + 64) * 2
FIXED_SHARED_BYTES = 8 * 16 * 40 * 4 + 16 * 80 + 16 * 4 + 3 * 64 + 1024 * 4
PARAMS = struct.Struct("10Q8I3f6i4x")

LOG2_E = 1.4426950408889634
SURELY = 1 + 2**-20  # more than the rounding of the device's product with the token count
SHORT_TOKENS = 20_000  # up to here one CTA an SM with three stages is faster, beyond it two CTAs with two
ITEM_TOKENS = 2**21  # above it the plan by pieces loses its exact arithmetic


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time choices of the kernel; see the head of mla_paged_decode.cu."""

    fp16: bool
    stages: int
    ctas_per_sm: int
    paged: bool
    flat: bool
    per_lane: int

    def defines(self) -> dict[str, int]:
        return {
            "MLA_FP16": int(self.fp16),
            "MLA_STAGES": self.stages,
            "MLA_CTAS_PER_SM": self.ctas_per_sm,
            "MLA_PAGED": int(self.paged),
            "MLA_FLAT": int(self.flat),
            "MLA_PER_LANE": self.per_lane,
            "MLA_SHARED_BYTES": self.shared_bytes(),
            "MLA_SLOT_BYTES": SLOT_BYTES,
            "MLA_PARAMS_BYTES": PARAMS.size,
        }

    def shared_bytes(self) -> int:
        return self.stages * STAGE_BYTES + FIXED_SHARED_BYTES


def choose_variant(*, batch: int, head_groups: int, tokens: int, sm_count: int, fp16: bool, paged: bool) -> Variant:
    """The variant for ``batch`` requests of at most ``tokens`` tokens together, heads in ``head_groups`` groups of 16.

    A plan by pieces needs CTAs to split requests with: at least two a request. Larger batches get equal token counts a CTA.
    """
    if tokens * head_groups <= SHORT_TOKENS and 2 * batch * head_groups <= sm_count:
        stages, ctas_per_sm = 3, 1
    else:
        stages, ctas_per_sm = 2, 2
    flat = batch > 128 or 2 * batch * head_groups > ctas_per_sm * sm_count or (batch > 1 and tokens >= ITEM_TOKENS)
    per_lane = 0 if flat or batch == 1 else 1 if batch <= 32 else 2 if batch <= 64 else 4
    return Variant(fp16, stages, ctas_per_sm, paged, flat, per_lane)


def available(device: torch.device) -> bool:
    """True on a Hopper GPU where NVRTC (packages cuda-core and nvidia-cuda-nvrtc) can be loaded."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


class _Loaded:
    """One variant on one device: its function and the number of CTAs that can be resident together."""

    __slots__ = ("function", "resident", "shared_bytes")

    def __init__(self, variant: Variant, device: int):
        from cuda.bindings import driver

        self.shared_bytes = variant.shared_bytes()
        cubin = compile_cubin(SOURCE, "mla_paged_decode", ARCH, variant.defines())
        with torch.cuda.device(device), _outside_capture():
            torch.cuda.current_stream()  # creates the device's primary context
            module = _check(driver.cuModuleLoadData(cubin.code))
            self.function = _check(driver.cuModuleGetFunction(module, b"mla_paged_decode"))
            attribute = driver.CUfunction_attribute
            for name, value in (
                (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared_bytes),
                (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                _check(driver.cuFuncSetAttribute(self.function, name, value))
            per_sm = _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, THREADS, self.shared_bytes))
        self.resident = per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        if self.resident == 0:
            raise CompileError(
                f"{variant} does not fit an SM of device {device}: it asks for {self.shared_bytes} bytes of shared memory"
            )


def _check(result):
    """The value of a driver call, or its error as a RuntimeError."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


@contextlib.contextmanager
def _outside_capture():
    """Let this thread load modules and allocate while a stream is being captured; neither becomes part of the graph."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = _check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(previous))


_loaded: dict[tuple[int, Variant], _Loaded] = {}
_lock = threading.Lock()


def _load(device: int, variant: Variant) -> _Loaded:
    with _lock:
        found = _loaded.get((device, variant))
        if found is None:
            found = _loaded[device, variant] = _Loaded(variant, device)
    return found


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What a launch needs beside addresses and strides; it follows from shapes alone."""

    loaded: _Loaded
    grid: int
    slots: int
    numbers: tuple  # the tail of Params, from `even` on


@functools.lru_cache(maxsize=4096)
def _geometry(device: int, batch: int, heads: int, page_size: int, entries: int, fp16: bool, lens_given: bool) -> _Geometry:
    tokens = entries * page_size
    groups = -(-heads // HEADS_A_CTA)
    variant = choose_variant(
        batch=batch,
        head_groups=groups,
        tokens=tokens,
        sm_count=torch.cuda.get_device_properties(device).multi_processor_count,
        fp16=fp16,
        paged=page_size > 1 or lens_given,
    )
    loaded = _load(device, variant)
    ctas = max(1, min(loaded.resident // groups, -(-tokens // TILE) + (0 if batch == 1 else batch)))
    chunk_of_one = max(TILE, -(-tokens // ctas))
    numbers = (
        1 / ctas, SURELY / max(ctas - batch, 1),
        batch, heads, groups.bit_length() - 1, entries, page_size.bit_length() - 1, chunk_of_one,
    )  # fmt: skip
    return _Geometry(loaded, ctas * groups, ctas * groups * (2 if variant.flat else 1), numbers)


_scratch: dict[tuple[int, int, int], tuple[int, int]] = {}  # (device, stream, capture) -> (address, slots)


def _scratch_address(device: int, stream: int, slots: int) -> int:
    """Address of at least ``slots`` empty slots that belong to this stream, or to the graph now being captured on it.

    Launches of one stream follow each other and may share scratch, those of two streams captured into one graph may not. A
    graph may later run beside any stream, so each capture gets its own. Nothing is ever freed: launches and graphs that use
    it may be anywhere. Sizes double, so all that a stream has held is less than twice what it holds.
    """
    key = (device, stream, _capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0)
    held = _scratch.get(key)
    if held is None or held[1] < slots:
        slots = 1 << (slots - 1).bit_length()
        held = _scratch[key] = (_allocate_empty(slots * SLOT_BYTES), slots)
    return held[0]


def _capture_id(stream: int) -> int:
    from cuda.bindings import driver

    status, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    _check((status,))
    return int(capture)


def _allocate_empty(size: int) -> int:
    """Memory of empty slots, filled once now and not at every replay of a graph that is being captured.

    Not PyTorch's: what lives in the pool of a graph and is no output of it counts as a leak there.
    """
    from cuda.bindings import driver

    with _outside_capture():
        address = _check(driver.cuMemAlloc(size))
        stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _check(driver.cuMemsetD32Async(address, 0xFFFFFFFF, size // 4, stream))
        _check(driver.cuStreamSynchronize(stream))
        _check(driver.cuStreamDestroy(stream))
    return int(address)


def launch(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale, kv_lens, out, lse) -> None:
    """Launch on the current stream of the tensors' device, which must be the current device. Writes ``out`` and ``lse``."""
    from cuda.bindings import driver

    batch, heads, _ = q_nope.shape
    device = q_nope.device.index
    geometry = _geometry(
        device, batch, heads, ckv_cache.shape[1], kv_indices.shape[0], q_nope.dtype == torch.float16, kv_lens is not None
    )
    stream = torch._C._cuda_getCurrentRawStream(device)  # a tenth of current_stream().cuda_stream; compiled graphs use it too
    (nope_b, nope_h, _), (pe_b, pe_h, _) = q_nope.stride(), q_pe.stride()
    (ckv_page, ckv_slot, _), (kpe_page, kpe_slot, _) = ckv_cache.stride(), kpe_cache.stride()
    params = PARAMS.pack(
        q_nope.data_ptr(), q_pe.data_ptr(), ckv_cache.data_ptr(), kpe_cache.data_ptr(),
        kv_indptr.data_ptr(), kv_indices.data_ptr(), 0 if kv_lens is None else kv_lens.data_ptr(),
        out.data_ptr(), lse.data_ptr(), _scratch_address(device, stream, geometry.slots),
        2 * nope_b, 2 * nope_h, 2 * pe_b, 2 * pe_h, 2 * ckv_page, 2 * ckv_slot, 2 * kpe_page, 2 * kpe_slot,
        sm_scale * LOG2_E, *geometry.numbers,
    )  # fmt: skip
    block = ctypes.create_string_buffer(params, len(params))
    pointers = ctypes.c_void_p(ctypes.addressof(block))
    loaded = geometry.loaded
    _check(
        driver.cuLaunchCooperativeKernel(
            loaded.function, geometry.grid, 1, 1, THREADS, 1, 1, loaded.shared_bytes, stream, ctypes.addressof(pointers)
        )
    )

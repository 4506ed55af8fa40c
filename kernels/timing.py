"""How a GPU call is timed: a record that refuses to be incomplete, the state of the L2 cache, and the order of samples.

GPU time is taken by a CUDA event pair around one call that was queued behind a spinning kernel, so that the time the
host needs to launch it is not in the sample. An event pair around an empty kernel still reads 2-3 us:
`Stopwatch.floor_us`.
"""

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

SCOPES = ("run", "step", "call")
TIMERS = ("cuda-events", "cupti", "wall")
FLUSHES = ("dirty", "clean", "hot", "none")

SPIN_CYCLES = 400_000  # about 0.2 ms: covers what FlashInfer's run() and a Triton launch need on the host
MAX_SPIN_CYCLES = 12_800_000
PAIRS = 30  # samples of every kernel, taken in turn
WARMUP = 3
MAX_SPREAD = 0.10  # a workload that spreads more is timed again
ATTEMPTS = 3  # and after this many its row says `unstable`


class MeasurementError(ValueError):
    """A measurement that would not mean what it says."""


def quantile(samples, q: float) -> float:
    """Linearly interpolated quantile of a non-empty sequence, 0 <= q <= 1."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def geomean(values) -> float:
    """Geometric mean of positive numbers."""
    return statistics.geometric_mean(values)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Samples of one kernel in microseconds, with everything a reader needs to compare them with others."""

    kernel: str
    scope: str
    timer: str
    statistic: str
    flush: str
    samples_us: tuple[float, ...]
    device: str
    versions: dict[str, str]

    def __post_init__(self):
        allowed = {"scope": SCOPES, "timer": TIMERS, "statistic": ("median",), "flush": FLUSHES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise MeasurementError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(values)}")
        for name in ("kernel", "device"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise MeasurementError(f"{name} is {getattr(self, name)!r}, must be a non-empty string")
        if not self.versions or not all(isinstance(v, str) and v for v in self.versions.values()):
            raise MeasurementError(f"versions is {self.versions!r}, must name at least one version as text")
        if not self.samples_us:
            raise MeasurementError("samples_us is empty, a measurement has at least one sample")
        bad = [s for s in self.samples_us if not (math.isfinite(s) and s > 0)]
        if bad:
            raise MeasurementError(f"samples_us holds {bad[0]!r}, every sample must be finite and above zero")

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def p10_us(self) -> float:
        return quantile(self.samples_us, 0.1)

    @property
    def p90_us(self) -> float:
        return quantile(self.samples_us, 0.9)

    @property
    def spread(self) -> float:
        """Width of the middle 80% as a share of the median."""
        return (self.p90_us - self.p10_us) / self.median_us

    @property
    def stable(self) -> bool:
        return self.spread <= MAX_SPREAD

    def to_json(self) -> dict:
        return asdict(self) | {"samples_us": [round(s, 3) for s in self.samples_us]}


def alternating(names, pairs: int) -> Iterator[tuple[int, str]]:
    """(sample number, name): every name once a sample, in the given order then in reverse: none always goes first."""
    names = tuple(names)
    for i in range(pairs):
        for name in names if i % 2 == 0 else reversed(names):
            yield i, name


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Python's collector must not run inside a sample of wall-clock time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _nothing() -> None:
    """The default hook."""


def _driver_function(name: str) -> Callable[[], object]:
    """A function of the CUDA driver; one that does nothing where there is no such driver (ROCm)."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return _nothing


class L2Flush:
    """Puts the L2 cache into a known state before a call.

    `dirty` writes twice the cache's size, so the call also pays for writing back what it evicts; `clean` reads it.
    Lines that the last call marked as persisting are made ordinary first, or they would outlive that. `hot` and `none`
    do nothing.
    """

    def __init__(self, device: torch.device, kind: str):
        if kind not in FLUSHES:
            raise MeasurementError(f"flush is {kind!r}, must be one of {', '.join(FLUSHES)}")
        self.kind = kind
        if kind in ("dirty", "clean"):
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self.buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
            self.sink = torch.empty((), dtype=torch.float32, device=device)
            self.end_persistence = _driver_function("cuCtxResetPersistingL2Cache")

    def __call__(self) -> None:
        if self.kind in ("dirty", "clean"):
            self.end_persistence()
        if self.kind == "dirty":
            self.buffer.zero_()
        elif self.kind == "clean":
            torch.sum(self.buffer, dim=0, out=self.sink)


class Stopwatch:
    """Times single calls on the current stream of one device."""

    def __init__(self, device: torch.device, flush: str = "dirty"):
        self.device = device
        self.flush = L2Flush(device, flush)
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.spin_cycles = SPIN_CYCLES

    def gpu_us(self, call: Callable[[], object], before=_nothing, after=_nothing) -> tuple[float, bool]:
        """GPU time of one call, and whether all of it was queued before the GPU reached it.

        `before` prepares the call ahead of the flush (fresh inputs, poisoned outputs); `after` is queued behind the
        call, so it sees only what the call did on this stream. A call that waits for the GPU itself is never queued in
        time: its launch gaps are then part of the sample, and the second value is False.
        """
        spin = self.spin_cycles
        while True:
            before()
            self.flush()
            torch.cuda._sleep(spin)
            self.start.record()
            call()
            self.end.record()
            queued = not self.start.query()
            after()
            torch.cuda.synchronize(self.device)
            if queued:
                self.spin_cycles = spin
            if queued or spin >= MAX_SPIN_CYCLES:
                return self.start.elapsed_time(self.end) * 1e3, queued
            spin *= 2

    def wall_us(self, call: Callable[[], object], before=_nothing) -> float:
        """Time from an idle GPU to an idle GPU on the host's clock."""
        before()
        self.flush()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) * 1e6

    def floor_us(self, samples: int = 30) -> float:
        """Median reading for a kernel that does nothing: what the method itself adds to every GPU time."""
        return statistics.median(self.gpu_us(lambda: torch.cuda._sleep(0))[0] for _ in range(samples))

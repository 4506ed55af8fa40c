"""GPU time from CUPTI activity records, read through the profiler that PyTorch brings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kernels.timing import MAX_SPIN_CYCLES, SPIN_CYCLES, MeasurementError

_MARKER = "spin_kernel"  # the name of torch.cuda._sleep's kernel


class Recording:
    """Calls between two spinning kernels, and after the recording the GPU time of each."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: list[tuple[float, float, str]] = []  # start and end in microseconds, kernel name
        self._valid: list[bool] = []  # a span each

    def take(self, call: Callable[[], object], before: Callable[[], object]) -> bool:
        """Record one call; False when it could not be queued while the GPU spun, because it waits for the GPU."""
        spin, spinning = SPIN_CYCLES, torch.cuda.Event()
        while True:
            before()
            torch.cuda._sleep(spin)
            spinning.record()
            call()
            queued = not spinning.query()
            torch.cuda._sleep(1)
            torch.cuda.synchronize(self._device)
            self._valid.append(queued or spin >= MAX_SPIN_CYCLES)
            if self._valid[-1]:
                return queued
            spin *= 2

    def spans_us(self) -> list[float]:
        """Microseconds from the first start to the last end of the kernels, copies and fills of each call."""
        spans, current = [], None
        for start, end, name in sorted(self._events):
            if _MARKER not in name:
                if current is not None:
                    current.append((start, end))
            elif current is None:
                current = []
            else:
                if not current:
                    raise MeasurementError("CUPTI saw no kernel of a call: was its work done on the GPU at all?")
                spans.append(max(e for _, e in current) - min(s for s, _ in current))
                current = None
        return [span for span, valid in zip(spans, self._valid, strict=True) if valid]


@contextmanager
def record_kernels(device: torch.device) -> Iterator[Recording]:
    recording = Recording(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        yield recording
    recording._events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]

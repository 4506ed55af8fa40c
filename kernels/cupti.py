"""GPU time from CUPTI activity records, read through the profiler that PyTorch brings."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.timing import SPIN_CYCLES, MeasurementError

_MARKER = "spin_kernel"  # the name of torch.cuda._sleep's kernel


class Recording:
    """Calls marked by a spinning kernel on either side, and after the recording the GPU time of each."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events = []

    @contextmanager
    def marked(self) -> Iterator[None]:
        """What runs inside becomes one span. The spin ahead of it lets the host queue all of it in time."""
        torch.cuda._sleep(SPIN_CYCLES)
        yield
        torch.cuda._sleep(1)
        torch.cuda.synchronize(self._device)

    def spans_us(self) -> list[float]:
        """Microseconds from the first start to the last end of the kernels, copies and fills in each marked span."""
        spans, current = [], None
        for start, end, name in sorted(self._events):
            if _MARKER in name:
                if current is None:
                    current = []
                else:
                    if not current:
                        raise MeasurementError("CUPTI saw no kernel in a marked span: was the work done on the GPU at all?")
                    spans.append(max(e for _, e in current) - min(s for s, _ in current))
                    current = None
            elif current is not None:
                current.append((start, end))
        return spans


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

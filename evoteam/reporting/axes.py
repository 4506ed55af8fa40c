"""The axes of a chart: where a value stands, and which round numbers are written beside it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. `ticks` are (value, text); without them round numbers are chosen, of a `whole` axis integers."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None
    show: Callable[[float], str] = "{:g}".format
    whole: bool = False

    def place(self, value: float) -> float:
        """Position of a value along the axis, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self, room: int) -> list[tuple[float, str]]:
        """At most about `room` ticks inside the axis."""
        if self.ticks is not None:
            return list(self.ticks)
        values = (
            _log_ticks(self.low, self.high, room)
            if self.log
            else _linear_ticks(self.low, self.high, room, 1 if self.whole else 0)
        )
        return [(value, self.show(value)) for value in values]


def fit(values: Iterable[float], *, log: bool = False, around: Iterable[float] = ()) -> tuple[float, float]:
    """A range that holds all values and `around`, with a little air; (0, 1) or (0.1, 1) where there are none."""
    found = [v for v in (*values, *around) if math.isfinite(v) and (v > 0 or not log)]
    if not found:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(found), max(found)
    if log:
        return low / 1.12, high * 1.12
    return min(low, 0.0), (high * 1.06 if high > 0 else 1.0)


def _linear_ticks(low: float, high: float, room: int, least: float = 0) -> list[float]:
    raw = max((high - low) / max(room, 1), least)
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, room: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) <= room + 2:
            break
    if len(ticks) < 3:
        return [tick for tick in _linear_ticks(low, high, room) if tick > 0]
    return ticks[:: math.ceil(len(ticks) / (room + 2))]

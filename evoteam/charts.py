"""Small vector charts as SVG text. Colors come from the page's style sheet, so one drawing serves light, dark and print.

Every mark also differs by shape or dash, and carries its values as a tooltip. Sizes are in CSS pixels.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 38  # room for tick texts; the y axis's label stands on top, the x axis's below
MARKERS = {
    "circle": "M{x},{y}m-{r},0a{r},{r} 0 1,0 {d},0a{r},{r} 0 1,0 -{d},0z",
    "square": "M{x},{y}m-{r},-{r}h{d}v{d}h-{d}z",
    "triangle": "M{x},{y}m0,-{r}l{r},{d}h-{d}z",
    "diamond": "M{x},{y}m0,-{w}l{w},{w}l-{w},{w}l-{w},-{w}z",
}
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. `ticks` are (value, text); without them round numbers are chosen."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None
    show: Callable[[float], str] = "{:g}".format

    def place(self, value: float) -> float:
        """Position of a value along the axis, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self, room: int) -> list[tuple[float, str]]:
        """At most about `room` ticks inside the axis."""
        if self.ticks is not None:
            return list(self.ticks)
        values = _log_ticks(self.low, self.high, room) if self.log else _linear_ticks(self.low, self.high, room)
        return [(value, self.show(value)) for value in values]


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together. `color` picks a color of the style sheet (1..6); `whiskers` are (low, high) of y."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    marker: str | None = "circle"
    line: bool = False
    dash: str = ""
    titles: Sequence[str] = ()
    whiskers: Sequence[tuple[float, float]] = ()
    step: bool = False


@dataclass(frozen=True, slots=True)
class Guide:
    """A horizontal line or, with `high`, a band across the chart, with its text (`low`: on the left, below the line)."""

    value: float
    text: str
    high: float | None = None
    dash: str = ""
    low: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be drawn at any width. `events` are (x, text): vertical marks."""

    label: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    events: Sequence[tuple[float, str]] = ()
    height: int = 300

    def svg(self, width: int) -> Markup:
        frame = _Frame(self, width, self.height if width > 500 else round(self.height * 0.9))
        parts = [*frame.guides(), *frame.grid(), *frame.events()]
        for series in self.series:
            parts += frame.marks(series)
        return _svg(self.label, width, frame.height, parts)

    def legend(self) -> list[tuple[str, Markup]]:
        """(name, small drawing) of each series."""
        return [(series.name, _key(series)) for series in self.series if series.name]


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars: rows of (label, segments); a segment is (kind, value). `show` writes a bar's total."""

    label: str
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    kinds: Sequence[str]
    unit: str
    show: Callable[[float], str] = "{:,.0f}".format

    def svg(self, width: int) -> Markup:
        longest = max((sum(value for _, value in segments) for _, segments in self.rows), default=0) or 1
        room, parts, y = width - 12, [], 0
        for label, segments in self.rows:
            total = sum(value for _, value in segments)
            parts.append(f'<text x="0" y="{y + 13}" class="name">{escape(label)}</text>')
            parts.append(f'<text x="{width}" y="{y + 13}" class="tick end">{escape(self.show(total))} {escape(self.unit)}</text>')
            x = 0.0
            for kind, value in segments:
                size = value / longest * room
                color = self.kinds.index(kind) + 1
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 19}" width="{max(size, 0):.1f}" height="14" class="bar c{color}">'
                    f"<title>{escape(label)}, {escape(kind)}: {escape(self.show(value))} {escape(self.unit)}</title></rect>"
                )
                if size > 6.5 * len(kind) + 8:
                    parts.append(f'<text x="{x + 5:.1f}" y="{y + 30}" class="inside">{escape(kind)}</text>')
                x += size
            y += 46
        return _svg(self.label, width, max(y, 1), parts)

    def legend(self) -> list[tuple[str, Markup]]:
        return [(kind, _swatch(i + 1)) for i, kind in enumerate(self.kinds)]


@dataclass(slots=True)
class _Frame:
    chart: Chart
    width: int
    height: int
    right: int = field(init=False)
    bottom: int = field(init=False)

    def __post_init__(self):
        self.right, self.bottom = self.width - RIGHT, self.height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + self.chart.x.place(value) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - self.chart.y.place(value) * (self.bottom - TOP)

    def inside(self, value: float) -> bool:
        return self.chart.y.low <= value <= self.chart.y.high

    def grid(self) -> Iterable[str]:
        for value, text in self.chart.y.marks(6):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>'
        last = -math.inf
        for value, text in self.chart.x.marks(self.width // 70):
            x = self.x(value)
            half = 3.3 * len(text)
            if x - half < last + 6:
                continue
            last = x + half
            yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom}" y2="{self.bottom + 4}"/>'
            yield f'<text class="tick middle" x="{min(x, self.width - half):.1f}" y="{self.bottom + 16}">{escape(text)}</text>'
        yield f'<line class="axis" x1="{LEFT}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>'
        yield f'<text class="label end" x="{self.right}" y="{self.height - 3}">{escape(self.chart.x.label)}</text>'
        yield f'<text class="label" x="0" y="12">{escape(self.chart.y.label)}</text>'

    def guides(self) -> Iterable[str]:
        for guide in self.chart.guides:
            if guide.high is not None:
                low, high = max(guide.value, self.chart.y.low), min(guide.high, self.chart.y.high)
                if low < high:
                    top, base = self.y(high), self.y(low)
                    yield f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{self.right - LEFT}" height="{base - top:.1f}"/>'
                    yield f'<text class="guide" x="{LEFT + 6}" y="{base + 13:.1f}">{escape(guide.text)}</text>'
            elif self.inside(guide.value):
                y = self.y(guide.value)
                yield f'<line class="rule" stroke-dasharray="{guide.dash}" x1="{LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                x, end, text_y = (LEFT + 6, "", y + 13) if guide.low else (self.right - 4, " end", y - 4)
                yield f'<text class="guide{end}" x="{x}" y="{text_y:.1f}">{escape(guide.text)}</text>'

    def events(self) -> Iterable[str]:
        for value, text in self.chart.events:
            x = self.x(value)
            yield f'<g class="event"><title>{escape(text)}</title><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{self.bottom}"/>'
            yield f'<path d="M{x:.1f},{TOP}m-4,-6h8l-4,7z"/></g>'

    def marks(self, series: Series) -> Iterable[str]:
        places = [(self.x(x), self.y(min(max(y, self.chart.y.low), self.chart.y.high))) for x, y in series.points]
        if series.line and places:
            yield f'<path class="line c{series.color}" stroke-dasharray="{series.dash}" d="{_path(places, series.step)}"/>'
        for (x, _), (low, high) in zip(places, series.whiskers):
            yield f'<line class="whisker c{series.color}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"/>'
        if series.marker:
            for i, (x, y) in enumerate(places):
                title = f"<title>{escape(series.titles[i])}</title>" if series.titles else ""
                yield f'<path class="mark c{series.color}" d="{_marker(series.marker, x, y)}">{title}</path>'


def fit(values: Iterable[float], *, log: bool = False, around: Iterable[float] = ()) -> tuple[float, float]:
    """A range that holds all values and `around`, with a little air; (0, 1) or (0.1, 1) where there are none."""
    found = [v for v in (*values, *around) if math.isfinite(v) and (v > 0 or not log)]
    if not found:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(found), max(found)
    if log:
        return low / 1.12, high * 1.12
    return min(low, 0.0), (high * 1.06 if high > 0 else 1.0)


def thin(points: Sequence[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """At most about `most` of the points, the last one always among them."""
    every = max(1, math.ceil(len(points) / most))
    kept = list(points[::every])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _linear_ticks(low: float, high: float, room: int) -> list[float]:
    raw = (high - low) / max(room, 1)
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


def _path(places: list[tuple[float, float]], step: bool) -> str:
    (x, y), *rest = places
    parts = [f"M{x:.1f},{y:.1f}"]
    for x, y in rest:
        parts.append(f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f},{y:.1f}")
    return "".join(parts)


def _marker(name: str, x: float, y: float, r: float = 3.6) -> str:
    return MARKERS[name].format(x=f"{x:.1f}", y=f"{y:.1f}", r=r, d=2 * r, w=round(1.3 * r, 1))


def _key(series: Series) -> Markup:
    line = f'<path class="line c{series.color}" stroke-dasharray="{series.dash}" d="M0,7H26"/>' if series.line else ""
    mark = f'<path class="mark c{series.color}" d="{_marker(series.marker, 13, 7)}"/>' if series.marker else ""
    return Markup(f'<svg class="key" width="26" height="14" aria-hidden="true">{line}{mark}</svg>')


def _swatch(color: int) -> Markup:
    return Markup(f'<svg class="key" width="14" height="14" aria-hidden="true"><rect class="bar c{color}" width="14" height="14"/></svg>')


def _svg(label: str, width: int, height: int, parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )

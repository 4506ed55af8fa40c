"""Small vector charts as SVG text, sizes in CSS pixels.

Colors come from the page's style sheet, so one drawing serves light, dark and print. Every mark also differs by shape
or dash, and carries its values as a tooltip.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from evoteam.reporting.axes import Axis

LEFT, RIGHT, TOP, BOTTOM = 46, 14, 30, 38  # room for tick texts; the y axis's label stands on top, the x axis's below
MARKERS = {
    "circle": "M{x},{y}m-{r},0a{r},{r} 0 1,0 {d},0a{r},{r} 0 1,0 -{d},0z",
    "square": "M{x},{y}m-{r},-{r}h{d}v{d}h-{d}z",
    "triangle": "M{x},{y}m0,-{r}l{r},{d}h-{d}z",
    "diamond": "M{x},{y}m0,-{w}l{w},{w}l-{w},{w}l-{w},-{w}z",
}
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together. `color` picks a color of the style sheet (1..6); `whiskers` are (low, high) of y.

    Marks of a `hollow` series let those behind them be seen.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    marker: str | None = "circle"
    line: bool = False
    dash: str = ""
    titles: Sequence[str] = ()
    whiskers: Sequence[tuple[float, float]] = ()
    step: bool = False
    hollow: bool = False

    @property
    def look(self) -> str:
        return f"mark c{self.color} hollow" if self.hollow else f"mark c{self.color}"


@dataclass(frozen=True, slots=True)
class Guide:
    """A horizontal line or, with `high`, a band across the chart. `low` puts a line's text on the left, below it."""

    value: float
    text: str
    high: float | None = None
    dash: str = ""
    low: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be drawn at any width. `events` are (x, name, text): vertical marks, the text as a tooltip."""

    label: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    events: Sequence[tuple[float, str, str]] = ()
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
        room, parts, y = width, [], 0
        for label, segments in self.rows:
            total = f"{self.show(sum(value for _, value in segments))} {self.unit}"
            parts.append(_text(label, 0, y + 13, "name"))
            parts.append(_text(total, width, y + 13, "tick end"))
            x = 0.0
            for kind, value in segments:
                size = max(value / longest * room, 0)
                title = _tag("title", escape(f"{label}, {kind}: {self.show(value)} {self.unit}"))
                number = self.kinds.index(kind) + 1
                parts += [_tag("rect", x=x, y=y + 19, width=size, height=14, class_=f"bar c{number}")]
                parts += [_tag("rect", title, x=x, y=y + 19, width=size, height=14, class_=f"hatch h{number}")]
                if size > 6.5 * len(kind) + 8:
                    parts.append(_text(kind, x + 5, y + 30, f"inside c{number}"))
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

    def grid(self) -> Iterable[Markup]:
        for value, text in self.chart.y.marks(6):
            y = self.y(value)
            yield self.across(y, "grid")
            yield _text(text, LEFT - 6, y + 4, "tick end")
        last = -math.inf
        for value, text in self.chart.x.marks(self.width // 70):
            x = self.x(value)
            half = 3.3 * len(text)
            if x - half < last + 6:
                continue
            last = x + half
            yield _tag("line", x1=x, x2=x, y1=self.bottom, y2=self.bottom + 4, class_="axis")
            yield _text(text, min(x, self.width - half), self.bottom + 16, "tick middle")
        yield self.across(self.bottom, "axis")
        yield _text(self.chart.x.label, self.right, self.height - 3, "label end")
        yield _text(self.chart.y.label, 0, 12, "label")

    def across(self, y: float, look: str, dash: str = "") -> Markup:
        return _tag("line", x1=LEFT, x2=self.right, y1=y, y2=y, class_=look, stroke_dasharray=dash)

    def guides(self) -> Iterable[Markup]:
        for guide in self.chart.guides:
            if guide.high is not None:
                low, high = max(guide.value, self.chart.y.low), min(guide.high, self.chart.y.high)
                if low < high:
                    top, base = self.y(high), self.y(low)
                    size = {"width": self.right - LEFT, "height": base - top}
                    yield _tag("rect", x=LEFT, y=top, **size, class_="band")
                    yield _text(guide.text, LEFT + 6, base + 13, "guide")
            elif self.inside(guide.value):
                y = self.y(guide.value)
                yield self.across(y, "rule", guide.dash)
                place = (LEFT + 6, y + 13, "guide") if guide.low else (self.right - 4, y - 4, "guide end")
                yield _text(guide.text, *place)

    def events(self) -> Iterable[Markup]:
        last = -math.inf
        for value, name, text in self.chart.events:
            x = self.x(value)
            if x - last > 7 * len(name):
                last = x
                yield _text(name, x + 7, TOP + 2, "event-name end" if x > self.right - 60 else "event-name")
            line = _tag("line", x1=x, x2=x, y1=TOP, y2=self.bottom)
            flag = _tag("path", d=f"M{x:.1f},{TOP}m-4,-6h8l-4,7z")
            yield _tag("g", _tag("title", escape(text)) + line + flag, class_="event")

    def marks(self, series: Series) -> Iterable[Markup]:
        places = [(self.x(x), self.y(min(max(y, self.chart.y.low), self.chart.y.high))) for x, y in series.points]
        color = f"c{series.color}"
        if series.line and places:
            path = _path(places, series.step)
            yield _tag("path", d=path, class_=f"line {color}", stroke_dasharray=series.dash)
        for (x, _), (low, high) in zip(places, series.whiskers, strict=False):  # not every series has whiskers
            yield _tag("line", x1=x, x2=x, y1=self.y(low), y2=self.y(high), class_=f"whisker {color}")
        if series.marker:
            for i, (x, y) in enumerate(places):
                title = _tag("title", escape(series.titles[i])) if series.titles else Markup("")
                yield _tag("path", title, d=_marker(series.marker, x, y), class_=series.look)


def thin(points: Sequence[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """At most about `most` of the points, the last one always among them."""
    every = max(1, math.ceil(len(points) / most))
    kept = list(points[::every])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _path(places: list[tuple[float, float]], step: bool) -> str:
    (x, y), *rest = places
    parts = [f"M{x:.1f},{y:.1f}"]
    for x, y in rest:
        parts.append(f"H{x:.1f}V{y:.1f}" if step else f"L{x:.1f},{y:.1f}")
    return "".join(parts)


def _marker(name: str, x: float, y: float, r: float = 3.6) -> str:
    return MARKERS[name].format(x=f"{x:.1f}", y=f"{y:.1f}", r=r, d=2 * r, w=round(1.3 * r, 1))


def _key(series: Series) -> Markup:
    color, parts = f"c{series.color}", Markup("")
    if series.line:
        parts += _tag("path", d="M0,7H26", class_=f"line {color}", stroke_dasharray=series.dash)
    if series.marker:
        parts += _tag("path", d=_marker(series.marker, 13, 7), class_=series.look)
    return _tag("svg", parts, class_="key", width=26, height=14, aria_hidden="true")


def _swatch(color: int) -> Markup:
    square, hatch = (_tag("rect", class_=look, width=14, height=14) for look in (f"bar c{color}", f"hatch h{color}"))
    return _tag("svg", square + hatch, class_="key", width=14, height=14, aria_hidden="true")


def _svg(label: str, width: int, height: int, parts: Iterable[Markup]) -> Markup:
    box = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return _tag("svg", Markup("").join(parts), **box, role="img", aria_label=label)


def _text(content: str, x: float, y: float, look: str) -> Markup:
    return _tag("text", escape(content), x=x, y=y, class_=look)


def _tag(name: str, content: str = "", **attributes: str | float) -> Markup:
    """An element; attribute values are escaped, numbers get one decimal, empty ones are left out."""
    parts = [name]
    for key, value in attributes.items():
        text = f"{value:.1f}".removesuffix(".0") if isinstance(value, (int, float)) else value
        if text:
            parts.append(f'{key.strip("_").replace("_", "-")}="{escape(text)}"')
    return Markup(f"<{' '.join(parts)}>{content}</{name}>")

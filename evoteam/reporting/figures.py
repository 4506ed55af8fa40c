"""Figures of a measurement: each a chart with its data as a table, made from one scope's record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evoteam.reporting.axes import Axis, fit
from evoteam.reporting.charts import DASHES, Bars, Chart, Guide, Series
from evoteam.reporting.claims import ratio_bounds
from evoteam.reporting.formats import number, status

WIDE, NARROW = 920, 350  # CSS pixels: a desktop column, a phone of 390 with its margins
BATCH_MARKERS = ("circle", "square", "triangle", "diamond")
OURS, BASELINE, FLOOR = 1, 2, 3  # colors of the style sheet
PAPER_SLOWER = (0.86, 0.99)  # the paper's 11 workloads below 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart in two widths, and the table behind it. `note` says what is drawn and in which unit."""

    id: str
    title: str
    note: str
    chart: Chart | Bars
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def wide(self):
        return self.chart.svg(WIDE)

    @property
    def narrow(self):
        return self.chart.svg(NARROW)


def of_scope(name: str, record: dict) -> list[Figure]:
    """All figures that a scope's record has data for; `name` keeps their ids apart."""
    rows = sorted((row for row in record["rows"] if row.get("ratio")), key=lambda row: (row["tokens"], row["index"]))
    figures = []
    if rows:
        figures += [ratios(name, record, rows), latencies(name, record, rows)]
    if record.get("runs_per_plan"):
        figures.append(runs_per_plan(name, record))
    if rows:
        figures += [errors(name, rows), spreads(name, rows)]
    return figures


def ratios(name: str, record: dict, rows: list[dict]) -> Figure:
    """Ratio of each workload, sorted by tokens, around the 1.0 line."""
    bounds = {row["index"]: ratio_bounds(row) for row in rows}
    below = record["scope"] != "step"  # there the paper's band stands below the line
    guides = [Guide(1.0, "1.0x: as fast as FlashInfer", low=below)]
    if record["scope"] == "step":
        guides.insert(0, Guide(PAPER_SLOWER[0], "paper: its 11 slower workloads, 0.86-0.99x", high=PAPER_SLOWER[1]))
    low, high = fit((value for pair in bounds.values() for value in pair), log=True, around=(0.8, 1.25))
    chart = Chart(
        f"Ratio of FlashInfer's time to ours for {len(rows)} workloads, {record['scope']} scope",
        _by_rank(rows),
        Axis("ratio, FlashInfer time / our time (log)", low, high, log=True, show="{:g}x".format),
        _by_batch(
            rows,
            lambda row: row["ratio"],
            lambda row: f"workload {row['index']}: {row['tokens']:,} tokens, B={row['batch']}, {row['ratio']:.2f}x",
            whiskers=lambda row: bounds[row["index"]],
        ),
        guides,
    )
    columns = ("#", "batch", "tokens", "ratio", "lowest", "highest", "status")
    table = [
        (str(r["index"]), str(r["batch"]), f"{r['tokens']:,}", number(r["ratio"], ".3f", "x"))
        + tuple(number(bound, ".3f", "x") for bound in bounds[r["index"]])
        + (status(r["status"]),)
        for r in rows
    ]
    note = "Above 1.0x ours is faster. A thin line spans what the middle 80% of both kernels' samples allow."
    return Figure(f"{name}-ratio", "Ratio by workload", note, chart, columns, table)


def latencies(name: str, record: dict, rows: list[dict]) -> Figure:
    """Time against tokens, with the time that the bytes alone need at the measured copy rate."""
    layers = record.get("layers", 1)
    floors = [row["bandwidth_share"] * row["ours_us"] for row in rows]
    tokens = [row["tokens"] for row in rows]
    times = [value for row in rows for value in (row["ours_us"], row["baseline_us"])]
    low, high = fit(times, log=True, around=[record["floor_us"] if record["timer"] != "wall" else min(times) / 2])
    visible = [(x, y) for x, y in zip(tokens, floors, strict=True) if y >= low]
    chart = Chart(
        f"Time of ours and of FlashInfer against tokens, {record['scope']} scope",
        Axis("tokens in the batch (log)", *fit(tokens, log=True), log=True, show="{:,.0f}".format),
        Axis(f"time of one {'step' if layers > 1 else 'call'}, us (log)", low, high, log=True, show="{:,g}".format),
        [
            Series("ours", _pairs(tokens, rows, "ours_us"), OURS, titles=_titles(rows, "ours_us")),
            Series(
                "FlashInfer",
                _pairs(tokens, rows, "baseline_us"),
                BASELINE,
                "square",
                titles=_titles(rows, "baseline_us"),
                hollow=True,
            ),
            Series("bytes at copy rate", visible, FLOOR, None, line=True, dash=DASHES[1]),
        ],
        [Guide(record["floor_us"], "an empty kernel", dash=DASHES[2])] if record["timer"] != "wall" else [],
    )
    columns = (
        "#",
        "tokens",
        "ours us",
        "p10",
        "p90",
        "FlashInfer us",
        "backend",
        "bytes at copy rate us",
        "share of copy rate",
    )
    table = [
        (
            str(row["index"]),
            f"{row['tokens']:,}",
            *(number(row[key], ",.2f") for key in ("ours_us", "ours_p10", "ours_p90", "baseline_us")),
            row["baseline"],
            number(floor),
            number(row["bandwidth_share"], ".0%"),
        )
        for row, floor in zip(rows, floors, strict=True)
    ]
    rate = f"{record['copy_tb_s']:.2f} TB/s"
    note = f"Median time in us. The dashed line is what the bytes alone need at the GPU's copy rate of {rate}."
    note += f" A step is {layers} layers." if layers > 1 else ""
    return Figure(f"{name}-latency", "Time against tokens", note, chart, columns, table)


def runs_per_plan(name: str, record: dict) -> Figure:
    """Geometric mean against how many runs one plan() serves, with the paper's two figures."""
    table = {str(runs): ratio for runs, ratio in record["runs_per_plan"].items() if ratio is not None}
    counts = [int(runs) for runs in table if runs != "never"]
    end = max(counts, default=1) * 3  # where "never plans again" is drawn
    points = [(end if runs == "never" else int(runs), ratio) for runs, ratio in table.items()]
    ticks = tuple((x, "never" if x == end else str(x)) for x, _ in points)
    low, high = fit((ratio for _, ratio in points), log=True, around=(0.8, 1.3))
    chart = Chart(
        "Geometric mean of the ratio against runs per plan",
        Axis("runs that share one plan() (log)", 0.9, end * 1.1, log=True, ticks=ticks),
        Axis("geometric mean (log)", low, high, log=True, show="{:g}x".format),
        [
            Series(
                "this machine",
                points,
                OURS,
                line=True,
                titles=[f"runs per plan {runs}: {ratio:.2f}x" for runs, ratio in table.items()],
            )
        ],
        [
            Guide(1.21, "paper, with plan: 1.21x", dash=DASHES[1]),
            Guide(0.96, "paper, plan never counted: 0.96x", dash=DASHES[2], low=True),
        ],
    )
    holds = record.get("paper_runs_per_plan")
    note = "How the ratio depends on how many runs share one plan() of FlashInfer; the paper's number is not published."
    note += " A run here is a layer of one CUDA-graph replay; the call scope launches each by itself, at a cost to both."
    if holds:
        note += f" A kernel at the paper's 0.96x would reach its 1.21x here at {number(holds, ',.0f')} runs a plan."
    rows = [(runs, number(ratio, ".3f", "x")) for runs, ratio in table.items()]
    return Figure(f"{name}-plan", "Ratio against runs per plan", note, chart, ("runs per plan", "geometric mean"), rows)


def errors(name: str, rows: list[dict]) -> Figure:
    """Relative error of ours and of FlashInfer against the fp64 reference."""
    known = [row["baseline_error_ratio"] for row in rows if row["baseline_error_ratio"]]
    low, high = fit([*(row["error_ratio"] for row in rows), *known], log=True)
    series = [Series("ours", _pairs(range(len(rows)), rows, "error_ratio"), OURS)]
    if len(known) == len(rows):
        series.append(
            Series(
                "FlashInfer", _pairs(range(len(rows)), rows, "baseline_error_ratio"), BASELINE, "square", hollow=True
            )
        )
    axis = Axis("error ratio, ||out - ref|| / ||ref|| (log)", low, high, log=True, show="{:.1e}".format)
    chart = Chart("Error against the fp64 reference by workload", _by_rank(rows), axis, series, height=240)
    columns = ("#", "tokens", "ours", "FlashInfer", "largest |out - ref|", "largest |lse - ref|")
    table = [
        (str(row["index"]), f"{row['tokens']:,}")
        + tuple(number(row[key], ".2e") for key in ("error_ratio", "baseline_error_ratio", "max_abs", "lse_error"))
        for row in rows
    ]
    note = "Against an fp64 reference on the same bf16 inputs; ours may be at most 1.5 times FlashInfer's."
    return Figure(f"{name}-error", "Error", note, chart, columns, table)


def spreads(name: str, rows: list[dict]) -> Figure:
    """(p90 - p10) / median of each row, the wider of both kernels."""
    points = [(i, row["spread"] * 100) for i, row in enumerate(rows)]
    axis = Axis("spread, %", *fit((y for _, y in points), around=(12,)))
    guide = Guide(10, "10%: a wider row is measured again, three times at most", dash=DASHES[1])
    chart = Chart(
        "Spread of the samples by workload", _by_rank(rows), axis, [Series("", points, OURS)], [guide], height=220
    )
    table = [
        (str(row["index"]), f"{row['tokens']:,}", number(row["spread"], ".1%"), status(row["status"])) for row in rows
    ]
    note = "(p90 - p10) / median, the wider of ours and FlashInfer's."
    return Figure(f"{name}-spread", "Spread", note, chart, ("#", "tokens", "spread", "status"), table)


def _by_rank(rows: list[dict]) -> Axis:
    ticks = tuple((float(i), f"{row['tokens']:,}") for i, row in enumerate(rows))
    return Axis("workloads by tokens in the batch", -0.7, len(rows) - 0.3, ticks=ticks)


def _by_batch(rows: list[dict], y: Callable, title: Callable, whiskers: Callable) -> list[Series]:
    batches = sorted({row["batch"] for row in rows})
    named = len(batches) <= len(BATCH_MARKERS)
    series = []
    for i, batch in enumerate(batches if named else [None]):
        chosen = [(place, row) for place, row in enumerate(rows) if batch in (None, row["batch"])]
        series.append(
            Series(
                f"B={batch}" if named else "",
                [(place, y(row)) for place, row in chosen],
                i + 1,
                BATCH_MARKERS[i],
                titles=[title(row) for _, row in chosen],
                whiskers=[whiskers(row) for _, row in chosen],
            )
        )
    return series


def _pairs(xs: Sequence[float], rows: list[dict], key: str) -> list[tuple[float, float]]:
    return [(x, row[key]) for x, row in zip(xs, rows, strict=True)]


def _titles(rows: list[dict], key: str) -> list[str]:
    return [f"workload {row['index']}: {row['tokens']:,} tokens, {row[key]:.1f} us" for row in rows]

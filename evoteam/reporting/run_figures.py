"""Figures of searches, made from the summaries of their run folders."""

from collections import Counter
from collections.abc import Sequence

from evoteam.reporting.axes import Axis, fit
from evoteam.reporting.charts import DASHES, Bars, Chart, Series, thin
from evoteam.reporting.figures import Figure
from evoteam.reporting.formats import number, sentence

MARKERS = ("circle", "square", "triangle", "diamond")
KINDS = {
    "input": "uncached input",
    "cache_write": "cache writes",
    "cache_read": "cache reads",
    "output": "output",
}


def label(summary: dict) -> str:
    return summary["arm"]


def section_id(summary: dict) -> str:
    return f"{summary['task']}-{summary['arm']}"


def curves(summaries: Sequence[dict]) -> Figure:
    """Best score against tokens, an arm a line, team changes marked."""
    ends = [s["spend"]["tokens"] for s in summaries]
    series, events = [], []
    for i, s in enumerate(summaries):
        points = [(p["tokens"], p["score"]) for p in s["curve"]]
        titles = [
            f"{p['attempt']} by {p['role']} ({p['team']}): {p['score']:.3f}x at {p['tokens']:,.0f} tokens"
            for p in s["curve"]
        ]
        drawn = points + [(s["spend"]["tokens"], points[-1][1])] if points else []
        series.append(Series("", drawn, i + 1, None, line=True, dash=DASHES[i % len(DASHES)], step=True))
        series.append(Series(label(s), points, i + 1, MARKERS[i % len(MARKERS)], titles=titles))
        events += [
            (team["from_tokens"], team["id"], f"{label(s)} {team['id']}: {team['diagnosis'][:200]}")
            for team in s["teams"][1:]
        ]
    chart = Chart(
        "Best score against tokens",
        Axis("input-equivalent tokens", 0, fit(ends)[1], show="{:,.0f}".format, whole=True),
        Axis(
            "best score, baseline time / candidate time",
            *fit((y for line in series for _, y in line.points), around=(1.0,)),
            show="{:g}x".format,
        ),
        series,
        events=events,
    )
    rows = [
        (
            label(s),
            p["attempt"],
            p["role"],
            p["team"],
            number(p["tokens"], ",.0f"),
            number(p["full_cache_tokens"], ",.0f"),
            number(p["score"], ".4f", "x"),
        )
        for s in summaries
        for p in s["curve"]
    ]
    note = "Each mark is a new best"
    note += "; each flag is a new team, whose diagnosis stands below under Teams." if events else "."
    name = f"{summaries[0]['task']}-arms" if len(summaries) > 1 else section_id(summaries[0])
    return Figure(
        f"{name}-best",
        "Best score against tokens",
        note,
        chart,
        ("arm", "attempt", "role", "team", "tokens", "tokens at full cache weight", "score"),
        rows,
    )


def roles(summary: dict) -> Figure:
    """Tokens spent by role."""
    roles = summary["roles"]
    bars = Bars("Tokens spent by role", [(r["role"], [("tokens", r["tokens"])]) for r in roles], ("tokens",), "tokens")
    rows = [
        (
            r["role"],
            number(r["tokens"], ",.0f"),
            str(r["calls"]),
            str(r["evaluations"]),
            number(r["gpu_seconds"], ",.0f"),
        )
        for r in roles
    ]
    columns = ("role", "tokens", "model calls", "evaluations", "GPU seconds")
    return Figure(
        f"{section_id(summary)}-roles",
        "What each role spent",
        "Input-equivalent tokens; the supervisor is charged as well.",
        bars,
        columns,
        rows,
    )


def yields(summary: dict) -> Figure:
    """Attempts of each role by outcome."""
    kinds = ("new best", "valid, no new best", "failed")
    bars, rows = [], []
    for r in summary["roles"]:
        parts = (r["new_bests"], r["valid"] - r["new_bests"], r["attempts"] - r["valid"])
        bars.append((r["role"], [(kind, max(value, 0)) for kind, value in zip(kinds, parts, strict=True)]))
        rows.append((r["role"], *map(str, parts), str(r["notes"])))
    chart = Bars("Attempts of each role by outcome", bars, kinds, "attempts")
    return Figure(
        f"{section_id(summary)}-yield",
        "What each role brought",
        "Attempts by outcome.",
        chart,
        ("role", *kinds, "notes"),
        rows,
    )


def failures(summary: dict) -> Figure:
    """Failures by kind, counted up over tokens."""
    counts, lines = Counter(), {}
    for failure in summary["failures"]:
        counts[failure["kind"]] += 1
        lines.setdefault(failure["kind"], []).append((failure["tokens"], counts[failure["kind"]]))
    shown = counts.most_common(6)
    end = summary["spend"]["tokens"]
    series = [
        Series(kind, [(0, 0), *thin(lines[kind]), (end, total)], i + 1, None, line=True, dash=DASHES[i], step=True)
        for i, (kind, total) in enumerate(shown)
    ]
    chart = Chart(
        "Failures by kind, counted up over tokens",
        Axis("input-equivalent tokens", 0, fit([end])[1], show="{:,.0f}".format, whole=True),
        Axis("failures so far", *fit(counts.values()), show="{:,.0f}".format, whole=True),
        series,
        height=260,
    )
    rows = [
        (kind, str(total), number(lines[kind][0][0], ",.0f"), number(lines[kind][-1][0], ",.0f"))
        for kind, total in counts.most_common()
    ]
    return Figure(
        f"{section_id(summary)}-failures", "Failures over time", "Failed attempts so far, by kind.", chart,
        ("kind", "failures", "first at tokens", "last at tokens"), rows,
    )  # fmt: skip


def budget(summary: dict) -> Figure:
    """Tokens by kind, in the budget's unit and raw."""
    spend = summary["spend"]
    raw, equivalent = [(KINDS[kind], count) for kind, count in spend["by_kind"].items()], weighted(summary)
    shown = [("input-equivalent", equivalent), ("raw", raw)]
    bars = Bars("Budget by kind of token", shown, tuple(KINDS.values()), "tokens")
    rows = [
        (kind, f"{count:,}", number(weight, ",.0f")) for (kind, count), (_, weight) in zip(raw, equivalent, strict=True)
    ]
    rows += [("all", number(spend["raw_tokens"], ",.0f"), number(spend["tokens"], ",.0f"))]
    rows += [("all, cache reads at full weight", "", number(spend["full_cache_tokens"], ",.0f"))]
    note = f"{sentence(summary['unit'])} With cache reads at full weight: {spend['full_cache_tokens']:,.0f}."
    return Figure(
        f"{section_id(summary)}-budget",
        "Budget by kind of token",
        note,
        bars,
        ("kind", "raw tokens", "input-equivalent"),
        rows,
    )


def weighted(summary: dict) -> list[tuple[str, float]]:
    """(kind, input-equivalent tokens) of everything that a run spent."""
    rates = summary["rates"] | {"input": 1.0}
    return [(KINDS[kind], count * rates[kind]) for kind, count in summary["spend"]["by_kind"].items()]

"""report.json and report.html of searches: one run, or several arms on one axis."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evoteam import record
from evoteam.charts import DASHES, Axis, Bars, Chart, Series, fit, thin
from evoteam.figures import Figure
from evoteam.formats import finite, number
from evoteam.report import download, render_run, to_csv
from evoteam.summary import summarise

MARKERS = ("circle", "square", "triangle", "diamond")
TEAMS_SHOWN = 200
KINDS = {"input": "uncached input", "cache_write": "cache writes", "cache_read": "cache reads", "output": "output"}


@dataclass(frozen=True, slots=True)
class View:
    """A section of the page about one run, or about several together (then without a lineage)."""

    id: str
    title: str
    note: str
    tiles: Sequence[tuple[str, str, str]]
    figures: Sequence[Figure]
    lineage: Sequence[dict] = ()
    left_out: int = 0
    attempts: int = 0
    attempts_csv: str = ""


def write(folders: Sequence[Path], out: Path) -> Path:
    """Report on run folders into `out`: report.json with every summary, report.html; returns the page's path."""
    summaries = [summarise(folder) for folder in folders]
    record.prepare(out)
    text = json.dumps(finite({"schema": record.SCHEMA, "program": "evoteam", "runs": summaries}), indent=1, ensure_ascii=False)
    record.write(out / "report.json", text)
    page = out / "report.html"
    record.write(page, render(summaries))
    return page


def render(summaries: Sequence[dict]) -> str:
    """The page of one or several run summaries."""
    first = summaries[0]
    title = f"{first['task']}: {' against '.join(label(s) for s in summaries)}"
    facts = [
        ("Model", ", ".join(dict.fromkeys(str(s["model"]) for s in summaries))),
        ("Answered by", ", ".join(dict.fromkeys(name for s in summaries for name in s["answered_by"]))),
        ("Evaluated on", ", ".join(dict.fromkeys(name for s in summaries for name in s["devices"] if name))),
        ("Started", str(first["started"]).replace("T", " ").replace("Z", " UTC")),
    ]
    return render_run(title, facts, views(summaries))


def views(summaries: Sequence[dict]) -> list[View]:
    """Sections for the page: the arms together where there are several, then each run."""
    together = [comparison(summaries)] if len(summaries) > 1 else []
    return together + [view(summary) for summary in summaries]


def label(summary: dict) -> str:
    return summary["arm"]


def _id(summary: dict) -> str:
    return f"{summary['task']}-{summary['arm']}"


def comparison(summaries: Sequence[dict]) -> View:
    """The arms on one axis, and how they stand at the budget that all of them spent, by both weights of cache reads."""
    rows, tiles = [], []
    common = min(s["spend"]["tokens"] for s in summaries)
    common_full = min(s["spend"]["full_cache_tokens"] for s in summaries)
    for s in summaries:
        reached, reached_full = best_within(s, common, "tokens"), best_within(s, common_full, "full_cache_tokens")
        spend = s["spend"]
        rows.append(
            (
                label(s),
                *(number(value, ".3f", "x") for value in (best(s), reached, reached_full)),
                *(number(spend[key], ",.0f") for key in ("tokens", "full_cache_tokens", "raw_tokens")),
                f"${spend['dollars']:,.2f}",
                str(spend["evaluations"]),
            )
        )
        tiles.append((f"{label(s)}, at {common:,.0f} tokens", number(reached, ".3f", "x"), ""))
    curves = _curves(summaries)
    columns = ("arm", "best", "at common budget", "at full cache weight", "tokens", "at full cache weight ", "raw tokens", "dollars", "evaluations")
    spend_bars = Bars(
        "Input-equivalent tokens by kind for each arm",
        [(label(s), _weighted(s)) for s in summaries],
        tuple(KINDS.values()),
        "tokens",
    )
    note = f"At the budget that every arm spent: {common:,.0f} input-equivalent tokens, or {common_full:,.0f} with cache reads at full weight."
    name = f"{summaries[0]['task']}-arms"
    spent = Figure(f"{name}-spend", "Tokens by kind", f"{summaries[0]['unit']}.", spend_bars, columns, rows)
    return View(name, f"The arms side by side: {summaries[0]['task']}", note, tiles, [curves, spent])


def view(summary: dict) -> View:
    """One run: its best score, teams, roles, failures and budget."""
    spend, name = summary["spend"], label(summary)
    judged = summary["attempts"]
    valid = sum(not attempt["failure"] for attempt in judged)
    ended = summary["ended"]["text"] if summary["ended"] else "The run has not ended."
    tiles = [
        ("best score", number(best(summary), ".3f", "x"), summary["best"]["id"] if summary["best"] else "nothing valid"),
        ("attempts", str(len(judged)), f"{valid} valid"),
        ("teams", str(len(summary["teams"])), ""),
        ("tokens", number(spend["tokens"], ",.0f"), f"{spend['estimated_calls']} calls estimated" if spend["estimated_calls"] else ""),
        ("raw tokens", number(spend["raw_tokens"], ",.0f"), f"{spend['cache_hit_rate']:.0%} of prompts cached"),
        ("dollars", f"{spend['dollars']:,.2f}", ""),
        ("model calls", str(spend["calls"]), ""),
        ("GPU seconds", number(spend["gpu_seconds"], ",.0f"), ""),
    ]
    figures = [_curves([summary]), _roles(summary), _yields(summary), _budget(summary)]
    if summary["failures"]:
        figures.insert(3, _failures(summary))
    teams = summary["teams"][:TEAMS_SHOWN]
    columns = ("attempt", "role", "team", "score", "failure", "tokens", "idea")
    rows = [(a["id"], a["role"], a["team"], a["score"], a["failure"], round(a["tokens"]), a["idea"]) for a in judged]
    return View(
        _id(summary),
        f"Arm {name} on {summary['task']}",
        f"Model {summary['model']}, budget {_budget_text(summary['budget'])}. {ended}",
        tiles,
        figures,
        [_lineage(team) for team in teams],
        len(summary["teams"]) - len(teams),
        len(judged),
        download("text/csv", to_csv(columns, rows)),
    )


def best(summary: dict) -> float | None:
    return summary["best"]["score"] if summary["best"] else None


def best_within(summary: dict, tokens: float, key: str) -> float | None:
    """The best score that was reached with at most `tokens`, counted by `key`; None where nothing valid was."""
    return max((point["score"] for point in summary["curve"] if point[key] <= tokens), default=None)


def _curves(summaries: Sequence[dict]) -> Figure:
    ends = [s["spend"]["tokens"] for s in summaries]
    series, events = [], []
    for i, s in enumerate(summaries):
        points = [(p["tokens"], p["score"]) for p in s["curve"]]
        titles = [f"{p['attempt']} by {p['role']} ({p['team']}): {p['score']:.3f}x at {p['tokens']:,.0f} tokens" for p in s["curve"]]
        drawn = points + [(s["spend"]["tokens"], points[-1][1])] if points else []
        series.append(Series("", drawn, i + 1, None, line=True, dash=DASHES[i % len(DASHES)], step=True))
        series.append(Series(label(s), points, i + 1, MARKERS[i % len(MARKERS)], titles=titles))
        events += [(team["from_tokens"], f"{label(s)} {team['id']}: {team['diagnosis'][:200]}") for team in s["teams"][1:]]
    chart = Chart(
        "Best score against tokens",
        Axis("input-equivalent tokens", 0, fit(ends)[1], show="{:,.0f}".format),
        Axis("best score, baseline time / candidate time", *fit((y for line in series for _, y in line.points), around=(1.0,)), show="{:g}x".format),
        series,
        events=events,
    )
    rows = [
        (label(s), p["attempt"], p["role"], p["team"], number(p["tokens"], ",.0f"), number(p["full_cache_tokens"], ",.0f"), number(p["score"], ".4f", "x"))
        for s in summaries
        for p in s["curve"]
    ]
    note = "Each mark is a new best; each flag above is a new team, with its diagnosis as a tooltip."
    name = f"{summaries[0]['task']}-arms" if len(summaries) > 1 else _id(summaries[0])
    return Figure(f"{name}-best", "Best score against tokens", note, chart, ("arm", "attempt", "role", "team", "tokens", "tokens at full cache weight", "score"), rows)


def _roles(summary: dict) -> Figure:
    roles = summary["roles"]
    bars = Bars("Tokens spent by role", [(r["role"], [("tokens", r["tokens"])]) for r in roles], ("tokens",), "tokens")
    rows = [(r["role"], number(r["tokens"], ",.0f"), str(r["calls"]), str(r["evaluations"]), number(r["gpu_seconds"], ",.0f")) for r in roles]
    columns = ("role", "tokens", "model calls", "evaluations", "GPU seconds")
    return Figure(f"{_id(summary)}-roles", "What each role spent", "Input-equivalent tokens; the supervisor is charged as well.", bars, columns, rows)


def _yields(summary: dict) -> Figure:
    kinds = ("new best", "valid, no new best", "failed")
    bars, rows = [], []
    for r in summary["roles"]:
        parts = (r["new_bests"], r["valid"] - r["new_bests"], r["attempts"] - r["valid"])
        bars.append((r["role"], [(kind, max(value, 0)) for kind, value in zip(kinds, parts)]))
        rows.append((r["role"], *map(str, parts), str(r["notes"])))
    chart = Bars("Attempts of each role by outcome", bars, kinds, "attempts")
    return Figure(f"{_id(summary)}-yield", "What each role brought", "Attempts by outcome.", chart, ("role", *kinds, "notes"), rows)


def _failures(summary: dict) -> Figure:
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
        Axis("input-equivalent tokens", 0, fit([end])[1], show="{:,.0f}".format),
        Axis("failures so far", *fit(counts.values()), show="{:,.0f}".format),
        series,
        height=260,
    )
    rows = [(kind, str(total), number(lines[kind][0][0], ",.0f"), number(lines[kind][-1][0], ",.0f")) for kind, total in counts.most_common()]
    return Figure(
        f"{_id(summary)}-failures", "Failures over time", "Failed attempts so far, by kind.", chart,
        ("kind", "failures", "first at tokens", "last at tokens"), rows,
    )  # fmt: skip


def _budget(summary: dict) -> Figure:
    spend = summary["spend"]
    raw, weighted = [(KINDS[kind], count) for kind, count in spend["by_kind"].items()], _weighted(summary)
    bars = Bars("Budget by kind of token", [("input-equivalent", weighted), ("raw", raw)], tuple(KINDS.values()), "tokens")
    rows = [(kind, f"{count:,}", number(weight, ",.0f")) for (kind, count), (_, weight) in zip(raw, weighted)]
    rows += [("all", number(spend["raw_tokens"], ",.0f"), number(spend["tokens"], ",.0f"))]
    rows += [("all, cache reads at full weight", "", number(spend["full_cache_tokens"], ",.0f"))]
    note = f"{summary['unit']}. With cache reads at full weight: {spend['full_cache_tokens']:,.0f}."
    return Figure(f"{_id(summary)}-budget", "Budget by kind of token", note, bars, ("kind", "raw tokens", "input-equivalent"), rows)


def _weighted(summary: dict) -> list[tuple[str, float]]:
    rates = summary["rates"] | {"input": 1.0}
    return [(KINDS[kind], count * rates[kind]) for kind, count in summary["spend"]["by_kind"].items()]


def _budget_text(budget: dict) -> str:
    parts = [f"{value:,.0f} {name.replace('_', ' ')}" for name, value in budget.items() if value is not None]
    return ", ".join(parts) or "without a ceiling"


def _lineage(team: dict) -> dict:
    spent = team["to_tokens"] - team["from_tokens"]
    when = (
        f"round {team['round']}, from {team['from_tokens']:,.0f} tokens: {team['attempts']} attempts ({team['valid']} valid) "
        f"for {spent:,.0f} tokens, best {team['best_before']:.3f}x to {team['best_after']:.3f}x"
    )
    roles = ", then ".join("+".join(stage) for stage in team["order"])
    return {"id": team["id"], "when": when, "diagnosis": team["diagnosis"] or f"The first team: {roles}.", "diff": team["diff"]}

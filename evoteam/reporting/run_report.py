"""report.json and report.html of searches: one run, or several arms on one axis."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evoteam.reporting import record
from evoteam.reporting.charts import Bars
from evoteam.reporting.downloads import download, to_csv
from evoteam.reporting.figures import Figure
from evoteam.reporting.formats import MISSING, finite, number, sentence
from evoteam.reporting.report import render_run
from evoteam.reporting.run_figures import KINDS, budget, curves, failures, label, roles, section_id, weighted, yields
from evoteam.summary import summarise

TEAMS_SHOWN = 200


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
    record.prepare(out, record.RUNS_PROGRAM)
    whole = finite({"schema": record.SCHEMA, "program": record.RUNS_PROGRAM, "runs": summaries})
    unwritten = [record.save(out / "report.json", json.dumps(whole, indent=1, ensure_ascii=False))]
    unwritten.append(record.save(out / "report.html", render(summaries)))
    if any(unwritten):
        raise record.RecordError("; ".join(filter(None, unwritten)))
    return out / "report.html"


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
                _dollars(s),
                str(spend["evaluations"]),
            )
        )
        tiles.append((f"{label(s)}, at {common:,.0f} tokens", number(reached, ".3f", "x"), ""))
    best_scores = curves(summaries)
    columns = (
        "arm",
        "best",
        "at common budget",
        "at full cache weight",
        "tokens",
        "at full cache weight ",
        "raw tokens",
        "dollars",
        "evaluations",
    )
    spend_bars = Bars(
        "Input-equivalent tokens by kind for each arm",
        [(label(s), weighted(s)) for s in summaries],
        tuple(KINDS.values()),
        "tokens",
    )
    note = f"Compared at what the arm that spent least had spent: {common:,.0f} input-equivalent tokens; counted with "
    note += f"cache reads at full weight, {common_full:,.0f}. {_wide(summaries)}"
    name = f"{summaries[0]['task']}-arms"
    spent = Figure(f"{name}-spend", "Tokens by kind", sentence(summaries[0]["unit"]), spend_bars, columns, rows)
    return View(name, f"The arms side by side: {summaries[0]['task']}", note, tiles, [best_scores, spent])


def _wide(summaries: Sequence[dict]) -> str:
    rows, wide = (sum(s["spread"][name] for s in summaries) for name in ("rows", "wide"))
    if not wide:
        return ""
    return f"{wide} of {rows} timed rows spread widely: scores that lie close together do not rank the arms."


def view(summary: dict) -> View:
    """One run: its best score, teams, roles, failures and budget."""
    spend, name = summary["spend"], label(summary)
    written = f", written by {summary['agent']}" if summary["agent"] else ""
    judged = summary["attempts"]
    valid = sum(not attempt["failure"] for attempt in judged)
    ended = sentence(summary["ended"]["text"]) if summary["ended"] else "The run has not ended."
    tiles = [
        (
            "best score",
            number(best(summary), ".3f", "x"),
            _best_of(summary),
        ),
        ("attempts", str(len(judged)), f"{valid} valid"),
        ("teams", str(len(summary["teams"])), ""),
        ("tokens", number(spend["tokens"], ",.0f"), f"{spend['estimated_calls']} of {spend['calls']} calls estimated"),
        ("raw tokens", number(spend["raw_tokens"], ",.0f"), f"{spend['cache_hit_rate']:.0%} of prompts cached"),
        ("dollars", _dollars(summary), "" if _priced(summary) else "no price is known"),
    ]
    if spend["gpu_seconds"]:
        tiles.append(("GPU seconds", number(spend["gpu_seconds"], ",.0f"), ""))
    figures = [curves([summary]), roles(summary), yields(summary), budget(summary)]
    if summary["failures"]:
        figures.insert(3, failures(summary))
    teams = summary["teams"][:TEAMS_SHOWN]
    columns = ("attempt", "role", "team", "score", "failure", "tokens", "idea")
    rows = [(a["id"], a["role"], a["team"], a["score"], a["failure"], round(a["tokens"]), a["idea"]) for a in judged]
    return View(
        section_id(summary),
        f"Arm {name} on {summary['task']}",
        f"Model {summary['model']}{written}, budget {_budget_text(summary['budget'])}. {ended}",
        tiles,
        figures,
        [_lineage(team) for team in teams],
        len(summary["teams"]) - len(teams),
        len(judged),
        download("text/csv", to_csv(columns, rows)),
    )


def best(summary: dict) -> float | None:
    return summary["best"]["score"] if summary["best"] else None


def _best_of(summary: dict) -> str:
    """Which attempt was best, and its score on all workloads: agents see the score on some of them only."""
    found = summary["best"]
    if not found:
        return "nothing valid"
    whole = found["full_score"]
    return found["id"] if whole is None else f"{found['id']}; on all workloads {whole:.3f}x"


def _priced(summary: dict) -> bool:
    return summary["rates"].get("dollars_in") is not None


def _dollars(summary: dict) -> str:
    return f"${summary['spend']['dollars']:,.2f}" if _priced(summary) else MISSING


def best_within(summary: dict, tokens: float, key: str) -> float | None:
    """The best score that was reached with at most `tokens`, counted by `key`; None where nothing valid was."""
    return max((point["score"] for point in summary["curve"] if point[key] <= tokens), default=None)


def _budget_text(budget: dict) -> str:
    parts = [f"{value:,.0f} {name.replace('_', ' ')}" for name, value in budget.items() if value is not None]
    return ", ".join(parts) or "without a ceiling"


def _lineage(team: dict) -> dict:
    spent = team["to_tokens"] - team["from_tokens"]
    when = (
        f"round {team['round']}, from {team['from_tokens']:,.0f} tokens: {team['attempts']} attempts "
        f"({team['valid']} valid) for {spent:,.0f} tokens, {_reached(team['best_before'], team['best_after'])}"
    )
    roles = ", then ".join("+".join(stage) for stage in team["order"])
    return {
        "id": team["id"],
        "when": when,
        "diagnosis": team["diagnosis"] or f"The first team: {roles}.",
        "diff": team["diff"],
    }


def _reached(before: float, after: float) -> str:
    if not after:
        return "nothing valid"
    return f"best {before:.3f}x to {after:.3f}x" if before else f"best {after:.3f}x"

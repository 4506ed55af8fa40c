"""One self-contained HTML page from a record: no script, no network, everything from outside escaped."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evoteam.reporting.claims import NOT_REPRODUCED, RECORDED, REPRODUCED, SHOWN, UNSTABLE, VERDICTS
from evoteam.reporting.downloads import download
from evoteam.reporting.formats import number, sentence
from evoteam.reporting.kda import view as kda_view
from evoteam.reporting.record import PROGRAM, RUNS_PROGRAM, generator
from evoteam.reporting.sections import MEASUREMENTS, section

TEMPLATES = Path(__file__).with_name("templates")
MEANINGS = {
    "reproduced": "measured now, at the claim's scope, and at least the paper's figure less its rounding",
    "not-reproduced": "measured now, and below it",
    "unstable": "the samples spread so widely, after retries, that either could be true",
    "recorded": "a stored measurement is shown; nothing was measured now, and it does not count",
    "hardware-unavailable": "the GPU that it takes is not here",
    "baseline-unavailable": "the baseline that it is compared with is not here",
    "not-run": "the part that would judge it was not run, not run in full, or is not in this version",
    "shown": "by nature not judged",
}


def render(report: dict, runs: Sequence = ()) -> str:
    """The page of a report.json. `runs` are views of searches (evoteam.reporting.run_report) to show with it."""
    now = report["measurements"]
    stored = None if now else report["recorded"]
    shown = stored["measurements"] if stored else now
    made = f"Recorded {stored['created'][:10]}." if stored else ""
    sections = [section(name, shown[name], made) for name in MEASUREMENTS if name in shown]
    contents = [
        ("verdicts", "Verdicts"),
        *([("observations", "Measured, claimed by nobody")] if report["observations"] else []),
        *([("recorded", "Recorded measurements")] if stored else []),
        *((item["id"], item["title"]) for item in sections),
        *([("comparison", "Against the record")] if report["comparison"] else []),
        *([("selfcheck", "Checked without a GPU")] if report["selfcheck"] else []),
        *([("kda", "KDA prefill")] if report["kda"] else []),
        *((view.id, view.title) for view in runs),
        ("record", "The record"),
    ]
    return _template("report.html").render(
        generator=Markup(generator(PROGRAM)),
        report=report,
        groups=grouped(report["claims"], ("where", "reason")),
        observations=grouped(report["observations"], ("conditions",)),
        recorded=stored,
        headline=_headline(report["claims"]),
        facts=_facts(report),
        verdict_meanings=[(name, MEANINGS[name]) for name in VERDICTS],
        contents=contents,
        sections=sections,
        comparison=report["comparison"] and _comparison(report["comparison"]),
        selfcheck=_selfcheck(report["selfcheck"]),
        kda=report["kda"] and kda_view(report["kda"]),
        runs=runs,
        provenance=[
            ("Command", " ".join(report["command"])),
            (
                "Host",
                f"{report['host']['system']}, Python {report['host']['python']}, {report['host']['cpu_count']} cores",
            ),
            ("Seed", str(report["seed"])),
            *report["versions"].items(),
        ],
        json_download=download("application/json", json.dumps(report, ensure_ascii=False)),
    )


def grouped(rows: Sequence[dict], keys: Sequence[str]) -> list[tuple[list[dict], list[str]]]:
    """Neighboring rows that say the same under `keys`, with what they say: shown once below them."""
    groups = groupby(rows, lambda row: [row[key] for key in keys])
    return [(list(same), [text for text in said if text]) for said, same in groups]


def render_run(title: str, facts: Sequence[tuple[str, str]], runs: Sequence) -> str:
    """The page of one run folder, or of several arms together."""
    return _template("run.html").render(generator=Markup(generator(RUNS_PROGRAM)), title=title, facts=facts, runs=runs)


def _template(name: str):
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = sentence
    environment.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return environment.get_template(name)


def _headline(claims: list[dict]) -> str:
    counts = {name: sum(claim["verdict"] == name for claim in claims) for name in VERDICTS}
    judged = [f"{counts[name]} {name}" for name in (REPRODUCED, NOT_REPRODUCED, UNSTABLE) if counts[name]]
    others = [f"{counts[RECORDED]} recorded"] if counts[RECORDED] else []
    open_ = len(claims) - counts[SHOWN] - sum(counts[name] for name in (REPRODUCED, NOT_REPRODUCED, UNSTABLE, RECORDED))
    if open_:
        others.append(f"{open_} open")
    return (
        ", ".join([*judged, *others]) if judged else ": ".join(filter(None, ["Nothing judged here", ", ".join(others)]))
    )


def _facts(report: dict) -> list[tuple[str, str]]:
    git = report["git"]
    kernel = report["kernel"]
    return [
        ("GPU", report["device"]["name"] if report["device"] else "none"),
        ("Kernel", kernel and " ".join((kernel["name"], kernel.get("implementation", "")))),
        ("Kernel source", kernel and kernel["sha256"][:12]),
        ("Date", report["created"].replace("T", " ").replace("+00:00", " UTC")),
        ("Commit", git and git["commit"][:12] + (", files changed" if git["changed_files"] else "")),
        ("FlashInfer", report["versions"].get("flashinfer-python", "not installed")),
    ]


def _comparison(comparison: dict) -> dict:
    rows = [
        (row["measurement"], number(row["now"], ".3f", "x"), number(row["recorded"], ".3f", "x"))
        for row in comparison["rows"]
    ]
    return {
        "note": "Geometric means here and in {path}, measured {created:.10} on {device}.".format(**comparison),
        "rows": rows,
    }


def _selfcheck(found: dict | None) -> dict:
    if not found:
        return {"interpreter": [], "compiled": []}
    return {
        "interpreter": [
            (
                row["name"],
                row["reason"] or "right",
                number(row["error_ratio"], ".1e"),
                number(row["lse_error"], ".1e"),
                number(row["seconds"], ".1f"),
            )
            for row in found["interpreter"]
        ],
        "compiled": [
            (
                row["kernel"],
                row["variant"],
                *(number(row[key], ",.0f") for key in ("registers", "spill_bytes", "shared_bytes")),
                row["compiler"],
            )
            for row in found["compiled"]
        ],
    }

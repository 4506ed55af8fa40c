"""One self-contained HTML page from a record: no script, no network, everything from outside escaped."""

import base64
import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evoteam.reporting import figures
from evoteam.reporting.claims import VERDICTS
from evoteam.reporting.formats import number
from evoteam.reporting.kda import view as kda_view

TEMPLATES = Path(__file__).with_name("templates")
FLUSHES = {
    "dirty": "twice the L2 cache is written before every call",
    "clean": "twice the L2 cache is written and then read before every call",
    "hot": "the L2 cache is left as the call before left it",
    "none": "the L2 cache is left alone",
}
TIMERS = {"cuda-events": "GPU time by CUDA events", "cupti": "GPU time by CUPTI", "wall": "wall clock"}
# measurement -> title, what it is, whether all its figures are drawn
MEASUREMENTS = {
    "run": ("The kernel alone", "FlashInfer's plan() is done before and not counted.", True),
    "step": (
        "One decode step with plan",
        "FlashInfer plans once, then one run a layer as a CUDA-graph replay; ours replays with no plan.",
        True,
    ),
    "run-clean": ("The kernel alone, clean flush", "As above, but no written lines are left in the cache.", False),
    "cupti": (
        "The kernel alone, a second timer",
        "A second opinion; the two timers are never compared with each other.",
        False,
    ),
    "random": ("Shapes outside the 47", "Drawn at random, so that a kernel tuned to the 47 cannot hide it.", False),
    "call": (
        "Plan and run on every call",
        "No claim is about this; it is shown so that nobody mistakes it for the step.",
        False,
    ),
    "arm-evolving": (
        "Best kernel of the recorded evolving team, measured now",
        "FlashInfer's plan() is not counted.",
        False,
    ),
    "arm-single": (
        "Best kernel of the recorded single agent, measured now",
        "FlashInfer's plan() is not counted.",
        False,
    ),
    "arm-fixed-four": (
        "Best kernel of the recorded four fixed roles, measured now",
        "FlashInfer's plan() is not counted.",
        False,
    ),
    "host": (
        "Host time of one eager call",
        "What the host spends before the call returns, without waiting for the GPU.",
        False,
    ),
}
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
    stored = {} if now or not report["recorded"] else report["recorded"]["measurements"]
    origin = (
        f"Measured {report['recorded']['created'][:10]}, nothing now. {report['recorded']['note']}" if stored else ""
    )
    sections = [section(name, (now or stored)[name], origin) for name in MEASUREMENTS if name in (now or stored)]
    contents = [
        ("verdicts", "Verdicts"),
        *([("observations", "Measured, not claimed")] if report["observations"] else []),
        *((item["id"], item["title"]) for item in sections),
        *([("comparison", "Against the record")] if report["comparison"] else []),
        *([("selfcheck", "Without a GPU")] if report["selfcheck"] else []),
        *([("kda", "KDA prefill")] if report["kda"] else []),
        *((view.id, view.title) for view in runs),
        ("record", "The record"),
    ]
    return _template("report.html").render(
        report=report,
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


def render_run(title: str, facts: Sequence[tuple[str, str]], runs: Sequence) -> str:
    """The page of one run folder, or of several arms together."""
    return _template("run.html").render(title=title, facts=facts, runs=runs)


def section(name: str, record: dict, origin: str = "") -> dict:
    """One measurement for the template. `origin` says where a stored one comes from."""
    title, what, whole = MEASUREMENTS[name]
    drawn = figures.of_scope(name, record)
    columns, rows = _host_table(record) if name == "host" else _workload_table(record)
    versions = record["versions"] | {
        f"FlashInfer {k} build": f"{v:.0f} s" for k, v in record["baseline_build_s"].items()
    }
    statistic = f"{record['statistic'].capitalize()} of {record.get('pairs', 200)} samples"
    note = f"{what} {statistic}, {TIMERS[record['timer']]}; {FLUSHES[record['flush']]}."
    return {
        "id": name,
        "title": f"{title} (recorded)" if origin else title,
        "note": f"{note} {origin}".strip(),
        "tiles": _tiles(record),
        "figures": drawn if whole else drawn[:1],
        "columns": columns,
        "rows": rows,
        "clocks": [
            (key, str(value), str(record["clocks"]["after"][key])) for key, value in record["clocks"]["before"].items()
        ],
        "versions": list(versions.items()),
        "samples_csv": download("text/csv", samples_csv(record)),
    }


def samples_csv(record: dict) -> str:
    """Every raw sample of a scope: workload, kernel, sample number, microseconds."""
    lines = [
        (row["index"], kernel, i, us)
        for row in record["rows"]
        for kernel, samples in row.get("samples", {}).items()
        for i, us in enumerate(samples)
    ]
    return to_csv(("workload", "kernel", "sample", "us"), lines)


def to_csv(columns: Sequence[str], rows: Iterable[Sequence]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def download(kind: str, text: str) -> str:
    """A data: address that a browser saves as a file, without a server or a script."""
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _template(name: str):
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    return environment.get_template(name)


def _headline(claims: list[dict]) -> str:
    counts = {name: sum(claim["verdict"] == name for claim in claims) for name in VERDICTS}
    judged = [
        f"{counts[name]} {name.replace('-', ' ')}"
        for name in ("reproduced", "not-reproduced", "unstable")
        if counts[name]
    ]
    open_ = sum(counts[name] for name in ("recorded", "hardware-unavailable", "baseline-unavailable", "not-run"))
    return ", ".join([*(judged or ["Nothing judged here"]), *([f"{open_} {'claim' if open_ == 1 else 'claims'} open"] if open_ else [])])


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


def _tiles(record: dict) -> list[tuple[str, str, str]]:
    summary = record.get("summary")
    if not summary:
        return []
    worst = summary["worst"]
    tiles = [
        ("geometric mean", number(summary["geomean"], ".2f", "x"), f"of {summary['n']}"),
        ("arithmetic mean", number(summary["arithmetic_mean"], ".2f", "x"), ""),
        ("faster / slower", f"{summary['wins']} / {summary['losses']}", ""),
        ("worst", number(worst and worst["ratio"], ".2f", "x"), f"workload {worst['index']}" if worst else ""),
    ]
    if len(summary["geomean_by_batch"]) <= 4:
        tiles += [
            (f"geometric mean, B={batch}", number(value, ".2f", "x"), "")
            for batch, value in summary["geomean_by_batch"].items()
        ]
    if summary["wrong"] or summary["unstable"]:
        tiles.append(("wrong / unstable", f"{len(summary['wrong'])} / {len(summary['unstable'])}", ""))
    if record["timer"] != "wall":
        tiles.append(("an empty kernel reads", number(record["floor_us"], ".1f"), "us"))
    if record.get("caches"):
        tiles.append(("KV caches rotated over", str(record["caches"]), f"of {record['layers']} layers"))
    return [*tiles, ("copy rate of this GPU", number(record["copy_tb_s"], ".2f"), "TB/s")]


def _workload_table(record: dict) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    columns = (
        "#",
        "batch",
        "tokens",
        "ours us",
        "FlashInfer us",
        "backend",
        "ratio",
        "copy rate",
        "error",
        "spread",
        "status",
        "why",
    )
    rows = [
        (
            str(row["index"]),
            str(row["batch"]),
            f"{row['tokens']:,}",
            number(row["ours_us"]),
            number(row["baseline_us"]),
            row["baseline"],
            number(row["ratio"], ".3f", "x"),
            number(row["bandwidth_share"], ".0%"),
            number(row["error_ratio"], ".2e"),
            number(row["spread"], ".1%"),
            row["status"],
            row["reason"],
        )
        for row in record["rows"]
    ]
    return columns, rows


def _host_table(record: dict) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    kernels = [key for key in record["rows"][0] if key.endswith("_us")] if record["rows"] else []
    columns = ("#", "batch", "tokens", *(f"{key.removesuffix('_us')} us" for key in kernels))
    rows = [
        (str(row["index"]), str(row["batch"]), f"{row['tokens']:,}", *(number(row[key], ".1f") for key in kernels))
        for row in record["rows"]
    ]
    return columns, rows


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
                str(row["registers"]),
                str(row["spill_bytes"]),
                f"{row['shared_bytes']:,}",
                row["compiler"],
            )
            for row in found["compiled"]
        ],
    }

"""A measurement as a section of the page: its figures as tiles, charts and tables."""

from collections.abc import Sequence

from evoteam.reporting import figures
from evoteam.reporting.downloads import download, samples_csv
from evoteam.reporting.formats import WIDE, number, status

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


def section(name: str, record: dict, recorded: str = "") -> dict:
    """One measurement for the template. `recorded` says when and where a stored one was made."""
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
        "title": f"{title} (recorded)" if recorded else title,
        "note": f"{note} {recorded}".strip(),
        "tiles": _tiles(record),
        "figures": drawn if whole else drawn[:1],
        "columns": columns,
        "rows": rows,
        "footnote": WIDE if any(row.get("status") == "unstable" for row in record["rows"]) else "",
        "clocks": [
            (key, str(value), str(record["clocks"]["after"][key])) for key, value in record["clocks"]["before"].items()
        ],
        "versions": list(versions.items()),
        "samples_csv": download("text/csv", samples_csv(record)),
    }


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
        counts = f"{len(summary['wrong'])} / {len(summary['unstable'])}"
        tiles.append(("wrong / wide spread", counts, f"of {summary['n']}"))
    if record["timer"] != "wall":
        tiles.append(("empty kernel, us", number(record["floor_us"], ".1f"), ""))
    if record.get("caches"):
        tiles.append(("KV caches rotated over", str(record["caches"]), f"of {record['layers']} layers"))
    return [*tiles, (f"copy rate of {record['device']['name']}, TB/s", number(record["copy_tb_s"], ".2f"), "")]


def _workload_table(record: dict) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    columns = (
        "#",
        "batch",
        "tokens",
        "ours us",
        "FlashInfer us",
        "backend",
        "ratio",
        "share of copy rate",
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
            status(row["status"]),
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

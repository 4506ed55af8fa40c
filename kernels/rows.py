"""A workload's row in a scope's record, and the summary over rows."""

import math
import statistics
from collections.abc import Sequence

from kernels.bench import OURS, Bench, Inputs
from kernels.reference import Errors
from kernels.timing import MAX_SPREAD, Measurement, geomean


def faster_baseline(measurements: dict[str, Measurement]) -> str:
    """Name of the fastest measured baseline, empty when there is none."""
    return min((name for name in measurements if name != OURS), key=lambda n: measurements[n].median_us, default="")


def spread(measurements: dict[str, Measurement]) -> float:
    """The wider spread of ours and of the baseline it is judged by."""
    names = {OURS, faster_baseline(measurements) or OURS}
    return max(measurements[name].spread for name in names)


def steadier(a: dict[str, Measurement], b: dict[str, Measurement]) -> dict[str, Measurement]:
    """Of two attempts at one workload the one with less spread; an empty one loses."""
    return b if not a or spread(b) < spread(a) else a


def _finite(value: float) -> float | None:
    """JSON has no infinity: an error without bound is None, and the row's reason says what it was."""
    return value if math.isfinite(value) else None


def table_row(
    inputs: Inputs, bench: Bench, errors: dict[str, Errors], measurements: dict[str, Measurement], calls: int = 1
) -> dict:
    """One workload's row. Without measurements its status is `wrong`; `calls` is how many kernel calls a sample has."""
    workload = inputs.workload
    baseline = faster_baseline(measurements)
    ours, theirs = measurements.get(OURS), measurements.get(baseline)
    row = {
        "index": workload.index,
        "uuid": workload.uuid,
        "family": workload.family,
        "batch": workload.batch,
        "tokens": workload.tokens,
        "ours_us": None,
        "ours_p10": None,
        "ours_p90": None,
        "baseline_us": theirs and theirs.median_us,
        "baseline": baseline,
        "ratio": None,
        "bandwidth_share": None,
        "error_ratio": _finite(errors[OURS].error_ratio),
        "max_abs": _finite(errors[OURS].max_abs),
        "lse_error": _finite(errors[OURS].lse_error),
        "baseline_error_ratio": max(
            (e.error_ratio for name, e in errors.items() if name != OURS and e.ok), default=None
        ),
        "spread": None,
        "status": "wrong",
        "reason": errors[OURS].reason,
        "samples": {name: [round(sample, 3) for sample in m.samples_us] for name, m in measurements.items()},
    }
    if ours is None:
        return row
    wide = spread(measurements)
    return row | {
        "ours_us": ours.median_us,
        "ours_p10": ours.p10_us,
        "ours_p90": ours.p90_us,
        "ratio": theirs.median_us / ours.median_us if theirs else None,
        "bandwidth_share": calls * inputs.bytes_moved() / (ours.median_us * bench.copy_tb_s * 1e6),
        "spread": wide,
        "status": "ok" if wide <= MAX_SPREAD else "unstable",
    }


def summarize(rows: Sequence[dict]) -> dict:
    """Means of the rows' ratios (baseline time / our time). One wrong row leaves no mean: a mean would hide it."""
    wrong = [row["index"] for row in rows if row["status"] == "wrong"]
    judged = [row for row in rows if row["ratio"] is not None]
    summary = {
        "n": len(rows),
        "wrong": wrong,
        "unstable": [row["index"] for row in rows if row["status"] == "unstable"],
        "geomean": None,
        "arithmetic_mean": None,
        "wins": sum(row["ratio"] > 1 for row in judged),
        "losses": sum(row["ratio"] < 1 for row in judged),
        "worst": None,
        "geomean_by_batch": {},
    }
    if wrong or not judged:
        return summary
    worst = min(judged, key=lambda row: row["ratio"])
    batches = sorted({row["batch"] for row in judged})
    return summary | {
        "geomean": geomean(row["ratio"] for row in judged),
        "arithmetic_mean": statistics.fmean(row["ratio"] for row in judged),
        "worst": {"index": worst["index"], "ratio": worst["ratio"]},
        "geomean_by_batch": {str(b): geomean(row["ratio"] for row in judged if row["batch"] == b) for b in batches},
    }

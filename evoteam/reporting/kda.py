"""The two KDA modes: what can be known here while their chips are elsewhere, each with what it does not show."""

from typing import TYPE_CHECKING

from evoteam.reporting.claims import RECORDED, Evidence
from evoteam.reporting.formats import number

if TYPE_CHECKING:
    from evoteam.reporting.session import Session

MODES = ("kda-mi350x", "kda-b200")


def judge(session: "Session") -> None:
    """Evidence for the KDA claims, the whole of it in the report, and rows of their own for what was measured."""
    modes = tuple(mode for mode in MODES if mode in session.modes)
    if not modes:
        return
    from evoteam.reporting.console import kda_table
    from kernels.kda_evidence import evidence

    with session.terminal.progress("KDA prefill") as step:
        found = evidence(step, modes=modes)
    session.report["kda"] = found
    for claim in session.of(modes):
        known = found["claims"][claim.mode]
        device = found["device"] if known["here"] else ""
        session.evidence[claim.id] = Evidence(known["verdict"], device=device, reason=known["reason"])
    session.report["observations"] += rows(found)
    for part in view(found)["parts"]:
        session.terminal.show(part["error"] or kda_table(part))


def rows(found: dict) -> list[dict]:
    """KDA prefill on the GPU that was measured, against each baseline: never the claim's row."""
    now = "measurement" in found["evidence"]
    measured = found["evidence"]["measurement" if now else "record"]
    return [
        {
            "title": f"KDA prefill against {baseline}",
            "value": f"{summary['geomean']:.2f}x, geometric mean of {summary['n']} {_shapes(summary['n'])}",
            "device": measured["device"],
            "verdict": "measured" if now else RECORDED,
            "note": f"worst: {summary['worst']['workload']} at {summary['worst']['ratio']:.2f}x",
            "conditions": " ".join(measured.get("conditions", ())),
        }
        for baseline, summary in measured["summary"].items()
    ]


def _shapes(count: int) -> str:
    return "shape" if count == 1 else "shapes"


def view(found: dict) -> dict:
    """The evidence as tables, for the terminal and the page: title, columns, rows, what it shows and does not."""
    build = {
        "correctness": ("KDA prefill in Triton's interpreter, against fp64", _checks),
        "hardware_correctness": ("KDA prefill on this GPU, against fp64", _checks),
        "machine_code": ("KDA prefill compiled for the claims' GPUs", _machine_code),
        "measurement": ("KDA prefill measured here, us (eager)", times),
        "record": ("KDA prefill, recorded, us (eager)", times),
    }
    parts = []
    for kind, content in found["evidence"].items():
        title, table = build[kind]
        named = {key: content[key] for key in ("shows", "does_not_show")} | {"error": content.get("error", "")}
        columns, lines = ((), ()) if named["error"] else table(content)
        if kind in ("measurement", "record"):
            title = title.replace("KDA prefill", f"KDA prefill on {content['device']}")
        parts.append(named | {"title": title, "columns": columns, "rows": lines})
    return {"claims": list(found["claims"].items()), "parts": parts}


def _checks(content: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    lines = [
        (row["case"], *(number(row[key], ".1e") for key in ("o", "state", "limit")), "right" if row["ok"] else "wrong")
        for row in content["rows"]
    ]
    return ("case", "error of o", "error of the state", "limit", "result"), lines


def _machine_code(content: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    lines = [
        (
            row["kernel"],
            row["target"],
            *(number(row[key], ",.0f") for key in ("registers", "spilled", "shared_bytes")),
            number(sum(row["matrix_instructions"].values()), ",.0f"),
        )
        for row in content["kernels"]
    ]
    lines += [(row["kernel"], row["target"], row["error"], "-", "-", "-") for row in content["errors"]]
    return ("kernel", "for", "registers", "spilled", "shared B", "matrix ops"), lines


def times(content: dict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a measurement: shapes, a kernel a column with its eager time in parentheses, the bound."""
    kernels = list(dict.fromkeys(name for row in content["rows"] for name in row["us"]))
    lines = [
        (row["workload"], *(_times(row, name) for name in kernels), number(row["bound_us"], ",.0f"))
        for row in content["rows"]
    ]
    return ("heads x tokens", *kernels, "traffic bound"), lines


def _times(row: dict, kernel: str) -> str:
    if kernel not in row["us"]:
        return "-"
    return f"{number(row['us'][kernel], ',.0f')} ({number(row['eager_us'][kernel], ',.0f')})"

"""The `same-budget` and `fixed-team` modes: runs of the arms, recorded or live, beside the paper's figures.

A claim about what a search reaches is judged only by a run of that arm on the GPU task: by a live one, or by measuring
the best kernel of a recorded one again. Runs on other tasks get rows of their own.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoteam.digest import count
from evoteam.reporting import claims, record
from evoteam.reporting.claims import Claim, Evidence
from evoteam.reporting.console import arms_table
from evoteam.reporting.session import Session
from kernels.foreign import describe

if TYPE_CHECKING:
    import torch

ARMS = {"same-budget": ("evolving", "single"), "fixed-team": ("evolving", "fixed-four")}
GPU_TASK, CPU_TASK = "mla-paged-decode", "mla-paged-decode-cpu"
CODEX = "codex"


@dataclass(frozen=True, slots=True)
class Live:
    """What `--live` needs: run folders go under `folder`, one an arm. `agent`: the command line that writes, if any.

    With `codex` there is one arm: the paper has a row of a single Codex agent and none of a team of them.
    """

    model: str
    budget_tokens: float
    task: str
    folder: Path
    agent: str = ""


def judge(session: Session, live: Live | None = None) -> None:
    """Evidence for the search claims, a row for every run, and the runs' views for the page.

    Raises click.UsageError when no live run could be started.
    """
    modes = [mode for mode in ARMS if mode in session.modes]
    if not modes:
        return
    codex = live and live.agent == CODEX
    wanted = (CODEX,) if codex else tuple(dict.fromkeys(arm for mode in modes for arm in ARMS[mode]))
    folders, stopped = _run_live(wanted, live) if live else (_recorded(wanted, session.terminal.note), "")
    if stopped and not any(live.folder.glob("*/events.jsonl")):
        raise click.UsageError(f"--live could not start: {stopped}")
    runs = {(s["task"], _arm(s)): (folder, s) for folder, s in _summaries(folders, session.terminal.note)}
    for claim in session.of(ARMS):
        session.evidence[claim.id] = _evidence(session, claim, runs, live, stopped)
    for folder, summary in runs.values():
        session.report["observations"].append(_row(folder, summary, bool(live)))
    session.report["runs"] = [_trimmed(summary) for _, summary in runs.values()]
    if runs:
        session.terminal.show(arms_table(session.report["runs"], "live" if live else "recorded"))


def _recorded(
    arms: Sequence[str], complain: Callable[[str], object], archive: Path = record.ROOT / "kernels" / "archive"
) -> list[Path]:
    """Run folders that ship, those of `arms` only."""
    found = []
    for path in sorted(archive.rglob("run.json")):
        try:
            if json.loads(path.read_text(encoding="utf-8"))["arm"] in arms:
                found.append(path.parent)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            complain(f"left out: {path} does not name an arm: {describe(error)}")
    return found


def _summaries(folders: Sequence[Path], complain: Callable[[str], object]) -> list[tuple[Path, dict]]:
    """Every run folder with its summary; one that cannot be read is left out and named."""
    from evoteam.memory import FolderError
    from evoteam.summary import summarise

    found = []
    for folder in folders:
        try:
            found.append((folder, summarise(folder)))
        except (FolderError, LookupError, TypeError, ValueError, AttributeError) as error:
            complain(f"left out: {folder} cannot be read: {describe(error)}")
    return found


def _run_live(arms: Sequence[str], live: Live) -> tuple[list[Path], str]:
    """Run every arm afresh under the same budget; the folders, and why it ended early if it did."""
    from evoteam.cli import main

    folders = []
    for arm in arms:
        folder = live.folder / arm
        command = ["run", "--task", live.task, "--arm", "single" if arm == CODEX else arm, "--model", live.model]
        command += ["--budget-tokens", str(live.budget_tokens), "--folder", str(folder)]
        command += ["--agent", live.agent] if live.agent else []
        try:
            with redirect_stdout(sys.stderr):
                main(command, prog_name="python -m evoteam", standalone_mode=False)
        except click.ClickException as error:
            return folders, f"arm {arm}: {error.message}"
        folders.append(folder)
    return folders, ""


def _evidence(session: Session, claim: Claim, runs: dict, live: Live | None, stopped: str) -> Evidence:
    if (claim.task, claim.arm) not in runs:
        elsewhere = [task for task, arm in runs if arm == claim.arm]
        if stopped:
            return Evidence(claims.NOT_RUN, reason=stopped)
        if elsewhere:
            return Evidence(
                claims.NOT_RUN,
                reason=f"judged by runs on the GPU task only; its run on {elsewhere[0]} is a row of its own",
            )
        if claim.arm == CODEX:
            how = "--mode fixed-team --live --agent codex makes one"
            return Evidence(claims.NOT_RUN, reason=f"no run of the Codex command line ships with this version; {how}")
        return Evidence(claims.NOT_RUN, reason="no run of this arm ships with this version; --live makes one")
    folder, summary = runs[claim.task, claim.arm]
    best = summary["best"]
    device = session.gpu() if best and not live else None
    if device is None:
        value = best["full_score"] if best else 0.0
        if value is None:
            reason = f"{best['id']}, the best of the run, was not evaluated on all workloads"
            return Evidence(claims.NOT_RUN, device=_device(summary), reason=reason)
        how, absent = ("a live run", "") if live else ("recorded", claims.RECORDED)
        return Evidence(absent, value, device=_device(summary), reason=f"{how}, {_origin(summary)}")
    return _measured_again(session, claim, folder / "attempts" / best["id"] / "kernel.py", device)


def _measured_again(session: Session, claim: Claim, source: Path, device: "torch.device") -> Evidence:
    """The best kernel of a recorded run, measured now over all workloads at the run scope."""
    from kernels.measure import measure_run
    from kernels.selection import KernelError, load_kernel
    from kernels.tasks import load_task
    from kernels.timing import MeasurementError

    name = session.report["device"]["name"]
    try:
        kernel = load_kernel(f"{source}:{load_task(claim.task).entry_point}")
        with session.terminal.progress(f"arm {claim.arm}") as step:
            found = measure_run(
                kernel.call, session.workloads, seed=session.seed, device=device, tables=session.tables,
                progress=lambda done, total, row: step(done, total, f"workload {row['index']}"),
            )  # fmt: skip
    except (KernelError, MeasurementError) as error:
        return Evidence(claims.NOT_RUN, device=name, reason=str(error))
    session.report["measurements"][f"arm-{claim.arm}"] = found
    return claims.from_scope(claim, found, name)


def _arm(summary: dict) -> str:
    """The arm, where one Codex agent is an arm of its own."""
    return CODEX if summary["arm"] == "single" and summary["agent"].startswith(CODEX) else summary["arm"]


def _device(summary: dict) -> str:
    return next((name for name in summary["devices"] if name), "")


def _origin(summary: dict) -> str:
    models = [name for name in summary["answered_by"] if name != "unstated"]
    spent = f"{summary['spend']['tokens']:,.0f} input-equivalent tokens"
    written = f", written by {summary['agent']}" if summary["agent"] else ""
    who = f"answered by {', '.join(models) or 'a model it does not name'}{written}"
    return f"{str(summary['started'])[:10]}, {who}, {spent}, {count(len(summary['attempts']), 'attempt')}"


def _row(folder: Path, summary: dict, live: bool) -> dict:
    best = summary["best"]
    note = _origin(summary)
    if not live:
        from evoteam.replay import replay

        with tempfile.TemporaryDirectory() as target:
            note += f"; replayed: {replay(folder, Path(target) / 'run').text.splitlines()[0]}"
    return {
        "title": f"Arm {_arm(summary)} on {summary['task']}",
        "value": _reached(best) if best else "nothing valid",
        "device": _device(summary),
        "verdict": "measured" if live else claims.RECORDED,
        "note": note,
        "conditions": "",
    }


def _reached(best: dict) -> str:
    if best["full_score"] is None:
        return f"{best['score']:.3f}x on the agents' workloads"
    return f"{best['full_score']:.3f}x on all workloads"


def _trimmed(summary: dict) -> dict:
    """A summary without the per-workload rows of attempts and the texts, which stand in the run folder."""
    attempts = [{key: value for key, value in attempt.items() if key != "rows"} for attempt in summary["attempts"]]
    return {key: value for key, value in summary.items() if key not in ("notes", "turns")} | {"attempts": attempts}

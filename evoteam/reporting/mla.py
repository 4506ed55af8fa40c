"""The `run-only` and `extra-budget` modes: measured on this GPU, or the shipped record and a check without one."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evoteam.reporting import claims, record
from evoteam.reporting.claims import Evidence
from evoteam.reporting.console import (
    comparison_table,
    runs_per_plan_note,
    runs_per_plan_table,
    scope_summary,
    selfcheck_tables,
    workload_table,
)
from evoteam.reporting.session import Session
from kernels import foreign

if TYPE_CHECKING:
    import torch

SCOPE_OF = {"run-only": "run", "extra-budget": "step"}
CUPTI_WORKLOADS = 10


class KernelFailed(Exception):
    """The judged kernel raised in a call."""


def judge(session: Session, device: "torch.device | None") -> None:
    """Evidence for every MLA claim of the session. `device` is the GPU to measure on, None where there is none."""
    if device:
        if session.kernel.spec == "mla_paged_decode":
            from kernels.mla_paged_decode import implementation

            session.report["kernel"]["implementation"] = implementation(device)
        _measure(session, device)
    else:
        _show_recorded(session)
        _check(session)


def _measure(session: Session, device: "torch.device") -> None:
    from kernels import measure, serving
    from kernels.measure import measure_run
    from kernels.workloads import load_workloads

    kernel = _named_errors(session.kernel.call)
    chosen = session.workloads
    spread_out = sorted(chosen, key=lambda workload: workload.tokens)[:: max(1, len(chosen) // CUPTI_WORKLOADS)]
    common = {"seed": session.seed, "device": device, "tables": session.tables}
    steps: dict[str, tuple[tuple[str, Callable], ...]] = {
        "run-only": (
            ("run", lambda **more: measure_run(kernel, chosen, **common, **more)),
            ("run-clean", lambda **more: measure_run(kernel, chosen, flush="clean", **common, **more)),
            ("cupti", lambda **more: measure.measure_cupti(kernel, spread_out, **common, **more)),
            (
                "host",
                lambda **more: measure.measure_host(
                    session.kernel.call, spread_out[::3], seed=session.seed, device=device
                ),
            ),
        ),
        "extra-budget": (
            ("step", lambda **more: serving.measure_step(kernel, chosen, **common, **more)),
            ("call", lambda **more: serving.measure_call(kernel, spread_out, **common, **more)),
        ),
    }
    if len(chosen) == len(load_workloads()):
        steps["run-only"] += (
            ("random", lambda **more: measure.measure_random(kernel, seed=session.seed, device=device, **more)),
        )
    faults: dict[str, Evidence] = {}
    for mode in (mode for mode in steps if mode in session.modes):
        for name, call in steps[mode]:
            fault = _one(session, name, call)
            if fault and not fault.absent:  # the kernel broke: the GPU may not be usable any more in this process
                faults = dict.fromkeys(SCOPE_OF, fault)
                break
            if fault and name == SCOPE_OF[mode]:
                faults[mode] = fault
        if faults.get(mode) and not faults[mode].absent:
            break
    _compare(session)
    name = session.report["device"]["name"]
    for claim in session.of(SCOPE_OF):
        measured = session.report["measurements"].get(claim.scope)
        fault = faults.get(claim.mode)
        session.evidence[claim.id] = fault or claims.from_scope(claim, measured, name)


def _compare(session: Session) -> None:
    """Put this run's means beside those of the shipped record of the same kernel."""
    found = record.shipped(session.kernel.spec, complain=session.terminal.note)
    rows = record.compare(session.report, found[1]) if found else []
    if rows:
        path, stored = found
        session.report["comparison"] = {
            "path": str(path.relative_to(record.ROOT)),
            "created": stored["created"],
            "device": stored["device"]["name"],
            "rows": rows,
        }
        session.terminal.show(comparison_table(session.report["comparison"]))


def _one(session: Session, name: str, call: Callable) -> Evidence | None:
    """Make one measurement and show it; evidence that says why where there is none."""
    import torch

    from kernels.timing import MeasurementError

    device = session.report["device"]["name"]
    try:
        with session.terminal.progress(name) as step:
            found = call(progress=lambda done, total, row: step(done, total, f"workload {row['index']}"))
    except KernelFailed as error:
        return Evidence(value=0.0, device=device, reason=str(error))
    except (MeasurementError, torch.OutOfMemoryError) as error:
        return Evidence(claims.NOT_RUN, device=device, reason=foreign.one_line(str(error)))
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        reason = f"the GPU reported an error after the kernel ran: {foreign.one_line(str(error))}"
        return Evidence(value=0.0, device=device, reason=reason)
    session.report["measurements"][name] = found
    if name in SCOPE_OF.values():
        session.terminal.show(workload_table(found))
    if "summary" in found:
        session.terminal.show(f"{name}: {scope_summary(found)}")
    if found.get("runs_per_plan"):
        session.terminal.show(runs_per_plan_table(found))
        session.terminal.show(runs_per_plan_note(found))
    builds = "".join(
        f", FlashInfer {backend} build {seconds:.0f} s" for backend, seconds in found["baseline_build_s"].items()
    )
    session.terminal.note(f"{name}: {found['seconds']:.0f} s{builds}")
    return None


def _named_errors(call: Callable) -> Callable:
    """`call`, whatever it raises turned into KernelFailed, so that it is never mistaken for a fault of the harness."""

    @functools.wraps(call)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        try:
            return foreign.call(call, *arguments, **keywords)
        except foreign.Raised as error:
            raise KernelFailed(f"the kernel raised {error}") from error

    return wrapped


def _show_recorded(session: Session) -> None:
    found = record.shipped(session.kernel.spec, complain=session.terminal.note)
    missing = "no GPU here, and no measurement of this kernel ships with this version"
    for claim in session.of(SCOPE_OF):
        session.evidence[claim.id] = Evidence(claims.NO_HARDWARE, reason=missing)
    if found is None:
        return
    path, stored = found
    name = str(path.relative_to(record.ROOT))
    session.report["recorded"] = {key: stored.get(key, "") for key in ("created", "note", "measurements")} | {
        "path": name,
        "device": stored["device"]["name"],
    }
    changed = "" if stored["kernel"]["sha256"] == session.kernel.sha256 else ", an earlier version of the kernel"
    for claim in session.of(SCOPE_OF):
        if claim.scope in stored["measurements"]:
            known = claims.from_scope(claim, stored["measurements"][claim.scope], stored["device"]["name"])
            reason = f"measured {stored['created'][:10]}{changed}: {name}"
            session.evidence[claim.id] = Evidence(claims.RECORDED, known.value, device=known.device, reason=reason)
    for scope in (SCOPE_OF[mode] for mode in SCOPE_OF if mode in session.modes):
        if scope in stored["measurements"]:
            session.terminal.show(
                f"recorded {stored['created'][:10]} on {stored['device']['name']}, nothing measured now:"
            )
            session.terminal.show(workload_table(stored["measurements"][scope]))
            session.terminal.show(f"{scope}: {scope_summary(stored['measurements'][scope])}")


def _check(session: Session) -> None:
    """The kernel in the interpreter and through the compilers: what can be known without a GPU."""
    from kernels import selfcheck

    with session.terminal.progress("interpreter") as step:
        interpreted = selfcheck.interpret(session.kernel.spec, progress=step)
    compiled = []
    if session.kernel.shipped:
        with session.terminal.progress("compile for sm_90") as step:
            compiled = selfcheck.compile_all(progress=step)
    wrong = [row for row in interpreted if row["reason"] and row["error_ratio"] is not None]
    if wrong:  # answers were compared: no GPU can make such a kernel right
        reason = f"wrong on {len(wrong)} of {len(interpreted)} small inputs in the interpreter; {wrong[0]['name']}: "
        for claim in session.of(SCOPE_OF):
            session.evidence[claim.id] = Evidence(value=0.0, reason=reason + wrong[0]["reason"])
    session.report["selfcheck"] = {"interpreter": interpreted, "compiled": compiled}
    for table in selfcheck_tables(session.report["selfcheck"]):
        session.terminal.show(table)

"""The parts of a run of repro.py: each takes some modes and returns evidence for their claims.

A part also adds what it measured to the session's report. A part that is not in this version, or whose chip is not
here, gives evidence that says so; it never raises for that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec

from evoteam import claims, record
from evoteam.claims import Claim, Evidence
from evoteam.console import Terminal, scope_summary, workload_table
from kernels.selection import Kernel
from kernels.workloads import Workload

MLA_MODES = {"run-only": "run", "extra-budget": "step"}
SEARCH_MODES = ("same-budget", "fixed-team")
KDA_MODES = ("kda-mi350x", "kda-b200")


@dataclass(slots=True)
class Session:
    """What the command line chose, and the report that grows while the parts run."""

    claims: tuple[Claim, ...]
    kernel: Kernel
    workloads: tuple[Workload, ...]
    seed: int
    terminal: Terminal
    report: dict
    tables: dict | None = None  # page tables of a real FlashInfer-Trace checkout, by workload index
    evidence: dict[str, Evidence] = field(default_factory=dict)

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(claim.mode for claim in self.claims))

    def of(self, modes: Iterable[str]) -> list[Claim]:
        modes = tuple(modes)
        return [claim for claim in self.claims if claim.mode in modes and claim.judge != "shown"]


def recorded_mla(session: Session) -> None:
    """No GPU: the shipped measurement of this kernel where there is one, else `hardware-unavailable`."""
    found = record.shipped(session.kernel.spec)
    for claim in session.of(MLA_MODES):
        session.evidence[claim.id] = Evidence(claims.NO_HARDWARE, reason="no GPU here, and no record of this kernel ships")
        scope = found and found[1]["measurements"].get(claim.scope)
        if scope:
            path, stored = found
            known = claims.from_scope(claim, scope, stored["device"]["name"])
            changed = "" if stored["kernel"]["sha256"] == session.kernel.sha256 else ", of an earlier version of the kernel"
            reason = f"measured {stored['created'][:10]}{changed}: {path.relative_to(record.ROOT)}"
            session.evidence[claim.id] = Evidence(claims.RECORDED, known.value, device=known.device, reason=reason)
    if found:
        path, stored = found
        session.report["recorded"] = {"path": str(path.relative_to(record.ROOT)), "measurements": stored["measurements"]}
        for mode, scope in MLA_MODES.items():
            if mode in session.modes and scope in stored["measurements"]:
                session.terminal.show(workload_table(stored["measurements"][scope]))
                session.terminal.show(scope_summary(stored["measurements"][scope]))


def searches(session: Session) -> None:
    """`same-budget` and `fixed-team`: recorded runs of the arms."""
    for claim in session.of(SEARCH_MODES):
        session.evidence[claim.id] = Evidence(claims.NOT_RUN, reason=f"no run of the arm {claim.arm} ships with this version")


def kda(session: Session) -> None:
    """The two KDA modes."""
    for claim in session.of(KDA_MODES):
        if find_spec("kernels.kda_evidence") is None:
            session.evidence[claim.id] = Evidence(claims.NOT_RUN, reason="the KDA part is not in this version")


def run(session: Session) -> None:
    """Every part that the session's modes need."""
    if set(session.modes) & set(MLA_MODES):
        recorded_mla(session)
    searches(session)
    kda(session)

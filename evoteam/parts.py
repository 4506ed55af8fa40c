"""The parts of a run of repro.py. Each takes some modes and leaves evidence for their claims in the session.

A part that is not in this version, or whose chip is not here, leaves evidence that says so; it never raises for that.
"""

from importlib.util import find_spec

from evoteam import claims, mla
from evoteam.claims import Evidence
from evoteam.session import Session

SEARCH_MODES = ("same-budget", "fixed-team")
KDA_MODES = ("kda-mi350x", "kda-b200")


def run(session: Session) -> None:
    """Every part that the session's modes need."""
    if set(session.modes) & set(mla.SCOPE_OF):
        device = _gpu()
        if device:
            from kernels import device as facts

            session.report["device"] = facts.describe(device)
            session.report["versions"] |= facts.versions()
        mla.judge(session, device)
    searches(session)
    kda(session)


def _gpu():
    """The GPU to measure on, None where there is none."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def searches(session: Session) -> None:
    """`same-budget` and `fixed-team`: recorded runs of the arms."""
    for claim in session.of(SEARCH_MODES):
        session.evidence[claim.id] = Evidence(claims.NOT_RUN, reason=f"no run of the arm {claim.arm} ships with this version")


def kda(session: Session) -> None:
    """The two KDA modes."""
    for claim in session.of(KDA_MODES):
        if find_spec("kernels.kda_evidence") is None:
            session.evidence[claim.id] = Evidence(claims.NOT_RUN, reason="the KDA part is not in this version")

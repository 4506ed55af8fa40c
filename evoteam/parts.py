"""The parts of a run of repro.py, each for some modes. They leave evidence for their claims in the session.

A part that is not in this version, or whose chip is not here, leaves evidence that says so; it never raises for that.
"""

from importlib.util import find_spec

from evoteam import arms, claims, mla
from evoteam.arms import Live
from evoteam.claims import Evidence
from evoteam.session import Session

KDA_MODES = ("kda-mi350x", "kda-b200")


def run(session: Session, live: Live | None) -> None:
    """Every part that the session's modes need."""
    if set(session.modes) & set(mla.SCOPE_OF):
        mla.judge(session, session.gpu())
    arms.judge(session, live)
    kda(session)


def kda(session: Session) -> None:
    """The two KDA modes."""
    for claim in session.of(KDA_MODES):
        if find_spec("kernels.kda_evidence") is None:
            session.evidence[claim.id] = Evidence(claims.NOT_RUN, reason="the KDA part is not in this version")

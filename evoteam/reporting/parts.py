"""The parts of a run of repro.py, each for some modes. They leave evidence for their claims in the session.

A part that has nothing to measure here, or whose chip is elsewhere, leaves evidence that says so; it never raises for
that.
"""

from evoteam.reporting import arms, kda, mla
from evoteam.reporting.arms import Live
from evoteam.reporting.session import Session


def run(session: Session, live: Live | None) -> None:
    """Every part that the session's modes need."""
    if set(session.modes) & set(mla.SCOPE_OF):
        mla.judge(session, session.gpu())
    arms.judge(session, live)
    kda.judge(session)

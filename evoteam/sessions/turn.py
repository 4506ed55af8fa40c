"""The second kind of turn: a coding agent's command line works until its session ends.

A session is a generator of events for the journal. It is sent the answer to what it asked of the run, and ends with
`turn_end`. A live one (live.py) starts the command line; a recorded one needs none, and a replay writes the same
journal.
"""

import contextlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from evoteam.agent import TurnLimits, answer
from evoteam.journal import read_events
from evoteam.llm import RecordingEnds
from evoteam.memory import SharedFolder
from evoteam.state import Talk
from evoteam.tools import Toolbox

Steps = Generator[tuple[str, dict], tuple[str, bool] | None, None]


class Sessions(Protocol):
    def steps(self, folder: SharedFolder, talk: Talk, limits: TurnLimits, effort: str) -> Steps: ...


def take_session(folder: SharedFolder, steps: Steps, toolbox: Toolbox, limits: TurnLimits) -> None:
    """Carry the open turn to its end. ProviderError and EvaluationError leave it open, to be resumed."""
    talk, told = toolbox.talk, None
    if talk.pending:  # interrupted before it was answered; its session is gone
        answer(folder, toolbox, limits)
    with contextlib.closing(steps):
        while True:
            kind, fields = steps.send(told)
            told = None
            if kind == "turn_end":
                break
            if kind in ("call", "asked"):
                folder.check_space()
            folder.append(kind, **fields)
            if kind == "asked":
                told = answer(folder, toolbox, limits)
    folder.append("turn_end", turn=talk.turn, role=talk.role, reason=fields["reason"], tokens=round(talk.tokens))


class RecordedSessions:
    """The sessions of a recorded run, by turn, with what an interruption cost where it was charged."""

    KINDS = ("call", "spent", "provider", "asked", "turn_end")

    def __init__(self, journal: Path):
        self.turns: dict[str, list[tuple[str, dict]]] = defaultdict(list)
        turn = ""
        for event in read_events(journal):
            turn = event["turn"] if event["kind"] == "turn" else turn
            kind = event["kind"]
            if kind == "resume" and event.get("usage"):
                kind, event = "provider", {"key": event["lost"], "error": "lost", "usage": event["usage"]}
            if kind in self.KINDS:
                fields = {name: value for name, value in event.items() if name not in ("seq", "t", "kind")}
                self.turns[turn].append((kind, fields))

    def steps(self, folder: SharedFolder, talk: Talk, limits: TurnLimits, effort: str) -> Steps:
        for step in self.turns[talk.turn]:
            yield step
        raise RecordingEnds(talk.role, len(self.turns[talk.turn]))

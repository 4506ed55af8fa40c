"""Where verdicts come from: the evaluator here, or a recording. (Another machine: see mailbox.py.)"""

from pathlib import Path
from typing import Any

from evoteam.evaluator import Evaluator
from evoteam.llm import RecordingEnds
from evoteam.memory import read_events
from evoteam.verdict import Verdict


class LocalJudge:
    """Evaluates in confined processes on this machine; the evaluator process is started with the first candidate."""

    def __init__(self, task: str, *, unsafe: bool = False):
        self.evaluator = Evaluator(task, unsafe=unsafe)

    def __enter__(self) -> "LocalJudge":
        return self

    def __exit__(self, *error: Any) -> None:
        self.evaluator.__exit__(*error)

    def evaluate(self, source: Path, attempt_dir: Path, *, best: float) -> Verdict:
        return self.evaluator.evaluate(source, attempt_dir, best=best)


class RecordedJudge:
    """The verdicts of a recorded run, in order. A source that was not evaluated then is an error."""

    def __init__(self, journal: Path):
        verdicts = [event["verdict"] for event in read_events(journal) if event["kind"] == "verdict"]
        self.given, self.verdicts = len(verdicts), iter(verdicts)

    def __enter__(self) -> "RecordedJudge":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def evaluate(self, source: Path, attempt_dir: Path, *, best: float) -> Verdict:
        record = next(self.verdicts, None)
        if record is None:
            raise RecordingEnds("evaluator", self.given)
        return Verdict.from_json(record)

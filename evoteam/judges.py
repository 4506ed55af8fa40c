"""Where verdicts come from: the evaluator here, or a recording. (Another machine: see mailbox.py.)"""

import shutil
from pathlib import Path
from typing import Any

from evoteam.journal import JOURNAL, read_events
from evoteam.judging.evaluator import EvaluationError, Evaluator
from evoteam.judging.verdict import Verdict, VerdictError
from evoteam.llm import RecordingEnds

LOG = "log.txt"


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
    """The verdicts of a recorded run, in order, and the logs that came with them, which roles may have read."""

    def __init__(self, recorded: Path):
        verdicts = [event for event in read_events(recorded / JOURNAL) if event["kind"] == "verdict"]
        self.recorded, self.given, self.verdicts = recorded, len(verdicts), iter(verdicts)

    def __enter__(self) -> "RecordedJudge":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def evaluate(self, source: Path, attempt_dir: Path, *, best: float) -> Verdict:
        event = next(self.verdicts, None)
        if event is None:
            raise RecordingEnds("evaluator", self.given)
        log = self.recorded / "attempts" / event["attempt"] / LOG
        if log.is_file():
            shutil.copyfile(log, attempt_dir / LOG)
        try:
            return Verdict.from_json(event["verdict"])
        except VerdictError as error:
            raise EvaluationError(f"the recorded verdict of {event['attempt']} cannot be read: {error}") from error

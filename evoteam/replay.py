"""A recorded run once more from its recorded answers: no key, no GPU, the same decisions."""

from dataclasses import dataclass
from pathlib import Path

from evoteam.digest import count
from evoteam.journal import JOURNAL, read_events
from evoteam.judges import LocalJudge, RecordedJudge
from evoteam.llm import ReplayModel
from evoteam.memory import SharedFolder
from evoteam.search import Search
from evoteam.sessions.turn import RecordedSessions
from evoteam.state import State
from kernels.tasks import load_task

MEASURED = ("tool", "verdict"), ("best", "score", "rules")  # events, and fields of others, that state what was measured
DECISIONS = ("team", "turn", "tool", "nudge", "attempt", "verdict", "repeat", "note", "turn_end", "decision", "end")
INCIDENTAL = (
    "seq",
    "t",
    "snapshot",
    "prompt_sha256",
)  # differ when a run was interrupted, or a prompt was edited since


@dataclass(frozen=True, slots=True)
class Outcome:
    """`equal`: every recorded decision came again; `same`: how many did before the first difference."""

    equal: bool
    same: int
    recorded: int
    text: str


def replay(recorded: Path, target: Path, *, remeasure: bool = False, unsafe: bool = False) -> Outcome:
    """Run `recorded` again into the empty folder `target`. remeasure: evaluate the candidates afresh."""
    journal, before = recorded / JOURNAL, SharedFolder.read(recorded).state
    config = before.config
    judge = LocalJudge(config["task"], unsafe=unsafe) if remeasure else RecordedJudge(recorded)
    with SharedFolder.open(target, config) as folder, judge:
        folder.durable = False
        task, sessions = load_task(config["task"]), RecordedSessions(journal)
        Search(folder, ReplayModel(journal), judge, task, say=lambda line: None, sessions=sessions).run()
        after = folder.state
    then, now = _decisions(journal, remeasure), _decisions(target / JOURNAL, remeasure)
    same = next((i for i, (a, b) in enumerate(zip(then, now)) if a[1] != b[1]), min(len(then), len(now)))
    equal = same == len(then)
    answers, verdicts = count(after.models.total(), "recorded answer"), count(len(after.judged), "recorded verdict")
    if remeasure:
        lines = [
            f"repeated: {answers}; no model was asked",
            f"measured anew: {count(len(after.judged), 'candidate')}, evaluated on this machine",
            *(f"- {name}: recorded {_outcome(before, name)}, now {_outcome(after, name)}" for name in after.attempts),
            f"- best: recorded {_best(before)}, now {_best(after)}",
            f"decided: {same} of {len(then)} decisions are the recorded ones, whatever was measured",
        ]
    else:
        lines = [
            f"{same} of {len(then)} decisions are the recorded ones; best score {after.best_score:.3f}",
            f"repeated: {answers}, {verdicts}; no model was asked, nothing measured",
        ]
    if not equal:
        lines.append(
            f"first difference:\n  then {then[same][0]}\n  now  {now[same][0] if same < len(now) else 'nothing'}"
        )
    return Outcome(equal, same, len(then), "\n".join(lines))


def _outcome(state: State, attempt: str) -> str:
    return state.attempts[attempt].outcome if attempt in state.attempts else "nothing"


def _best(state: State) -> str:
    return f"{state.best.id} with {state.best.outcome}" if state.best else "nothing valid"


def _decisions(journal: Path, remeasured: bool) -> list[tuple[str, dict]]:
    """What was decided, and a short name of it for messages. remeasured: without what was measured."""
    kinds, fields = MEASURED if remeasured else ((), ())
    events = [event for event in read_events(journal) if event["kind"] in DECISIONS and event["kind"] not in kinds]
    return [
        (_title(event), {name: value for name, value in event.items() if name not in (*INCIDENTAL, *fields)})
        for event in events
    ]


def _title(event: dict) -> str:
    shown = {name: str(value)[:120] for name, value in event.items() if name not in INCIDENTAL}
    return f"event {event['seq']}: " + ", ".join(f"{name} {value}" for name, value in shown.items())[:600]

"""A recorded run once more from its recorded answers: no key, no GPU, the same decisions."""

from dataclasses import dataclass
from pathlib import Path

from evoteam.judges import LocalJudge, RecordedJudge
from evoteam.llm import ReplayModel
from evoteam.journal import JOURNAL, read_events
from evoteam.memory import SharedFolder
from evoteam.search import Search
from kernels.tasks import load_task

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
    journal = recorded / JOURNAL
    config = SharedFolder.read(recorded).state.config
    judge = LocalJudge(config["task"], unsafe=unsafe) if remeasure else RecordedJudge(recorded)
    with SharedFolder.open(target, config) as folder, judge:
        folder.durable = False
        Search(folder, ReplayModel(journal), judge, load_task(config["task"]), say=lambda line: None).run()
        score = folder.state.best_score
    then, now = _decisions(journal), _decisions(target / JOURNAL)
    same = next((i for i, (a, b) in enumerate(zip(then, now)) if a[1] != b[1]), min(len(then), len(now)))
    equal = same == len(then)
    text = f"{same} of {len(then)} decisions are the recorded ones; best score {score:.3f}"
    if not equal:
        text += f"\nfirst difference:\n  then {then[same][0]}\n  now  {now[same][0] if same < len(now) else 'nothing'}"
    return Outcome(equal, same, len(then), text)


def _decisions(journal: Path) -> list[tuple[str, dict]]:
    """What was decided, and a short name of it for messages."""
    events = [event for event in read_events(journal) if event["kind"] in DECISIONS]
    return [
        (_title(event), {name: value for name, value in event.items() if name not in INCIDENTAL}) for event in events
    ]


def _title(event: dict) -> str:
    shown = {name: str(value)[:120] for name, value in event.items() if name not in INCIDENTAL}
    return f"event {event['seq']}: " + ", ".join(f"{name} {value}" for name, value in shown.items())[:600]

"""A task small enough to be judged by reading it: a candidate states its speed, and whether it is right."""

import ast
import hashlib
import json
from types import SimpleNamespace

from evoteam.budget import Budget
from evoteam.judging.verdict import Verdict
from evoteam.memory import JOURNAL, SharedFolder, read_events
from evoteam.search import Search, configuration

TASK = SimpleNamespace(
    name="toy",
    title="a toy",
    definition="Define SPEED.",
    techniques={"split-kv": r"split", "tensor-cores": r"dot", "async-copy": r"cp_async"},
    feedback=(0, 1),
    workloads=(0, 1, 2),
)


class ToyJudge:
    """Reads SPEED and WRONG out of the source; a syntax error is a compile failure. Counts what it was asked."""

    def __init__(self):
        self.asked = []

    def evaluate(self, source, attempt_dir, *, best):
        data = source.read_bytes()
        self.asked.append(attempt_dir.name)
        digest = hashlib.sha256(data).hexdigest()
        facts = {
            "task": "toy",
            "source_sha256": digest,
            "task_sha256": "0" * 64,
            "evaluator_sha256": "1" * 64,
            "device": "toy",
        }
        try:
            values = {
                node.targets[0].id: ast.literal_eval(node.value)
                for node in ast.parse(data).body
                if isinstance(node, ast.Assign)
            }
        except (SyntaxError, ValueError) as error:
            return Verdict(**facts, phase="compile", failure="compile", message=f"it does not compile: {error}")
        if "WRONG" in values:
            return Verdict(
                **facts,
                phase="check",
                failure="wrong-answer",
                worst={"index": 1, "max_abs": 0.5},
                message="out is wrong",
            )
        speed = float(values.get("SPEED", 1.0))
        full = speed * 0.9 if speed > best else None
        timed = TASK.workloads if full else TASK.feedback
        rows = [{"index": i, "ratio": speed, "ours_us": 10 / speed, "baseline_us": 10.0} for i in timed]
        return Verdict(**facts, phase="time", score=speed, full_score=full, rows=rows, gpu_seconds=0.5)


def candidate(speed, *marks, wrong=False):
    """Source of a candidate; `marks` are words that the toy techniques look for."""
    lines = [f"SPEED = {speed}", *(f"{mark} = 1" for mark in marks)] + (["WRONG = 1"] if wrong else [])
    return "\n".join(lines) + "\n"


def use(name, **arguments):
    return {"type": "tool_use", "name": name, "input": arguments}


def write(speed, *marks, wrong=False, techniques=()):
    return use(
        "write_kernel", source=candidate(speed, *marks, wrong=wrong), idea=f"speed {speed}", techniques=list(techniques)
    )


FINISH = use("finish")


def settings(arm="single", tokens=1_000_000, model="scripted", **rest):
    return configuration(task="toy", arm=arm, model=model, budget=Budget(tokens=tokens), **rest)


def run(path, model, *, arm="single", judge=None, resume=False, say=lambda line: None, **rest):
    """Run or resume an arm on the toy task; the folder as it then stands, read again from disk."""
    with SharedFolder.open(path, None if resume else settings(arm, model=model.name, **rest)) as folder:
        Search(folder, model, judge or ToyJudge(), TASK, say=say).run()
    return SharedFolder.read(path)


def events(path, *kinds):
    return [event for event in read_events(path / JOURNAL) if not kinds or event["kind"] in kinds]


def end_state(path):
    """A journal without what an interruption may change: numbers of events, clock, and the marks of resuming."""
    kept = [event for event in events(path) if event["kind"] != "resume"]
    return [
        json.dumps({k: v for k, v in event.items() if k not in ("seq", "t", "snapshot")}, sort_keys=True)
        for event in kept
    ]

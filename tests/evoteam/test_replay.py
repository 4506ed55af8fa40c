"""Replays: every decision again, quickly, and a difference is found."""

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evoteam import replay
from evoteam.journal import JOURNAL, line_of
from evoteam.judging.evaluator import EvaluationError
from evoteam.llm import ScriptedModel
from evoteam.memory import SharedFolder
from tests.evoteam.test_search import evolving_script, revise
from tests.evoteam.toy import FINISH, TASK, ToyJudge, end_state, events, run, use, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def toy_task(monkeypatch):
    monkeypatch.setattr(replay, "load_task", lambda name: TASK)


def test_an_evolving_run_is_replayed_event_by_event(tmp_path):
    run(tmp_path / "r", evolving_script([revise()]), arm="evolving")
    outcome = replay.replay(tmp_path / "r", tmp_path / "again")
    assert outcome.equal and outcome.same == outcome.recorded > 40
    assert end_state(tmp_path / "again") == end_state(tmp_path / "r")


def test_two_hundred_turns_are_replayed_in_ten_seconds_with_little_overhead_a_turn(tmp_path):
    turns = [[write(1 + i / 1000), use("note", text=f"note {i}"), FINISH] for i in range(200)]
    ends = []
    run(
        tmp_path / "r",
        ScriptedModel({"engineer": turns}),
        tokens=1e9,
        say=lambda line: ends.append(time.process_time()),
    )
    assert statistics.median(later - earlier for earlier, later in zip(ends, ends[1:])) < 0.05
    started = time.process_time()  # other work on the machine is not the loop's
    outcome = replay.replay(tmp_path / "r", tmp_path / "again")
    assert time.process_time() - started < 10
    assert outcome.equal and len(events(tmp_path / "again", "turn")) == 201


def test_an_interrupted_and_charged_run_replays_to_the_same_spend(tmp_path):
    model = ScriptedModel({"engineer": [[write(1.0), FINISH], [write(2.0), FINISH]]})
    path = tmp_path / "r"
    run(path, model)
    lines = (path / JOURNAL).read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"kind":"reply"' in line and "turn0002" in line)
    (path / JOURNAL).write_text("\n".join(lines[:cut]) + "\n")
    model.repeatable = False  # as a provider: the lost answer is charged
    state = run(path, model, resume=True).state
    replay_state = replay.replay(path, tmp_path / "again")
    assert events(path, "resume")[0]["lost"] == "turn0002.01" and replay_state.equal
    assert SharedFolder.read(tmp_path / "again").state.ledger.total.tokens == pytest.approx(state.ledger.total.tokens)


def test_logs_that_roles_have_read_are_there_again(tmp_path):
    class Logging(ToyJudge):
        def evaluate(self, source, attempt_dir, *, best):
            (attempt_dir / "log.txt").write_text(f"printed by {attempt_dir.name}")
            return super().evaluate(source, attempt_dir, best=best)

    turn = [write(1.0), use("read", path="attempts/a0001/log.txt"), FINISH]
    folder = run(tmp_path / "r", ScriptedModel({"engineer": [turn]}), judge=Logging())
    assert any(event["text"].startswith("printed by a0001") for event in events(folder.path, "tool"))
    assert replay.replay(tmp_path / "r", tmp_path / "again").equal


def test_a_run_that_spent_its_budget_ends_at_the_same_call_even_if_prompts_have_grown_since(tmp_path, monkeypatch):
    long = [[write(1 + i, "x" * 4_000), FINISH] for i in range(50)]
    folder = run(tmp_path / "r", ScriptedModel({"engineer": long}), tokens=60_000)
    assert folder.state.end["reason"] == "budget"
    monkeypatch.setattr("evoteam.search.view", lambda folder, talk: "much more to read " * 2_000)
    assert replay.replay(tmp_path / "r", tmp_path / "again").equal


def test_a_difference_is_shown_where_it_begins(tmp_path):
    path = tmp_path / "r"
    run(path, ScriptedModel({"engineer": [[write(1.0), FINISH], [write(2.0), FINISH]]}))
    text = json.dumps(events(path)).replace('"id": "a0002"', '"id": "a0099"')
    changed = json.loads(text.replace('"attempt": "a0002"', '"attempt": "a0099"'))
    (path / JOURNAL).write_bytes(b"".join(map(line_of, changed)))
    outcome = replay.replay(path, tmp_path / "again")
    assert not outcome.equal
    assert "then event" in outcome.text and "id a0099" in outcome.text and "id a0002" in outcome.text


class Slower(ToyJudge):
    """The evaluator of a machine on which everything is half as fast, for a replay that measures anew."""

    def __init__(self, task, *, unsafe):
        super().__init__()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def evaluate(self, source, attempt_dir, *, best):
        verdict = super().evaluate(source, attempt_dir, best=best)
        return verdict if verdict.failure else dataclasses.replace(verdict, score=verdict.score / 2)


def test_a_recorded_verdict_that_cannot_be_read_is_named(tmp_path):
    run(tmp_path / "r", ScriptedModel({"engineer": [[write(1.0), FINISH]]}))
    changed = events(tmp_path / "r")
    for event in changed:
        if event["kind"] == "verdict":
            event["verdict"]["rows"] = [{"index": 3, "ratio": "fast"}]
    (tmp_path / "r" / JOURNAL).write_bytes(b"".join(map(line_of, changed)))
    with pytest.raises(EvaluationError, match="the recorded verdict of a0001 cannot be read: ratio of a row is"):
        replay.replay(tmp_path / "r", tmp_path / "again")


def test_a_replay_says_what_was_repeated_and_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "LocalJudge", Slower)
    turns = [[write(1.0), FINISH], [write(2.0, wrong=True), FINISH], [write(4.0), FINISH]]
    run(tmp_path / "r", ScriptedModel({"engineer": turns}))
    text = replay.replay(tmp_path / "r", tmp_path / "again").text.splitlines()
    assert text[0].endswith("decisions are the recorded ones; best score 4.000")
    assert text[1:] == ["repeated: 3 recorded answers, 3 recorded verdicts; no model was asked, nothing measured"]
    outcome = replay.replay(tmp_path / "r", tmp_path / "anew", remeasure=True)
    assert outcome.equal and outcome.text.splitlines() == [
        "repeated: 3 recorded answers; no model was asked",
        "measured anew: 3 candidates, evaluated on this machine",
        "- a0001: recorded 1.000x, now 0.500x",
        "- a0002: recorded wrong-answer, now wrong-answer",
        "- a0003: recorded 4.000x, now 2.000x",
        "- best: recorded a0003 with 4.000x, now a0003 with 2.000x",
        f"decided: {outcome.same} of {outcome.same} decisions are the recorded ones, whatever was measured",
    ]


LIGHT = """
import re, sys
from pathlib import Path
from evoteam import cli, mailbox, summary
from evoteam.anthropic_model import AnthropicModel
from evoteam.judging.evaluator import evaluator_sha256, task_sha256
from evoteam.llm import ScriptedModel
from kernels.tasks import load_task
from tests.evoteam.toy import FINISH, run, write
import anthropic
for name in ("mla-paged-decode", "mla-paged-decode-cpu"):
    assert load_task(name).definition and task_sha256(name)
run(Path(sys.argv[1]), ScriptedModel({"engineer": [[write(1.0), FINISH]]}))
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(heavy, int(peak[1]) // 1024)
"""


def test_the_loop_imports_neither_torch_nor_numpy_and_stays_small(tmp_path):
    command = [sys.executable, "-c", LIGHT, tmp_path / "r"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, megabytes = done.stdout.rsplit(maxsplit=1)
    assert modules == "[]" and int(megabytes) < 300

"""Signals: each rule fires on its numbers, not before, not twice, and never because of the clock."""

import json

import pytest

from evoteam.signals import read_signals
from evoteam.state import State
from evoteam.team import founding_team
from tests.evoteam.toy import settings


class Story:
    """Builds a journal event by event and keeps the state that it gives."""

    def __init__(self, tokens=1_000_000):
        self.state, self.count = State(), 0
        self.add("run", config=settings("evolving", tokens=tokens))
        self.add("team", team=founding_team().model_dump(mode="json"))
        self.turn("writer")

    def add(self, kind, **fields):
        event = {"seq": self.state.seq + 1, "t": "2026-01-01T00:00:00Z", "kind": kind} | fields
        self.state.apply(json.loads(json.dumps(event)))

    def turn(self, role):
        number = len(self.state.turns) + 1
        self.add("turn", turn=f"turn{number:04d}", role=role, team="t0001", stage=0, snapshot=0, round=self.state.round)

    def spend(self, tokens):
        usage = {"input": tokens}
        self.add("reply", key="k", content=[], stop_reason="end_turn", usage=usage, model="m", faults={}, retries=0)

    def attempt(self, score=None, failure="", techniques=()):
        self.count += 1
        name = f"a{self.count:04d}"
        who = {
            "role": "writer",
            "team": "t0001",
            "idea": "i",
            "base": "",
            "source_sha256": name,
            "program_sha256": name,
        }
        self.add("attempt", id=name, call=name, **who, techniques=list(techniques), unconfirmed=[])
        verdict = {
            "phase": "time",
            "failure": failure,
            "score": score or 0.0,
            "full_score": score,
            "gpu_seconds": 0.0,
            "worst": {"index": 3},
            "rows": [],
            "message": "",
            "device": "",
        }
        self.add("verdict", attempt=name, verdict=verdict)

    def decide(self, by="rule", **rest):
        rules = [
            {"name": rule.name, "subject": rule.subject, "text": rule.text} for rule in read_signals(self.state).rules
        ]
        self.add("turn_end", turn="x", role="writer", reason="finished", tokens=0)
        self.add(
            "decision",
            by=by,
            action="continue",
            diagnosis="",
            evidence=[],
            rules=rules,
            tokens=self.state.ledger.total.tokens,
            round=self.state.round,
            phase="",
            **rest,
        )
        self.turn("writer")

    @property
    def fired(self):
        return {rule.name: rule.text for rule in read_signals(self.state).rules}


def test_a_plateau_needs_both_valid_attempts_and_tokens():
    story = Story()
    story.attempt(1.0)
    for _ in range(4):
        story.attempt(1.01)
    assert "plateau" not in story.fired  # attempts, but no tokens
    story.spend(79_000)
    assert "plateau" not in story.fired
    story.spend(2_000)
    told = "4 valid attempts and 81,000 tokens without a gain of 2% (limits 4 and 80,000)"
    assert story.fired["plateau"] == f"{told}; the best is still a0002 with 1.010"
    story.attempt(1.2)
    assert "plateau" not in story.fired


def test_tokens_without_valid_attempts_are_no_plateau():
    story = Story()
    story.attempt(1.0)
    story.spend(900_000)
    assert "plateau" not in story.fired


def test_small_steps_become_the_best_at_once_and_a_gain_when_they_add_up():
    story = Story()
    for step in range(5):
        story.attempt(1 + step / 100)
    assert story.state.best_score == 1.04
    assert [point["gain"] for point in story.state.curve] == [True, False, False, True, False]


@pytest.mark.parametrize("kind", ["compile", "wrong-answer", "timeout", "crash", "cheat"])
def test_a_streak_of_one_kind_is_named_with_its_worst_workload(kind):
    story = Story()
    story.attempt(1.0)
    for _ in range(2):
        story.attempt(failure=kind)
    assert "failure-streak" not in story.fired
    story.attempt(failure=kind)
    assert story.fired["failure-streak"] == f"3 failures in a row, 3 of them {kind}, last a0004 (worst: index 3)"
    story.attempt(1.0)
    assert "failure-streak" not in story.fired


def test_many_failures_of_different_kinds_are_a_streak_too():
    story = Story()
    for kind in ("compile", "crash", "timeout", "compile", "crash"):
        story.attempt(failure=kind)
    assert "failure-streak" not in story.fired
    story.attempt(failure="timeout")
    assert story.fired["failure-streak"].startswith("6 failures in a row, 2 of them compile, last a0004")


def test_a_retreat_fires_once_for_the_same_failures():
    story = Story()
    story.attempt(1.0)
    for _ in range(2):
        story.attempt(failure="wrong-answer", techniques=["split-kv"])
    story.attempt(1.0)
    assert "retreat" not in story.fired  # not dropped yet: one attempt without it
    story.attempt(1.0)
    assert story.fired["retreat"].startswith(
        "split-kv failed 2 times (2 wrong-answer; a0002, a0003), never worked, and the 2 attempts"
    )
    story.decide()
    assert "retreat" not in story.fired
    story.attempt(failure="crash", techniques=["split-kv"])
    story.attempt(1.0)
    story.attempt(1.0)
    assert "split-kv failed 3 times" in story.fired["retreat"]


def test_a_technique_that_worked_once_was_not_retreated_from():
    story = Story()
    story.attempt(1.0, techniques=["split-kv"])
    for _ in range(3):
        story.attempt(failure="wrong-answer", techniques=["split-kv"])
    for _ in range(3):
        story.attempt(1.0)
    assert "retreat" not in story.fired


def test_a_round_without_attempts_and_one_of_repeats_are_seen():
    story = Story()
    story.spend(5_000)
    story.decide()
    story.decide()
    assert "no-attempts" in story.fired
    story.attempt(1.0)
    for _ in range(2):
        story.add("repeat", call="c", role="writer", team="t0001", attempt="a0001")
    assert story.fired == {"repeats": "2 submissions of this round were programs tried before (a0001)"}


def test_what_the_supervisor_has_looked_at_does_not_alarm_again():
    story = Story()
    story.attempt(1.0)
    for _ in range(4):
        story.attempt(1.0)
    for _ in range(3):
        story.attempt(failure="crash")
    story.spend(100_000)
    assert {"plateau", "failure-streak"} <= story.fired.keys()
    story.decide(by="supervisor")
    assert not {"plateau", "failure-streak"} & story.fired.keys()


def test_stopping_opens_after_three_revisions_without_a_gain():
    story = Story()
    story.attempt(1.0)
    for number in range(3):
        assert not read_signals(story.state).may_stop
        story.decide(by="supervisor", team=founding_team().model_dump(mode="json") | {"id": f"t{number + 2:04d}"})
    assert read_signals(story.state).may_stop
    story.attempt(2.0)
    assert not read_signals(story.state).may_stop


def test_the_phase_follows_the_work_and_the_text_has_the_numbers():
    story = Story()
    assert read_signals(story.state).phase == "correctness"
    story.attempt(1.0)
    assert read_signals(story.state).phase == "speed"
    for score in (1.03, 1.05):
        story.attempt(score)
    story.add("note", id="n0001", call="c", role="ghost", team="t0001", text="x", evidence=[])
    signals = read_signals(story.state)
    assert signals.phase == "refinement"
    text = signals.text()
    assert (
        "3 attempts: 3 valid, no failure" in text
        and "1.050 by a0003 at 0" in text
        and "tokens used 0, 98% of the budget left" in text
    )
    assert "notes that nobody is shown" not in text  # the critic is shown notes:*


def test_signals_do_not_depend_on_time():
    story, slow = Story(), Story()
    for one in (story, slow):
        for _ in range(5):
            one.attempt(1.0)
        one.spend(100_000)
    slow.state.last_event = "2036-01-01T00:00:00Z"
    assert read_signals(slow.state) == read_signals(story.state)

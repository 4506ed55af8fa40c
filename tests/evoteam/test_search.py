"""The loop: arms, stages, stall, diagnosis, revision, endings."""

import json

import pytest

from evoteam.llm import ScriptedModel
from evoteam.memory import SharedFolder
from tests.evoteam.toy import FINISH, ToyJudge, candidate, events, run, settings, use, write

REPAIR = {
    "rationale": "one role repairs split-kv",
    "roles": [
        {"name": "writer", "tools": ["write_kernel", "edit_kernel", "note"], "share": 0.4},
        {
            "name": "repairer",
            "mandate": "Repair split-kv from a0002; change nothing else.",
            "tools": ["edit_kernel", "read"],
            "share": 0.6,
        },
    ],
    "order": [["repairer"], ["writer"]],
    "sharing": {"writer": ["best_code"], "repairer": ["failures", "team_attempts"]},
}
STALL = [
    [write(1.0), FINISH],
    [
        write(3.0, "split", wrong=True, techniques=["split-kv"]),
        write(3.1, "split", wrong=True, techniques=["split-kv"]),
        FINISH,
    ],
    [write(1.001), write(1.002), FINISH],
]


def evolving_script(decisions):
    fix = use(
        "edit_kernel", base="a0002", idea="repair", techniques=["split-kv"],
        edits=[{"search": "WRONG = 1\n", "replace": ""}],
    )  # fmt: skip
    return ScriptedModel({
        "writer": [*STALL, [FINISH]],
        "critic": [[use("note", text="look at split", evidence=["a0001"]), FINISH], [FINISH], [FINISH]],
        "supervisor": decisions,
        "repairer": [[fix], [FINISH]],
    })  # fmt: skip


def revise(team=REPAIR, diagnosis="they gave split-kv up after two failures"):
    return [use("decide", action="revise", diagnosis=diagnosis, evidence=["a0002", "a0003"], team=team)]


def test_a_retreat_is_seen_diagnosed_and_repaired_by_a_new_team(tmp_path):
    folder = run(tmp_path / "r", evolving_script([revise()]), arm="evolving")
    state = folder.state
    (revision,) = [d for d in state.decisions if d["action"] == "revise"]
    assert [rule["name"] for rule in revision["rules"]] == ["retreat"]
    assert "split-kv failed 2 times (2 wrong-answer; a0002, a0003)" in revision["rules"][0]["text"]
    assert revision["diagnosis"] == "they gave split-kv up after two failures"
    assert [tenure.team.id for tenure in state.tenures] == ["t0001", "t0002"]
    assert state.best.role == "repairer" and state.best.team == "t0002" and state.best.score == 3.0
    assert state.best.base == "a0002" and state.best.techniques == ("split-kv",)
    assert (folder.path / "best" / "kernel.py").read_text() == candidate(3.0, "split")
    assert json.loads((folder.path / "teams" / "t0002.json").read_text())["diagnosis"] == revision["diagnosis"]
    assert state.team.role("writer").mandate == state.tenures[0].team.role("writer").mandate  # left out: kept


@pytest.mark.parametrize("arm", ["single", "fixed-four"])
def test_an_arm_that_may_not_be_revised_never_asks_the_supervisor(tmp_path, arm):
    roles = {
        "single": ["engineer"],
        "fixed-four": ["architect", "kernel-writer", "correctness-debugger", "performance-analyst"],
    }[arm]
    writer = roles[min(1, len(roles) - 1)]
    answers = {role: [[FINISH]] * 3 for role in roles} | {writer: STALL}
    state = run(tmp_path / "r", ScriptedModel(answers), arm=arm).state
    assert {decision["by"] for decision in state.decisions} == {"rule"}
    assert any(rule["name"] == "retreat" for decision in state.decisions for rule in decision["rules"])
    assert len(state.tenures) == 1
    assert [turn.role for turn in state.turns] == roles * 3


def test_arms_differ_in_nothing_but_the_team(tmp_path):
    configs = {arm: settings(arm) for arm in ("evolving", "single", "fixed-four")}
    assert {json.dumps(config | {"arm": ""}) for config in configs.values()} == {
        json.dumps(configs["single"] | {"arm": ""})
    }
    from evoteam.team import preset

    assert len({preset(arm).limits for arm in configs}) == 1


def test_three_invalid_teams_leave_the_present_one_at_work(tmp_path):
    bad = REPAIR | {"order": [["nobody"], []]}
    decisions = [revise(bad)] * 3
    folder = run(tmp_path / "r", evolving_script(decisions), arm="evolving")
    refusals = [event for event in events(folder.path, "tool") if event["name"] == "decide"]
    assert [event["error"] for event in refusals] == [True, True, True]
    assert (
        "order[0][0]: no role is named 'nobody'" in refusals[0]["text"]
        and "order[1]: the stage is empty" in refusals[0]["text"]
    )
    decision = [d for d in folder.state.decisions if d["by"] == "supervisor"][0]
    assert decision["fallback"] and decision["action"] == "continue" and "refused" in decision["diagnosis"]
    assert len(folder.state.tenures) == 1 and folder.state.turns[-1].role in ("writer", "critic")
    assert folder.state.ledger.by_role["supervisor"].tokens > 0  # charged to the arm


def test_the_supervisor_may_do_nothing_but_decide(tmp_path):
    answers = [[write(9.9)], [use("note", text="hello")], [use("decide", action="continue", diagnosis="wait")]]
    folder = run(tmp_path / "r", evolving_script(answers), arm="evolving")
    texts = [e["text"] for e in events(folder.path, "tool") if e["key"].split(".")[0] == "turn0007"]
    assert (
        "there is no tool 'write_kernel' here; the tools are read, decide" in texts[0] and "no tool 'note'" in texts[1]
    )
    assert folder.state.best_score < 9


def test_stop_is_open_only_after_futile_revisions(tmp_path):
    stop = [use("decide", action="stop", diagnosis="hopeless")]
    folder = run(
        tmp_path / "r", evolving_script([stop, [use("decide", action="continue", diagnosis="go on")]]), arm="evolving"
    )
    told = [event["text"] for event in events(folder.path, "tool") if event["name"] == "decide"]
    assert "stopping is not open" in told[0]
    assert folder.state.end["reason"] == "answers"


def test_roles_of_one_stage_see_the_same_snapshot(tmp_path):
    team = {
        "rationale": "two at once",
        "roles": [{"name": n, "mandate": "Write.", "tools": ["write_kernel"], "share": 0.5} for n in ("left", "right")],
        "order": [["left", "right"], ["left"]],
        "sharing": {"left": ["team_attempts"], "right": ["team_attempts"]},
    }
    model = evolving_script([revise(team)])
    model.answers |= {"left": [[write(2.0), FINISH], [FINISH]], "right": [[write(2.5), FINISH]]}
    folder = run(tmp_path / "r", model, arm="evolving")
    turns = [event for event in events(folder.path, "turn") if event["team"] == "t0002"][:3]
    assert [turn["role"] for turn in turns] == ["left", "right", "left"]
    assert turns[0]["snapshot"] == turns[1]["snapshot"] < turns[2]["snapshot"]
    prompts = [(folder.path / "turns" / f"{turn['turn']}.md").read_text() for turn in turns]
    assert "a0006 by left" not in prompts[1] and "a0005" in prompts[1]
    assert "a0006 by left" in prompts[2] and "a0007 by right" in prompts[2]


def test_a_run_ends_cleanly_when_the_next_call_cannot_be_paid(tmp_path):
    long = [[write(1 + i, "x" * 4_000)] for i in range(50)]
    folder = run(tmp_path / "r", ScriptedModel({"engineer": long}), tokens=60_000)
    state = folder.state
    assert state.end["reason"] == "budget" and state.end["best"] == state.best.id
    assert state.ledger.total.tokens <= 60_000
    assert state.best.score == len(state.judged) > 2  # what was paid for is kept


def test_a_run_ends_when_its_evaluations_are_used(tmp_path):
    judge = ToyJudge()
    folder = run(
        tmp_path / "r", ScriptedModel({"engineer": [[write(1 + i)] for i in range(50)]}), tokens=20_000, judge=judge
    )
    assert len(judge.asked) == folder.state.config["budget"]["evaluations"] == 4
    assert folder.state.end["reason"] == "evaluations"


def test_a_turn_without_a_tool_call_is_nudged_twice_and_then_ends(tmp_path):
    say = [{"type": "text", "text": "shall I continue?"}]
    folder = run(tmp_path / "r", ScriptedModel({"engineer": [say] * 3 + [[FINISH]]}))
    assert [event["reason"] for event in events(folder.path, "turn_end")] == ["silent", "finished"]
    assert len(events(folder.path, "nudge")) == 2


def test_the_same_program_is_not_evaluated_twice(tmp_path):
    judge = ToyJudge()
    again = use("write_kernel", source="# another comment\n" + candidate(1.0), idea="new", techniques=[])
    folder = run(tmp_path / "r", ScriptedModel({"engineer": [[write(1.0), again, write(1.0), FINISH]]}), judge=judge)
    assert judge.asked == ["a0001"]
    assert [repeat["attempt"] for repeat in folder.state.repeats] == ["a0001", "a0001"]
    assert any(rule["name"] == "repeats" for rule in folder.state.decisions[0]["rules"])


def test_a_turn_stops_at_its_limits(tmp_path):
    state = run(
        tmp_path / "r", ScriptedModel({"engineer": [[use("read", path="x")]] * 8 + [[write(i) for i in range(1, 6)]]})
    ).state
    assert state.turns[0].reason == "calls"
    assert len(state.judged) == state.team.limits.evaluations == 3


def test_an_ended_run_is_not_run_on(tmp_path):
    path = tmp_path / "r"
    model = ScriptedModel({"engineer": [[FINISH]]})
    run(path, model)
    before = (path / "events.jsonl").read_bytes()
    with SharedFolder.open(path) as folder:
        assert folder.state.end["reason"] == "answers"
    run(path, model, resume=True)
    assert [event["kind"] for event in events(path)].count("end") == 1
    assert (path / "events.jsonl").read_bytes().startswith(before)

"""Any model output whatever leaves the run alive: arguments, teams, blocks and mailbox pages of every shape."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evoteam.agent import TurnLimits, open_turn, take_turn
from evoteam.llm import Reply, Request, estimated_usage, tidy
from evoteam.mailbox import END, read_answer
from evoteam.memory import SharedFolder
from evoteam.signals import read_signals
from evoteam.state import Call, State, Talk
from evoteam.supervisor import SupervisorTools
from evoteam.team import TOOLS, TeamError, founding_team, parse_team
from evoteam.tools import Refused, RoleTools
from tests.evoteam import toy
from tests.evoteam.toy import TASK, ToyJudge, candidate, events

ANSWERS, CALLS = 400, 10  # 4,000 tool calls of a role
DECISIONS, TEAMS, PAGES = 2_000, 3_000, 1_000


def cases(number):
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)


text = st.text(st.characters(), max_size=20)  # halves of characters included
scalar = (
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.sampled_from(["a0001", "", "..", "/etc/passwd"])
)
anything = (
    scalar | st.lists(scalar, max_size=2) | st.dictionaries(text, scalar | st.lists(scalar, max_size=2), max_size=2)
)
source = st.builds(candidate, st.integers(1, 9_999), wrong=st.booleans()) | text
tags = st.lists(st.sampled_from([*TASK.techniques, "magic"]), max_size=2)
edits = st.lists(
    st.fixed_dictionaries({"search": st.sampled_from(["SPEED", "1", "x\n"]), "replace": text}), min_size=1, max_size=2
)
paths = st.sampled_from(
    ["attempts/a0001/kernel.py", "notes/writer/n0001.md", "../x", "attempts/a0001/../../run.json", "\0"]
)
fit = {
    "write_kernel": {"source": source, "idea": text, "techniques": tags},
    "edit_kernel": {
        "base": st.sampled_from(["a0001", "a0002", "a9999"]),
        "edits": edits,
        "idea": text,
        "techniques": tags,
    },
    "read": {"path": paths, "offset": st.integers(-5, 10**9)},
    "note": {"text": text, "evidence": st.lists(st.sampled_from(["a0001", "zzz"]), max_size=2)},
}


@st.composite
def uses(draw):
    """A tool call that fits, or nearly, or not at all."""
    name = draw(st.sampled_from(sorted(fit)))
    given = {field: draw(value) for field, value in fit[name].items()}
    flaw = draw(st.integers(0, 5))
    if flaw == 0:
        given = draw(anything)
    elif flaw == 1 and given:
        given[draw(st.sampled_from(sorted(given)))] = draw(anything)
    elif flaw == 2 and given:
        del given[draw(st.sampled_from(sorted(given)))]
    elif flaw == 3:
        given[draw(text)] = draw(anything)
    return {"type": "tool_use", "name": name if flaw != 4 else draw(scalar), "input": given}


block = st.integers(0, 4).flatmap(lambda kind: uses() if kind else anything)

role = st.fixed_dictionaries(
    {"name": st.sampled_from(["writer", "critic", "supervisor"]) | anything},
    optional={
        "mandate": text | anything,
        "tools": st.lists(st.sampled_from(TOOLS), max_size=3) | anything,
        "share": st.sampled_from([0.5, 1, "0.5"]) | anything,
        "turns": st.integers(0, 5) | anything,
        "effort": st.sampled_from(["low", None]) | anything,
    },
)
team = anything | st.fixed_dictionaries(
    {},
    optional={
        "roles": st.lists(role | anything, max_size=3) | anything,
        "order": st.lists(st.lists(st.sampled_from(["writer", "critic"]) | anything, max_size=2) | anything, max_size=3)
        | anything,
        "sharing": st.dictionaries(
            st.sampled_from(["writer", "critic"]) | text,
            st.lists(st.sampled_from(["best_code", "x"]) | anything, max_size=2) | anything,
        )
        | anything,
        "limits": st.fixed_dictionaries({"calls": anything}) | anything,
    },
)
decision = st.fixed_dictionaries(
    {"action": st.sampled_from(["continue", "revise", "stop"]) | anything, "diagnosis": text | anything},
    optional={"evidence": anything, "team": team},
)


class Fuzzed:
    """Answers with the blocks that it was given last."""

    name, repeatable, metered = "fuzzed", True, True
    blocks: object = None

    def ask(self, request):
        content, faults = tidy(self.blocks, request.key)
        return Reply(content, "tool_use", estimated_usage(request, "x"), self.name, faults)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "r"
    with (
        pytest.MonkeyPatch.context() as patch,
        SharedFolder.open(path, toy.settings("evolving", tokens=1e12)) as shared,
    ):
        team = founding_team().model_dump(mode="json") | {
            "limits": {"calls": 50, "evaluations": 50, "round_tokens": 10_000_000}
        }
        patch.setattr("os.fsync", lambda file: None)
        shared.append("team", team=team)
        yield shared


def turn(folder, blocks, role, toolbox):
    model = Fuzzed()
    model.blocks = blocks
    open_turn(folder, Talk(f"turn{len(folder.state.turns) + 1:05d}", role, "t0001", 0, folder.state.seq), "s", "m")
    take_turn(folder, model, toolbox(folder.state.talk), TurnLimits(calls=1, tokens=1e9, evaluations=50), "")
    assert folder.state.talk is None


@cases(ANSWERS)
@given(st.lists(block, min_size=CALLS, max_size=CALLS))
def test_any_answer_of_a_role(folder, blocks):
    judge = ToyJudge()
    turn(folder, blocks, "writer", lambda talk: RoleTools(folder, talk, folder.state.team, judge, TASK))


@cases(DECISIONS)
@given(decision)
def test_any_decision_of_the_supervisor(folder, given_decision):
    talk = Talk("turn00001", "supervisor", "t0001", -1, folder.state.seq)
    content, faults = tidy([toy.use("decide") | {"input": given_decision}], "k")
    box = SupervisorTools(folder, talk, read_signals(folder.state))
    try:
        assert box.run(Call("k.0", "id", "decide", content[0]["input"], faults.get("k-0", ""))).value
    except Refused as refusal:
        assert str(refusal)


def test_what_was_fuzzed_is_a_run_that_reads_back(folder):
    state = State()
    for event in events(folder.path):
        state.apply(event)
    assert len(events(folder.path, "tool")) > ANSWERS * CALLS / 2  # the other blocks are no calls
    assert state.judged and state.best and state.notes and state.turns == folder.state.turns
    assert ANSWERS * CALLS + DECISIONS + TEAMS + PAGES == 10_000


@cases(TEAMS)
@given(team)
def test_any_team(given_team):
    try:
        assert parse_team(given_team).roles
    except TeamError as error:
        assert error.problems


@cases(PAGES)
@given(
    st.lists(
        st.sampled_from(
            [
                "### call note",
                "### call",
                "#### text",
                "#### edits.search",
                "```",
                "````",
                "```json",
                '{"a": 1}',
                "[1]",
                "{",
                "---",
                "model: x",
                END,
            ]
        )
        | text,
        max_size=12,
    )
)
def test_any_page_of_a_mailbox(lines):
    request = Request("turn0001.01", "writer", 0, "s", [], [], 100, "")
    reply = read_answer("\n".join(lines) + f"\n{END}\n", request)
    assert reply.content and all(isinstance(block.get("input", {}), dict) for block in reply.content)


def test_ids_and_numbers_that_nothing_can_carry_are_replaced():
    content, _ = tidy(
        [
            {"type": "thinking", "id": []},
            toy.use("read", path="x", offset=10**5_000) | {"id": []},
            toy.use("read") | {"id": "k-1"},
        ],
        "k",
    )
    assert content[1]["input"]["offset"].startswith("0x") and [block["id"] for block in content[1:]] == ["k-1", "k-2"]
    assert json.dumps(content)


def test_nesting_without_end_is_a_fault():
    deep: object = 1
    for _ in range(5_000):
        deep = [deep]
    content, faults = tidy([toy.use("note", text=deep), {"type": "thinking", "thinking": deep}, deep], "k")
    assert content[0]["input"] == {} and faults and json.dumps(content)

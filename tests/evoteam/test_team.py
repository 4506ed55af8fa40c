"""Teams: presets, every fault with its place at once, diffs for people."""

import json

import pytest

from evoteam.team import ARMS, Team, TeamError, fixed_four, founding_team, parse_team, preset, single_agent
from evoteam.tools import TEXTS, schema_of


def record(**changes):
    roles = [
        {"name": "writer", "mandate": "Write.", "tools": ["write_kernel"], "share": 0.7},
        {"name": "critic", "mandate": "Read.", "tools": ["note"], "share": 0.3},
    ]
    return {
        "roles": roles,
        "order": [["writer"], ["critic"]],
        "sharing": {"writer": ["best_code"], "critic": ["failures"]},
    } | changes


def faults(given):
    with pytest.raises(TeamError) as caught:
        parse_team(given)
    return caught.value.problems


def test_the_presets_are_the_paper_kit():
    assert [role.name for role in founding_team().roles] == ["writer", "critic"]
    assert [role.name for role in single_agent().roles] == ["engineer"]
    assert [role.name for role in fixed_four().roles] == [
        "architect",
        "kernel-writer",
        "correctness-debugger",
        "performance-analyst",
    ]
    for arm in ARMS:
        team = preset(arm)
        assert parse_team(json.loads(team.model_dump_json())) == team
        assert sum(team.turn_tokens(role.name) for _, role in team.slots()) == pytest.approx(team.limits.round_tokens)


def test_all_faults_come_at_once_each_with_its_place():
    bad = record(
        order=[["writer", "nobody"], [], ["writer"]], sharing={"writer": ["secrets", "notes:critic"], "ghost": []}
    )
    bad["roles"][0] |= {"share": 1.5, "tools": ["rm"]}
    bad["roles"].append(dict(bad["roles"][1]))
    found = "\n".join(faults(bad))
    for expected in (
        "roles[0].share: Input should be less than or equal to 1 (got 1.5)",
        "roles[0].tools[0]: Input should be 'write_kernel', 'edit_kernel', 'read' or 'note' (got 'rm')",
        "roles: the name 'critic' is used 2 times",
        "roles: no role may write candidates",
        "roles: the shares sum to 2.1, wanted 1",
        "order[0][1]: no role is named 'nobody'; the roles are writer, critic",
        "order[1]: the stage is empty",
        "order: role 'critic' never works",
        "sharing: no entry for role 'critic'",
        "sharing.ghost: no role has this name",
        "sharing.writer: unknown section 'secrets'",
    ):
        assert expected in found


def test_a_supervisor_cannot_be_hired():
    bad = record()
    bad["roles"][1]["name"] = "supervisor"
    assert any("'supervisor' is not a role of the team" in fault for fault in faults(bad))


def test_numbers_written_as_text_are_taken_and_still_have_to_sum_to_one():
    good = record()
    good["roles"][0]["share"] = "0.7"
    assert parse_team(good).role("writer").share == 0.7
    good["roles"][0]["share"] = "0.9"
    assert any("sum to 1.2" in fault for fault in faults(good))


def test_unknown_fields_are_refused_from_a_model_and_passed_over_in_a_run_folder():
    assert "color: Extra inputs are not permitted (got 'red')" in faults(record(color="red"))
    assert parse_team(record(color="red"), stored=True).roles[0].name == "writer"


@pytest.mark.parametrize(
    "given", [None, [], 7, "team", {}, {"roles": None}, {"roles": [None], "order": [None], "sharing": [None]}]
)
def test_what_is_no_team_at_all_is_still_a_clear_error(given):
    assert faults(given)


def test_roles_that_work_several_times_split_their_share():
    team = parse_team(record(order=[["writer"], ["critic"], ["writer"]]))
    assert team.turn_tokens("writer") == 35_000 and [role.name for _, role in team.slots()] == [
        "writer",
        "critic",
        "writer",
    ]
    twice = record()
    twice["roles"][0]["turns"] = 2
    assert [stage for stage, _ in parse_team(twice).slots()] == [0, 0, 1]


def test_a_diff_names_what_changed():
    old = parse_team(record())
    changed = record(order=[["fixer", "writer"]], limits={"evaluations": 5})
    changed["roles"][1] = {"name": "fixer", "mandate": "Repair.\nMore.", "tools": ["edit_kernel"], "share": 0.5}
    changed["roles"][0] |= {"share": 0.5, "mandate": "Write well."}
    changed["sharing"] = {"writer": ["profile"], "fixer": ["failures"]}
    assert old.diff(parse_team(changed)) == [
        "+ role fixer: Repair.",
        "- role critic",
        "~ role writer: mandate rewritten",
        "~ role writer: share 0.7 -> 0.5",
        "~ order writer > critic -> fixer+writer",
        "~ sharing writer: +profile -best_code",
        "~ limit evaluations: 3 -> 5",
    ]
    assert old.diff(old) == []


def test_the_schema_shown_to_the_supervisor_has_every_field_and_no_reference():
    schema = schema_of(Team, TEXTS["decide"]["team"])
    assert "$ref" not in json.dumps(schema)
    role = schema["properties"]["roles"]["items"]
    assert set(role["properties"]) == {"name", "mandate", "tools", "share", "turns", "effort"}
    assert all("description" in role["properties"][name] for name in role["properties"])

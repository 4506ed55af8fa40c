"""A summary adds up to the journal it was made from."""

import json

import pytest

from evoteam.budget import Usage, rates
from evoteam.digest import count
from evoteam.llm import ScriptedModel
from evoteam.memory import SharedFolder
from evoteam.summary import status_text, summarise, teams_text
from tests.evoteam.test_search import evolving_script, revise
from tests.evoteam.toy import events, run, settings


@pytest.fixture
def folder(tmp_path):
    return run(tmp_path / "r", evolving_script([revise()]), arm="evolving")


def test_the_figures_add_up_to_the_journal(folder):
    summary = summarise(folder.path)
    price = rates("scripted")
    usages = [Usage.of(event["usage"]) for event in events(folder.path, "reply")]
    spend = summary["spend"]
    assert spend["tokens"] == pytest.approx(sum(price.tokens(usage) for usage in usages))
    assert spend["full_cache_tokens"] == pytest.approx(sum(price.tokens(usage, cache_read=1) for usage in usages))
    assert spend["by_kind"]["output"] == sum(usage.output for usage in usages)
    assert spend["calls"] == len(usages) == spend["estimated_calls"]
    for field in ("tokens", "calls", "evaluations", "attempts", "new_bests"):
        total = {"attempts": len(summary["attempts"]), "new_bests": len(summary["curve"])}.get(field, spend.get(field))
        assert sum(role[field] for role in summary["roles"]) == pytest.approx(total), field
    assert [point["attempt"] for point in summary["curve"]] == ["a0001", "a0004", "a0005", "a0006"]
    assert [failure["kind"] for failure in summary["failures"]] == ["wrong-answer", "wrong-answer"]


def test_the_lineage_has_cause_change_and_yield(folder):
    first, second = summarise(folder.path)["teams"]
    assert first["diff"] == [] and first["parent"] == "" and first["to_tokens"] == second["from_tokens"]
    assert second["diagnosis"] == "they gave split-kv up after two failures" and second["evidence"] == [
        "a0002",
        "a0003",
    ]
    assert [rule["name"] for rule in second["rules"]] == ["retreat"] and "- role critic" in second["diff"]
    assert (second["best_before"], second["best_after"]) == (1.002, 3.0)
    assert second["attempts"] == second["valid"] == 1


def test_a_summary_is_json_and_says_how_tokens_were_counted(folder):
    summary = json.loads(json.dumps(summarise(folder.path)))
    assert "input x1, cache write x1.25, cache read x0.1, output x5 (assumed" in summary["unit"]
    assert summary["answered_by"] == {"scripted": summary["spend"]["calls"]}
    assert summary["ended"]["reason"] == "answers" and summary["devices"] == {"toy": 6}
    assert summary["started"] <= summary["last_event"]


def test_a_run_that_has_just_begun_has_a_summary_and_a_status(tmp_path):
    with SharedFolder.open(tmp_path / "r", settings()):
        pass
    assert summarise(tmp_path / "r")["best"] is None
    assert "nothing valid yet" in status_text(SharedFolder.read(tmp_path / "r"))


def test_one_team_of_a_run_that_has_just_begun_is_told_in_words_that_agree(tmp_path):
    state = run(tmp_path / "r", ScriptedModel({"engineer": []})).state
    text = teams_text(state)
    assert text.startswith("t0001, the first team\n  role     engineer: ") and "  order    engineer\n" in text
    assert text.endswith(
        "worked   1 round (1), 0 tokens\n  attempts 0, 0 valid\n  best     nothing valid before, nothing valid after"
    )
    assert count(1, "round") == "1 round" and count(2_000, "round") == "2,000 rounds"

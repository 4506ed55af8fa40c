"""The KDA modes: verdicts from the part's own word, measurements in rows of their own, every limit said."""

from pathlib import Path

import pytest

from evoteam.reporting import claims, kda, record, report
from evoteam.reporting.console import Terminal
from evoteam.reporting.expected import load
from evoteam.reporting.formats import finite
from evoteam.reporting.session import Session
from kernels import kda_evidence as part
from kernels.workloads import load_workloads

EXPECTED = load(Path(__file__).parents[2] / "expected_results.json")


@pytest.fixture
def judged(monkeypatch, kda_evidence):
    """Judges the given modes on made-up evidence; returns the session."""

    def judge(*modes):
        asked = []
        monkeypatch.setattr(part, "evidence", lambda progress, *, modes: asked.append(modes) or kda_evidence)
        chosen = tuple(claim for claim in EXPECTED.claims if claim.mode in modes)
        made = Session(chosen, None, load_workloads(), 1, Terminal(quiet=True), record.begin(["repro.py"], modes, 1))
        kda.judge(made)
        assert asked == ([modes] if set(modes) & set(kda.MODES) else [])
        return made

    return judge


def test_a_chip_that_is_elsewhere_judges_nothing(judged):
    made = judged("kda-mi350x", "kda-b200")
    verdicts = {c.id: claims.judge(c, made.evidence[c.id]) for c in made.of(kda.MODES)}
    assert set(verdicts) == {"kda-mi350x", "kda-b200-int21", "kda-b200-serving"}
    assert {(v.verdict, v.measured, v.where) for v in verdicts.values()} == {("hardware-unavailable", None, "")}


def test_other_modes_do_not_ask_for_it(judged):
    assert judged("run-only").report["kda"] is None


def test_what_was_measured_is_a_row_of_its_own(judged):
    (row,) = judged("kda-b200").report["observations"]
    assert (row["title"], row["device"], row["verdict"]) == ("KDA prefill against fla", "made-up GPU", "recorded")
    assert row["value"] == "2.00x, geometric mean of 1 shape" and row["conditions"] == "made-up condition."


def test_a_measurement_made_now_is_called_measured(kda_evidence):
    kda_evidence["evidence"]["measurement"] = kda_evidence["evidence"].pop("record")
    assert [row["verdict"] for row in kda.rows(kda_evidence)] == ["measured"]


def test_tables_hold_every_row_and_its_faults(kda_evidence):
    parts = {part["title"]: part for part in kda.view(kda_evidence)["parts"]}
    assert [row[0::4] for row in parts["KDA prefill in Triton's interpreter, against fp64"]["rows"]] == [
        ("serial", "right"),
        ("segmented", "wrong"),
    ]
    assert parts["KDA prefill compiled for the claims' GPUs"]["rows"] == [
        ("recurrence", "sm_100a", "100", "0", "65,536", "15"),
        ("scan", "gfx950", "made-up error", "-", "-", "-"),
    ]
    times = parts["KDA prefill on made-up GPU, recorded, us (eager)"]
    assert times["columns"] == ("heads x tokens", "ours", "fla", "traffic bound")
    assert times["rows"] == [
        ("96 x 8192", "1,000 (1,100)", "2,000 (2,100)", "230"),
        ("12 x 512", "-", "70 (900)", "2"),
    ]


def test_an_interpreter_that_failed_is_said(kda_evidence):
    kda_evidence["evidence"]["correctness"] = {"shows": "x", "does_not_show": "y", "error": "exit status 1"}
    assert kda.view(kda_evidence)["parts"][0]["error"] == "exit status 1"


def test_the_page_says_what_each_kind_of_evidence_does_not_show(report_record, kda_evidence):
    page = report.render(finite(report_record | {"kda": kda_evidence}))
    assert page.count("Does not show: made-up limits") == 3 and "To judge it: a made-up chip." in page
    assert 'href="#kda"' in page and "made-up gap" in page


def test_the_shipped_record_can_be_shown():
    shipped = part.recorded()
    labels = {"shows": "", "does_not_show": ""}
    view = kda.view({"claims": {}, "evidence": {"record": shipped | labels}})
    assert view["parts"][0]["columns"][:2] == ("heads x tokens", "ours") and len(view["parts"][0]["rows"]) >= 14

"""Verdicts at every boundary, the file's faults, and the exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evoteam.reporting import claims
from evoteam.reporting.claims import Claim, Evidence, Judgement
from evoteam.reporting.expected import ClaimsError, load

ROOT = Path(__file__).parents[2]
EXPECTED = load(ROOT / "expected_results.json")
BY_ID = {claim.id: claim for claim in EXPECTED.claims}


def row(index=0, ratio=1.0, status="ok", ours=(10.0,), base=(10.0,)):
    samples = {"ours": list(ours), "fa3": list(base)}
    return {"index": index, "ratio": ratio, "status": status, "reason": "", "baseline": "fa3", "samples": samples}


def scope(ratios, **changed):
    return {"rows": [row(i, ratio) | changed.get(f"row{i}", {}) for i, ratio in enumerate(ratios)]}


def test_every_published_figure_is_there():
    published = {claim.id: claim.published for claim in EXPECTED.claims}
    assert published == {
        "mla-step-geomean": "1.21x",
        "mla-step-wins": "36 of 47",
        "mla-step-worst": "0.86-0.99x",
        "mla-run-geomean": "0.96x",
        "same-budget-evolving": "0.75x",
        "same-budget-single": "0.44-0.51x",
        "fixed-team-evolving": "0.74x",
        "fixed-team-four-roles": "0.31x",
        "fixed-team-codex": "0.28x",
        "kda-mi350x": "3.01x",
        "kda-b200-int21": "3.44x",
        "kda-b200-serving": "2.42x",
        "team-configurations": "100 or more",
        "main-comparison-runs": "2 runs",
        "kda-mi350x-cost": "$3,018",
        "kda-b200-cost": "$1,832",
    }
    assert {claim.mode for claim in EXPECTED.claims} == set(claims.MODES)


def test_the_two_single_run_comparisons_are_kept_apart():
    same = {c.id for c in EXPECTED.claims if c.mode == "same-budget" and c.arm}
    fixed = {c.id for c in EXPECTED.claims if c.mode == "fixed-team" and c.arm}
    assert BY_ID["same-budget-evolving"].runs == 2 and BY_ID["same-budget-evolving"].reported == "the better run"
    assert all(BY_ID[name].runs == 1 for name in fixed) and not same & fixed


@pytest.mark.parametrize(
    "name, value, verdict",
    [
        ("mla-step-geomean", 1.205, "reproduced"),
        ("mla-step-geomean", 1.2049, "not-reproduced"),
        ("mla-step-geomean", 9.0, "reproduced"),
        ("mla-step-wins", 36, "reproduced"),
        ("mla-step-wins", 35, "not-reproduced"),
        ("mla-step-worst", 0.855, "reproduced"),
        ("mla-step-worst", 0.8549, "not-reproduced"),
        ("mla-step-worst", 1.3, "reproduced"),
        ("same-budget-single", 0.435, "reproduced"),
        ("same-budget-single", 0.43, "not-reproduced"),
        ("mla-run-geomean", 0.0, "not-reproduced"),
    ],
)
def test_boundaries(name, value, verdict):
    assert claims.judge(BY_ID[name], Evidence(value=value, device="NVIDIA H200")).verdict == verdict


@pytest.mark.parametrize(
    "low, high, verdict", [(1.21, 1.4, "reproduced"), (1.1, 1.2, "not-reproduced"), (1.1, 1.3, "unstable")]
)
def test_spread_matters_only_when_it_leaves_the_verdict_open(low, high, verdict):
    assert claims.judge(BY_ID["mla-step-geomean"], Evidence("", 1.2, low, high)).verdict == verdict


@pytest.mark.parametrize("absent", ["recorded", "hardware-unavailable", "baseline-unavailable", "not-run"])
def test_nothing_absent_counts_as_reproduced(absent):
    judgement = claims.judge(BY_ID["mla-step-geomean"], Evidence(absent, value=99.0, device="NVIDIA H200"))
    assert judgement.verdict == absent and judgement.measured == 99.0


def test_shown_claims_are_never_judged():
    assert claims.judge(BY_ID["kda-b200-cost"], Evidence(value=0.0)).verdict == "shown"


@pytest.mark.parametrize("value", [None, float("nan")])
def test_evidence_without_a_value_is_refused(value):
    with pytest.raises(ValueError, match="mla-run-geomean has no value"):
        claims.judge(BY_ID["mla-run-geomean"], Evidence(value=value))


@pytest.mark.parametrize(
    "name, device, where",
    [
        ("kda-b200-int21", "NVIDIA B200", "on NVIDIA B200"),
        ("kda-b200-int21", "NVIDIA H200", "on NVIDIA H200, claim is for NVIDIA B200"),
        ("kda-b200-int21", "NVIDIA GB200", "on NVIDIA GB200, claim is for NVIDIA B200"),
        ("kda-mi350x", "AMD Instinct MI350X", "on AMD Instinct MI350X"),
        ("mla-run-geomean", "NVIDIA H200", "on NVIDIA H200, claim is for a GPU its sources do not name"),
        ("mla-run-geomean", "", ""),
    ],
)
def test_the_line_names_both_chips(name, device, where):
    assert claims.place(BY_ID[name], device) == where


def test_geometric_mean_and_its_zero():
    assert claims.figure([1.0, 4.0], "geomean") == pytest.approx(2.0)
    assert claims.figure([100.0, 0.0], "geomean") == 0.0
    assert claims.figure([1.0, 1.001, 0.5], "wins") == 1
    assert claims.figure([2.0, 0.5], "worst") == 0.5


def test_a_whole_scope_is_judged():
    evidence = claims.from_scope(BY_ID["mla-run-geomean"], scope([2.0] * 47), "NVIDIA H200")
    assert (evidence.absent, evidence.value) == ("", pytest.approx(2.0))


def test_a_wrong_workload_scores_zero_and_is_named():
    record = scope([2.0] * 47, row5={"status": "wrong", "ratio": None, "reason": "out[0, 0] is nan"})
    evidence = claims.from_scope(BY_ID["mla-run-geomean"], record, "NVIDIA H200")
    assert evidence.value == 0.0 and "workload 5" in evidence.reason and "out[0, 0] is nan" in evidence.reason
    assert claims.judge(BY_ID["mla-run-geomean"], evidence).verdict == "not-reproduced"


def test_without_a_baseline_there_is_no_ratio():
    record = scope([2.0] * 47, row5={"ratio": None, "baseline": ""}) | {"baseline_error": "FlashInfer is not installed"}
    evidence = claims.from_scope(BY_ID["mla-run-geomean"], record, "NVIDIA H200")
    assert (evidence.absent, evidence.reason, evidence.value) == (
        "baseline-unavailable",
        "FlashInfer is not installed",
        None,
    )


def test_a_subset_of_workloads_cannot_judge():
    evidence = claims.from_scope(BY_ID["mla-step-geomean"], scope([9.0] * 46), "NVIDIA H200")
    assert evidence.absent == "not-run" and evidence.value == pytest.approx(9.0)
    assert "46 of the claim's 47" in evidence.reason
    assert claims.from_scope(BY_ID["mla-step-geomean"], scope([]), "NVIDIA H200").absent == "not-run"


def test_an_unstable_row_widens_the_figure():
    samples = [5.0, 5.0, *[10.0] * 7, 20.0, 20.0]
    wide = {"status": "unstable", "samples": {"ours": samples, "fa3": samples}}
    claim = BY_ID["mla-step-worst"]
    evidence = claims.from_scope(claim, scope([1.0] * 47, row3=wide), "NVIDIA H200")
    assert (evidence.value, evidence.low, evidence.high) == (1.0, 0.25, 1.0)
    assert claims.judge(claim, evidence).verdict == "unstable" and "workload 3" in evidence.reason


def judged(*verdicts):
    return [Judgement(BY_ID["mla-run-geomean"], verdict) for verdict in verdicts]


@pytest.mark.parametrize(
    "verdicts, plain, strict",
    [
        (("reproduced",), 0, 0),
        (("reproduced", "shown"), 0, 0),
        (("reproduced", "not-reproduced"), 1, 1),
        (("hardware-unavailable", "not-reproduced"), 1, 1),
        *[((verdict, "reproduced"), 0, 3) for verdict in claims.UNJUDGED],
    ],
)
def test_exit_status(verdicts, plain, strict):
    assert claims.exit_status(judged(*verdicts), strict=False) == plain
    assert claims.exit_status(judged(*verdicts), strict=True) == strict


def test_last_line_is_in_fixed_order():
    line = claims.summary_line(judged("hardware-unavailable", "reproduced", "not-reproduced", "hardware-unavailable"))
    assert line == "claims: 1 reproduced, 1 not-reproduced, 2 hardware-unavailable"


GOOD = {
    "id": "a", "mode": "run-only", "title": "t", "value": 1.0, "unit": "x", "judge": "ratio", "figure": "geomean",
    "scope": "run", "conditions": "c", "sources": ["s"],
}  # fmt: skip
FILE = {
    "schema": 1,
    "paper": {"title": "t", "group": "g", "read": "r"},
    "sources": {"s": {"what": "w", "read": "2026-01-01"}},
    "caveats": [],
}


def write(tmp_path, *rows):
    path = tmp_path / "expected_results.json"
    path.write_text(json.dumps(FILE | {"claims": list(rows)}))
    return path


def test_a_small_file_loads(tmp_path):
    (claim,) = load(write(tmp_path, GOOD)).claims
    assert isinstance(claim, Claim) and claim.published == "1.00x"


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "claims is empty"),
        ([[]], r"claims\[0\] is list, wanted an object"),
        ([{k: v for k, v in GOOD.items() if k != "value"}], "lacks value"),
        ([GOOD | {"vlaue": 1}], "unknown field vlaue"),
        ([GOOD | {"value": "1.2"}], "value is '1.2', wanted a number"),
        ([GOOD | {"value": True}], "value is True, wanted a number"),
        ([GOOD | {"value": 10**400}], r"value is 1000\d+\.\.\., wanted a number$"),
        ([GOOD | {"id": ["a"]}], r"id is \['a'\], wanted a text"),
        ([GOOD | {"title": {}}], r"title is {}, wanted a text"),
        ([GOOD | {"hardware": ""}], "hardware is '', wanted a text or null"),
        ([GOOD | {"workloads": "47"}], "workloads is '47', wanted a count"),
        ([GOOD | {"caveats": "one"}], "caveats is 'one', wanted a list of texts"),
        ([GOOD | {"sources": [{}]}], r"sources is \[{}\], wanted a list of names"),
        ([GOOD | {"value": float("nan")}], "value is nan, wanted a number"),
        ([GOOD | {"judge": "range"}], r"value is 1.0, wanted \[low, high\]"),
        ([GOOD | {"judge": "range", "value": [2, 1]}], r"wanted \[low, high\]"),
        ([GOOD | {"mode": "run"}], "mode is 'run', wanted one of run-only"),
        ([GOOD | {"figure": "mean"}], "figure is 'mean', wanted one of geomean"),
        ([GOOD | {"tolerance": -1}], "tolerance is -1"),
        ([GOOD | {"sources": ["x"]}], "source 'x' is not listed"),
        ([GOOD | {"sources": []}], "wanted a list of names"),
        ([GOOD, GOOD], '"a" is used 2 times'),
        ([GOOD | {"mode": "no", "value": None}], "mode is 'no'.*value is None"),
    ],
)
def test_faults_are_named(tmp_path, rows, message):
    with pytest.raises(ClaimsError, match=message):
        load(write(tmp_path, *rows))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        (f'{{"schema": {"9" * 5000}}}', "is not JSON: Exceeds the limit"),
        ("[]", "wanted an object"),
        ('{"schema": 2, "claims": []}', "schema"),
        (json.dumps(FILE | {"paper": {"title": "t"}, "claims": [GOOD]}), "paper must be an object"),
        (json.dumps(FILE | {"sources": {"s": {"what": "w"}}, "claims": [GOOD]}), "sources must be an object"),
        (json.dumps(FILE | {"caveats": [1], "claims": [GOOD]}), "caveats must be a list of texts"),
    ],
)
def test_a_broken_file_says_what_is_wanted(tmp_path, text, message):
    path = tmp_path / "expected_results.json"
    path.write_text(text)
    with pytest.raises(ClaimsError, match=message):
        load(path)
    with pytest.raises(ClaimsError, match="cannot read"):
        load(tmp_path / "missing.json")


def test_claims_load_nothing_heavy():
    heavy = ("torch", "numpy", "pydantic", "anthropic")
    code = f"import sys, evoteam.reporting.claims; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"

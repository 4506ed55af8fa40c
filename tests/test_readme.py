"""What the README says about the program is what the program says."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from evoteam.reporting import claims, readme
from evoteam.reporting.expected import load

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date():
    filled = readme.fill(TEXT, readme.generated())
    assert filled.split() == TEXT.split(), "run: python -m evoteam.reporting.readme"


def test_a_missing_place_is_named():
    with pytest.raises(KeyError, match="no place for measured"):
        readme.fill("# nothing", {"measured": "x"})


def test_every_verdict_and_mode_is_explained():
    assert [verdict for verdict in claims.VERDICTS if f"`{verdict}`" not in TEXT] == []
    assert [mode for mode in claims.MODES if mode not in TEXT] == []


def test_every_path_named_exists():
    named = set(re.findall(r"`((?:kernels|evoteam|tests)/[\w/.-]+|\w+\.(?:py|json|md))`", TEXT)) - {"report.json"}
    named = {name for name in named if "row_norm" not in name}  # an example of what a fork would write
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_opening_counts_the_claims_by_what_they_take():
    judged = [claim for claim in load(ROOT / "expected_results.json").claims if claim.judge != "shown"]
    by_scope = Counter({"run": "MLA", "step": "MLA", "search": "search", "kda": "KDA"}[claim.scope] for claim in judged)
    rows = dict((name, int(n)) for n, name in re.findall(r"^\| (\d+): .*?\b(MLA|KDA|search)\b", TEXT, re.M))
    assert rows == by_scope and f"its {len(judged)} claims" in TEXT


def test_the_opening_does_not_deny_a_run_that_ships():
    runs = (json.loads(path.read_text()) for path in (ROOT / "kernels" / "archive").rglob("run.json"))
    ships = any(run["task"] == "mla-paged-decode" for run in runs)
    assert ("no such run ships" in " ".join(TEXT.split())) is not ships


def test_rows_whose_samples_spread_widely_are_marked_and_counted(report_record):
    scope = report_record["measurements"]["run"]
    scope["rows"][7] |= {"status": "unstable", "spread": 0.25}
    scope["summary"]["unstable"] = [7]
    text = readme.measured((ROOT / "kernels" / "x.json", report_record))
    assert re.findall(r"^\| (\d+) \|.*\\\* \|$", text, re.M) == ["7"] and "| 25.0% \\* |" in text
    assert "| 1 / 47 |" in text and "such rows carry a \\*" in text


def test_the_measured_table_comes_from_a_record(report_record):
    text = readme.measured((ROOT / "kernels" / "x.json", report_record))
    run = report_record["measurements"]["run"]
    assert f"| {run['summary']['geomean']:.2f}x |" in text and "made-up GPU" in text
    assert sum(line.startswith(tuple(f"| {i} |" for i in range(47))) for line in text.splitlines()) == 47
    assert "No measurement ships" in readme.measured(None)

"""What the README says about the program is what the program says."""

import re
from pathlib import Path

import pytest

from evoteam.reporting import claims, readme

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
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_measured_table_comes_from_a_record(report_record):
    text = readme.measured((ROOT / "kernels" / "x.json", report_record))
    run = report_record["measurements"]["run"]
    assert f"| {run['summary']['geomean']:.2f}x |" in text and "made-up GPU" in text
    assert sum(line.startswith(tuple(f"| {i} |" for i in range(47))) for line in text.splitlines()) == 47
    assert "No measurement ships" in readme.measured(None)

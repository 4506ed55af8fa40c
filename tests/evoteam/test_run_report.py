"""The page of a run: nothing found, one attempt, ten thousand, several arms, hostile text, a browser's patience."""

import csv
import io
import json
import re
from base64 import b64decode

import pytest
from click.testing import CliRunner

from evoteam.cli import main
from evoteam.reporting import record, run_report
from evoteam.reporting.formats import finite
from evoteam.summary import summarise


def page_of(tmp_path, *folders):
    return run_report.write(folders, tmp_path / "out").read_text(encoding="utf-8")


def figures(html):
    return re.findall(r'<figure id="([^"]+)"', html)


def test_a_run_shows_score_roles_failures_budget_and_teams(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=120))
    names = ("best", "roles", "yield", "failures", "budget")
    assert figures(html) == [f"mla-paged-decode-cpu-evolving-{name}" for name in names]
    assert re.findall(r"<strong>(t\d{4})</strong>", html) == ["t0001", "t0002", "t0003"]
    assert html.count('<g class="event">') == 2 * 2  # two new teams, drawn in two widths


def test_the_record_beside_the_page_is_the_summary(tmp_path, run_folder):
    folder = run_folder("run", attempts=7)
    page_of(tmp_path, folder)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["program"] == "evoteam report" and stored["runs"] == [json.loads(json.dumps(summarise(folder)))]


def test_a_run_without_improvement_says_that_nothing_was_valid(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=3, improves=False))
    assert "nothing valid" in html and "mla-paged-decode-cpu-evolving-best" in figures(html)
    assert "nan" not in html and "inf," not in html


def test_one_attempt_that_works_has_no_failure_chart(tmp_path, run_folder):
    assert "mla-paged-decode-cpu-evolving-failures" not in figures(page_of(tmp_path, run_folder("run", attempts=1)))


def test_no_attempt_at_all_is_a_page(tmp_path, run_folder):
    assert "nothing valid" in page_of(tmp_path, run_folder("run", attempts=0))


def test_text_of_models_stays_text(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=60))
    assert "<b>made-up</b>" not in html and "&lt;b&gt;made-up&lt;/b&gt; stall" in html


def test_arms_are_compared_at_the_budget_that_all_spent(tmp_path, run_folder):
    long, short = run_folder("a", attempts=100), run_folder("b", attempts=40, arm="single", every=7)
    summaries = [summarise(folder) for folder in (long, short)]
    common = summaries[1]["spend"]["tokens"]
    reached = max(p["score"] for p in summaries[0]["curve"] if p["tokens"] <= common)
    assert run_report.best_within(summaries[0], common, "tokens") == reached < summaries[0]["best"]["score"]
    html = page_of(tmp_path, long, short)
    assert (
        figures(html)[:2] == ["mla-paged-decode-cpu-arms-best", "mla-paged-decode-cpu-arms-spend"]
        and f"{reached:.3f}x" in html
    )


def test_full_cache_weight_moves_the_comparison(run_folder):
    summary = summarise(run_folder("run", attempts=50))
    spend = summary["spend"]
    reads = spend["by_kind"]["cache_read"]
    assert spend["full_cache_tokens"] - spend["tokens"] == pytest.approx(reads * (1 - summary["rates"]["cache_read"]))
    half = spend["tokens"] / 2
    assert run_report.best_within(summary, half, "full_cache_tokens") < run_report.best_within(summary, half, "tokens")
    assert run_report.best_within(summary, 0, "tokens") is None


def test_the_attempts_can_be_saved(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=9))
    body = re.search(r'href="data:text/csv;base64,([^"]+)"', html)[1]
    rows = list(csv.DictReader(io.StringIO(b64decode(body).decode())))
    assert [row["attempt"] for row in rows] == [f"a{i:04d}" for i in range(1, 10)]
    assert {row["failure"] for row in rows} > {"compile"}


@pytest.fixture
def large_page(tmp_path, run_folder):
    return page_of(tmp_path, run_folder("run", attempts=10_000))


def test_ten_thousand_attempts_stay_under_five_megabytes(large_page):
    assert len(large_page.encode()) < 5e6


def test_ten_thousand_attempts_open_in_two_seconds(browser, large_page):
    found = "[performance.now(), document.querySelectorAll('svg').length]"
    probe = f"<script>onload = () => {{ document.title = JSON.stringify({found}) }}</script>"
    shown = browser(
        large_page.replace("default-src 'none';", "script-src 'unsafe-inline';").replace("</body>", probe + "</body>")
    )
    milliseconds, drawings = json.loads(re.search(r"<title>(.*?)</title>", shown.stdout)[1])
    assert drawings >= 10 and milliseconds < 2000


def test_the_command_writes_both_files_or_says_why_not(tmp_path, run_folder):
    folder = run_folder("run", attempts=2)
    done = CliRunner().invoke(main, ["report", str(folder)])
    assert done.exit_code == 0 and done.output.strip() == str(folder / "report.html")
    assert (folder / "report.json").is_file() and (folder / "report.html").is_file()
    again = CliRunner().invoke(main, ["report", str(folder)])
    assert again.exit_code == 0
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(main, ["report", str(folder), "--out", str(tmp_path / "file" / "x")])
    assert refused.exit_code == 1 and "give another folder with --out" in refused.output
    assert "is not a run folder" in CliRunner().invoke(main, ["report", str(tmp_path)]).output


def test_a_measured_report_is_not_replaced_by_that_of_a_run(tmp_path, run_folder, report_record):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "report.json").write_text(json.dumps(finite(report_record)))
    refused = CliRunner().invoke(
        main, ["report", str(run_folder("run", attempts=2)), "--out", str(tmp_path / "measured")]
    )
    assert refused.exit_code == 1 and "report.json was not written by this command" in refused.output
    assert not (tmp_path / "measured" / "report.html").exists()


def test_a_page_that_cannot_be_written_loses_no_record(tmp_path, run_folder, monkeypatch):
    write = record.write

    def full(path, text):
        if path.name == "report.html":
            raise record.RecordError(f"cannot write {path}: No space left on device")
        write(path, text)

    monkeypatch.setattr(record, "write", full)
    with pytest.raises(record.RecordError, match="report.html: No space left on device, nor below"):
        run_report.write([run_folder("run", attempts=2)], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["runs"]


def axis_ticks(html, name):
    """Tick texts of a wide chart: the y axis's, then the x axis's."""
    figure = re.search(rf'<figure id="{name}">.*?</figure>', html, re.S)[0]
    wide = re.search(r'<div class="wide">(.*?)</div>', figure, re.S)[1]
    return [re.findall(rf'class="tick {side}">([^<]*)', wide) for side in ("end", "middle")]


def test_counts_have_whole_ticks_once_each(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=3))
    assert axis_ticks(html, "mla-paged-decode-cpu-evolving-failures")[0] == ["0", "1"]
    assert "(1 row)" in html and "(1 rows)" not in html


def test_flags_of_new_teams_carry_their_names(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=130))
    assert html.count('class="event-name">t0002<') == 2 and "each flag is a new team" in html  # two widths
    assert "each flag" not in page_of(tmp_path, run_folder("short", attempts=3))


def test_a_first_team_did_not_begin_at_zero(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=3))
    assert "tokens, best 1.000x<" in html and "0.000x" not in html


def test_the_score_on_all_workloads_stands_beside_that_of_the_agents(tmp_path, run_folder):
    folder = run_folder("run", attempts=3)
    journal = folder / "events.jsonl"
    journal.write_text(journal.read_text().replace('"full_score": null', '"full_score": 0.875'))
    assert "<small>a0001; on all workloads 0.875x</small>" in page_of(tmp_path, folder)


def test_what_has_no_known_price_did_not_cost_nothing(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=3))
    assert "<dt>dollars</dt><dd>- <small>no price is known</small>" in html and "$0.00" not in html


def test_bars_differ_without_color(tmp_path, run_folder):
    html = page_of(tmp_path, run_folder("run", attempts=9))
    assert set(re.findall(r'class="hatch h(\d)"', html)) == {"1", "2", "3", "4"}
    assert set(re.findall(r'<pattern id="h(\d)"', html)) == {"2", "3", "4"}  # the first kind is plain

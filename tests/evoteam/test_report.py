"""The page: complete, equal to report.json, self-contained, safe with hostile text, and alive in a real browser."""

import base64
import csv
import io
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from evoteam.reporting import axes, claims, figures, report
from evoteam.reporting.formats import finite


class Page(HTMLParser):
    """Tables by the id around them, figures with their drawings, and every address in the page."""

    VOID = {"meta", "link", "br", "img", "input", "hr", "path", "line", "rect"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.tables, self.figures, self.addresses, self.scripts, self.verdicts = [], {}, {}, [], 0, []
        self.feed(text)

    @property
    def place(self):
        return next((id_ for _, id_ in reversed(self.stack) if id_), "")

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.scripts += tag == "script" or any(name.startswith("on") for name in attributes)
        self.addresses += [attributes[name] for name in ("href", "src", "action", "data") if name in attributes]
        if tag not in self.VOID:
            self.stack.append((tag, attributes.get("id")))
        if tag == "figure":
            self.figures[attributes["id"]] = {"svg": 0, "marks": 0}
        if tag == "table":
            self.tables.setdefault(self.place, []).append([])
        if tag == "tr":
            self.tables[self.place][-1].append([])
        if tag in ("td", "th"):
            self.tables[self.place][-1][-1].append("")
        if self.place in self.figures:
            self.figures[self.place]["svg"] += tag == "svg" and "role" in attributes
            self.figures[self.place]["marks"] += attributes.get("class", "").split(" ")[0] in ("mark", "line", "bar")

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack and self.stack[-1][0] == tag, f"</{tag}> closes <{self.stack[-1][0]}>"
            self.stack.pop()

    def handle_data(self, data):
        if any(tag in ("td", "th") for tag, _ in self.stack):
            self.tables[self.place][-1][-1][-1] += data


@pytest.fixture
def page(report_record):
    return Page(report.render(finite(report_record)))


def test_every_chart_is_there_in_two_widths_and_has_marks(page):
    expected = [f"{scope}-{name}" for scope in ("run", "step") for name in ("ratio", "latency", "error", "spread")]
    assert sorted(page.figures) == sorted([*expected, "step-plan"])
    assert {name for name, found in page.figures.items() if found["svg"] != 2 or found["marks"] == 0} == set()


def test_the_verdict_table_equals_the_record(page, report_record):
    (table,) = page.tables["verdicts"]
    wanted, said = [], None
    for claim in [*report_record["claims"], None]:
        if said and (claim is None or said != claim["where"] + claim["reason"]):
            wanted.append([said])
        if claim:
            said = claim["where"] + claim["reason"]
            cells = [claim[key] for key in ("published", "measured_text", "scope", "verdict")]
            wanted.append([claim["title"] + claim["id"], *cells])
    assert table[1:] == wanted


def test_what_neighbors_have_in_common_is_said_once(report_record):
    report_record["observations"] *= 3
    html = report.render(finite(report_record))
    assert html.count("claim is for a GPU its sources do not name") == 1
    assert html.count("made-up conditions") == 1 and html.count("made-up note") == 3


def test_tables_of_a_measurement_equal_the_record(page, report_record):
    rows = report_record["measurements"]["run"]["rows"]
    table = page.tables["run"][0]
    column = {name: i for i, name in enumerate(table[0])}
    assert len(table) == 48
    for line, row in zip(table[1:], rows, strict=True):
        assert line[column["#"]] == str(row["index"])
        assert float(line[column["ours us"]]) == round(row["ours_us"], 2)
        assert float(line[column["FlashInfer us"]]) == round(row["baseline_us"], 2)
        assert line[column["ratio"]] == f"{row['ratio']:.3f}x"
        assert line[column["status"]] == "ok"
    ratios = {line[0]: line[3] for line in page.tables["run-ratio"][0][1:]}
    assert ratios == {str(row["index"]): f"{row['ratio']:.3f}x" for row in rows}


def test_charts_are_sorted_by_tokens(page):
    tokens = [int(line[2].replace(",", "")) for line in page.tables["run-ratio"][0][1:]]
    assert tokens == sorted(tokens) and tokens[0] == 8 and tokens[-1] == 75_145


def test_raw_samples_and_the_record_can_be_saved(page, report_record):
    saved = [
        unquote(address).split(",", 1)
        for address in page.addresses
        if address.startswith("data:") and "base64" in address
    ]
    texts = {head: base64.b64decode(body).decode() for head, body in saved}
    assert json.loads(texts["data:application/json;base64"]) == finite(report_record)
    rows = list(csv.DictReader(io.StringIO(texts["data:text/csv;base64"])))
    scope = report_record["measurements"]["step"]["rows"]
    assert len(rows) == sum(len(samples) for row in scope for samples in row["samples"].values())
    assert float(rows[0]["us"]) == scope[0]["samples"]["ours"][0]


def test_nothing_comes_from_elsewhere(page):
    assert page.scripts == 0
    assert [a for a in page.addresses if not a.startswith(("data:", "#"))] == []


def test_hostile_text_stays_text(report_record):
    evil = '</td><script>alert(1)</script><img src=x onerror="alert(2)">'
    report_record["claims"][0] |= {"title": evil, "reason": evil, "where": evil}
    report_record["measurements"]["run"]["rows"][0]["reason"] = evil
    report_record["command"] = ["repro.py", evil]
    page = Page(report.render(report_record))
    assert page.scripts == 0 and "x" not in page.addresses
    assert page.tables["verdicts"][0][2] == [evil + evil]


def test_a_record_without_measurements_still_makes_a_page(report_record):
    report_record |= {"measurements": {}, "device": None, "git": None}
    page = Page(report.render(report_record))
    assert page.figures == {} and len(page.tables["verdicts"][0]) == 19


def test_wrong_and_missing_values_are_dashes_not_crashes(report_record, scope_record):
    broken = scope_record("run")
    for row in broken["rows"]:
        row |= dict.fromkeys(("ours_us", "ours_p10", "ours_p90", "baseline_us", "ratio", "bandwidth_share", "spread"))
        row |= {
            "status": "wrong",
            "reason": "out[0, 0, 0] is nan",
            "baseline": "",
            "samples": {},
            "error_ratio": float("inf"),
        }
    broken["summary"] |= {
        "geomean": None,
        "arithmetic_mean": None,
        "worst": None,
        "wrong": list(range(47)),
        "geomean_by_batch": {},
    }
    report_record["measurements"] = {"run": broken}
    page = Page(report.render(finite(report_record)))
    assert page.figures == {}
    assert page.tables["run"][0][1][3:] == ["-", "-", "", "-", "-", "-", "-", "wrong", "out[0, 0, 0] is nan"]


def test_one_workload_is_enough_for_every_chart(scope_record):
    record = scope_record("step")
    record["rows"] = record["rows"][:1]
    assert [figure.id for figure in figures.of_scope("s", record)] == [
        "s-ratio",
        "s-latency",
        "s-plan",
        "s-error",
        "s-spread",
    ]
    assert all("nan" not in figure.wide and "inf" not in figure.narrow for figure in figures.of_scope("s", record))


def test_recorded_measurements_say_so(report_record):
    report_record["device"] = None
    report_record["recorded"] = {
        "created": "2026-01-02T",
        "note": "A made-up note.",
        "path": "kernels/r.json",
        "device": "recorded GPU",
        "measurements": report_record["measurements"],
    }
    report_record["measurements"] = {}
    html = report.render(report_record)
    assert "The kernel alone (recorded)" in html and "Median of 30 samples" in html and "Recorded 2026-01-02." in html
    assert html.count("A made-up note.") == 1 and "Nothing was measured now." in html
    assert "What follows was measured 2026-01-02 on recorded GPU" in html
    assert "this GPU" not in html and "copy rate of made-up GPU, TB/s" in html  # of the GPU that was measured on


def test_a_wide_row_is_not_called_by_the_name_of_a_verdict(report_record):
    scope = report_record["measurements"]["run"]
    scope["rows"][0] |= {"status": "unstable", "spread": 0.3}
    scope["summary"]["unstable"] = [0]
    page = Page(report.render(finite(report_record)))
    for name in ("run", "run-ratio", "run-spread"):
        cells = [cell for row in page.tables[name][0] for cell in row]
        assert cells.count("wide") == 1 and "unstable" not in cells
    html = report.render(finite(report_record))
    assert html.count("wide: the samples spread by more than 10% in each of three tries") == 1
    assert "wrong / wide spread" in html and "`" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)


@pytest.mark.parametrize(
    "verdicts, headline",
    [
        (["reproduced", "reproduced", "not-reproduced", "not-run"], "2 reproduced, 1 not-reproduced, 1 open"),
        (["recorded", "hardware-unavailable", "shown"], "Nothing judged here: 1 recorded, 1 open"),
        (["unstable", "recorded"], "1 unstable, 1 recorded"),
        (["shown"], "Nothing judged here"),
    ],
)
def test_the_headline_counts_every_claim_that_can_be_judged(verdicts, headline):
    assert report._headline([{"verdict": verdict} for verdict in verdicts]) == headline


def test_names_in_a_reason_keep_their_letters(report_record):
    report_record["kda"]["claims"]["kda-b200"]["reason"] = "the claim is for NVIDIA B200"
    assert "<p>The claim is for NVIDIA B200. To judge it" in report.render(finite(report_record))


def test_every_verdict_has_its_meaning():
    assert set(report.MEANINGS) == set(claims.VERDICTS)


@pytest.mark.parametrize(
    "axis, room, ticks",
    [
        (axes.Axis("", 0, 10), 5, [0, 2, 4, 6, 8, 10]),
        (axes.Axis("", 0, 1.06, whole=True), 6, [0, 1]),
        (axes.Axis("", 0, 3.2, whole=True), 6, [0, 1, 2, 3]),
        (axes.Axis("", 8, 75_145, log=True), 9, [10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4]),
        (axes.Axis("", 0.002, 0.0026, log=True), 6, [0.002, 0.0021, 0.0022, 0.0023, 0.0024, 0.0025, 0.0026]),
    ],
)
def test_ticks_are_round_and_inside(axis, room, ticks):
    found = [value for value, _ in axis.marks(room)]
    assert all(axis.low <= value <= axis.high for value in found) and found == pytest.approx(ticks)


def test_a_log_axis_places_equal_ratios_at_equal_distances():
    axis = axes.Axis("", 1, 16, log=True)
    assert [axis.place(value) for value in (1, 2, 4, 8, 16)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_a_browser_shows_every_chart_without_errors_or_requests(browser, report_record):
    probe = """<script>
      window.addEventListener('load', () => {
        const shown = [...document.querySelectorAll('figure .wide svg')].map(s => s.getBoundingClientRect());
        const data = {charts: shown.filter(r => r.width > 300 && r.height > 150).length,
          overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
          requests: performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).map(r => r.name)};
        document.title = JSON.stringify(data);
      });
    </script>"""
    html = report.render(finite(report_record)).replace(
        "default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';"
    )
    result = browser(html.replace("</body>", f"{probe}</body>"), "--window-size=1100,900")
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.S)[1]
    assert json.loads(title) == {"charts": 9, "overflow": 0, "requests": []}
    assert "CONSOLE" not in result.stderr


def test_a_phone_has_the_narrow_charts_and_does_not_scroll_sideways(tmp_path, browser, report_record):
    (tmp_path / "report.html").write_text(report.render(finite(report_record)), encoding="utf-8")
    probe = """<iframe src="report.html" width="390" height="3000"></iframe><script>
      window.addEventListener('load', () => { const d = frames[0].document;
        const seen = n => [...d.querySelectorAll(n)].filter(e => e.getBoundingClientRect().height > 100).length;
        const overflow = d.documentElement.scrollWidth - d.documentElement.clientWidth;
        document.title = JSON.stringify([seen('.narrow svg'), seen('.wide svg'), overflow]); });
    </script>"""
    result = browser(f"<title></title>{probe}", "--allow-file-access-from-files")
    assert json.loads(re.search(r"<title>(.*?)</title>", result.stdout, re.S)[1]) == [9, 0, 0]

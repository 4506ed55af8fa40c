"""The page: complete, equal to report.json, self-contained, safe with hostile text, and alive in a real browser."""

import base64
import csv
import io
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from evoteam.reporting import charts, claims, figures, report
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
    wanted = [
        [c["title"] + c["id"], c["published"], c["measured_text"], c["scope"], c["where"], c["verdict"], c["reason"]]
        for c in report_record["claims"]
    ]
    assert table[1:] == wanted


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
    assert page.tables["verdicts"][0][1][6] == evil


def test_a_record_without_measurements_still_makes_a_page(report_record):
    report_record |= {"measurements": {}, "device": None, "git": None}
    page = Page(report.render(report_record))
    assert page.figures == {} and len(page.tables["verdicts"][0]) == 17


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
    report_record["recorded"] = {
        "created": "2026-01-02T",
        "note": "A made-up note.",
        "measurements": report_record["measurements"],
    }
    report_record["measurements"] = {}
    html = report.render(report_record)
    assert "The kernel alone (recorded)" in html and "Measured 2026-01-02, nothing now. A made-up note." in html


def test_every_verdict_has_its_meaning():
    assert set(report.MEANINGS) == set(claims.VERDICTS)


@pytest.mark.parametrize(
    "axis, room, ticks",
    [
        (charts.Axis("", 0, 10), 5, [0, 2, 4, 6, 8, 10]),
        (charts.Axis("", 8, 75_145, log=True), 9, [10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4]),
        (charts.Axis("", 0.002, 0.0026, log=True), 6, [0.002, 0.0021, 0.0022, 0.0023, 0.0024, 0.0025, 0.0026]),
    ],
)
def test_ticks_are_round_and_inside(axis, room, ticks):
    found = [value for value, _ in axis.marks(room)]
    assert all(axis.low <= value <= axis.high for value in found) and found == pytest.approx(ticks)


def test_a_log_axis_places_equal_ratios_at_equal_distances():
    axis = charts.Axis("", 1, 16, log=True)
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

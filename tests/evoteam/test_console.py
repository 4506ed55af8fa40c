"""The terminal: 80 columns whatever the numbers, progress for people and for pipes, no codes where none are wanted."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from evoteam.reporting import claims, console
from evoteam.reporting.expected import load

ROOT = Path(__file__).parents[2]


def printed(*renderables):
    out = Console(file=io.StringIO(), width=80, highlight=False)
    out.print(*renderables)
    return out.file.getvalue()


def test_tables_keep_every_cell_in_80_columns(scope_record):
    record = scope_record("step", 3.0)
    record["rows"][41] |= {
        "ours_us": 12345.6,
        "baseline_us": 123456.7,
        "ratio": 10.0,
        "spread": 1.23,
        "status": "unstable",
    }
    lines = [line.rstrip() for line in printed(console.workload_table(record)).splitlines()]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    (line,) = [line for line in lines if line.split()[:1] == ["41"]]
    assert line.split() == [
        "41",
        "64",
        "75,145",
        "12345.6",
        "123456.7",
        "fa3",
        "10.00x",
        *line.split()[7:9],
        "123%",
        "wide",
    ]
    assert "wide: the samples spread by more than 10% in each of three tries" in lines
    assert not any("unstable" in line for line in lines)  # that is a verdict


def test_missing_numbers_are_dashes(scope_record):
    record = scope_record("run")
    record["rows"][0] |= dict.fromkeys(("ours_us", "baseline_us", "ratio", "bandwidth_share", "spread"))
    record["rows"][0] |= {"status": "wrong", "baseline": "", "error_ratio": float("inf")}
    (line,) = [line for line in printed(console.workload_table(record)).splitlines() if line.split()[:1] == ["0"]]
    assert line.split() == ["0", "1", "8", "-", "-", "-", "-", "-", "-", "wrong"]


def test_summary_names_means_wins_and_the_worst(scope_record):
    record = scope_record("run")
    summary = record["summary"]
    text = console.scope_summary(record)
    assert (
        f"geometric mean {summary['geomean']:.2f}x, " in text
        and "by batch: B=1 " in text
        and f"arithmetic mean {summary['arithmetic_mean']:.2f}x" in text
    )
    assert max(map(len, f"run-clean: {text}".splitlines())) <= 80
    assert f"worst workload {summary['worst']['index']} at {summary['worst']['ratio']:.2f}x" in text
    record["summary"] |= {"geomean": None, "wrong": [3]}
    assert console.scope_summary(record) == "no mean: wrong on workload [3]"


def test_runs_per_plan_shows_every_count_and_what_the_paper_would_need(scope_record):
    record = scope_record("step")
    text = printed(console.runs_per_plan_table(record))
    assert [n for n in ("1", "2", "5", "10", "20", "50", "61", "100", "never") if n not in text.split()] == []
    assert console.runs_per_plan_note(record).endswith("1.21x with plan at 240 runs per plan here.")
    assert "at no number of runs" in console.runs_per_plan_note(record | {"paper_runs_per_plan": None})


@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_terminal_gets_color_unless_no_color_is_set(stream):
    code = "from evoteam.reporting.console import Terminal; from rich.text import Text; "
    code += f"Terminal().{stream}.print(Text('x', style='red'))"

    def shown(**environment):
        master, slave = pty.openpty()
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")} | {"TERM": "xterm-256color"}
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=slave, stderr=slave, env=clean | environment, check=True
        )
        os.close(slave)
        return os.read(master, 1000)

    assert b"\x1b[31m" in shown() and b"\x1b" not in shown(NO_COLOR="1")


def test_progress_into_a_pipe_is_rare_plain_lines(capsys, monkeypatch):
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(seconds))
    with console.Terminal().progress("run") as step:
        for done in range(1, 11):
            step(done, 10, f"workload {done}")
        step(10, 10, "again")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "run: 3 of 10, about 14 s left  workload 3" and lines[-1] == "run: 10 of 10 in 20 s  workload 10"
    assert len(lines) == 4


def test_quiet_says_nothing_but_verdicts(capsys):
    terminal = console.Terminal(quiet=True)
    terminal.note("note")
    terminal.show("table")
    with terminal.progress("run") as step:
        step(1, 1)
    claim = load(ROOT / "expected_results.json").claims[0]
    terminal.verdicts([claims.Judgement(claim, "reproduced", 1.5, reason="why")], "claims: 1 reproduced")
    out, err = capsys.readouterr()
    assert err == "" and [line.split() for line in out.splitlines()] == [
        ["reproduced", "mla-step-geomean", "1.21x", "1.50x", "step"],
        ["claims:", "1", "reproduced"],
    ]


def test_one_line_a_verdict_in_80_columns(capsys):
    expected = load(ROOT / "expected_results.json").claims
    judged = [claims.Judgement(c, "hardware-unavailable", 36, where="on x", reason="because " * 30) for c in expected]
    console.Terminal().verdicts(judged, "claims: x")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("hardware-unavailable")] == [c.id for c in expected]


def test_the_reason_is_printed_once_for_neighbors_that_share_it(capsys):
    expected = load(ROOT / "expected_results.json").claims[:3]
    console.Terminal().verdicts(
        [claims.Judgement(c, "not-run", reason="same reason") for c in expected], "claims: 3 not-run"
    )
    assert capsys.readouterr().out.count("same reason") == 1


def test_selfcheck_tables_say_what_is_wrong():
    row = {"name": "one-token", "reason": "out[0, 0, 0] is nan", "error_ratio": None, "lse_error": None, "seconds": 0.2}
    built = {
        "kernel": "k.cu",
        "variant": "sm_90a",
        "registers": 128,
        "spill_bytes": 0,
        "shared_bytes": 137088,
        "compiler": "NVRTC 13.0",
    }
    text = printed(*console.selfcheck_tables({"interpreter": [row], "compiled": [built]}))
    assert "out[0, 0, 0] is nan" in text and "137,088" in text and max(map(len, text.splitlines())) <= 80
    assert len(console.selfcheck_tables({"interpreter": [row], "compiled": []})) == 1

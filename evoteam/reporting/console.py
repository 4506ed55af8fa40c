"""What the terminal shows: tables in 80 columns, progress with time left, one line a verdict.

Results go to standard output, progress and notes to standard error. No control codes where the stream is not a
terminal; NO_COLOR is respected (rich does both).
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from evoteam.reporting.claims import Claim, Judgement
from evoteam.reporting.formats import WIDE, number, status

WIDTH = 80
PLAIN_SECONDS = 5.0  # a progress line into a pipe no more often than this
STYLES = {"reproduced": "bold green", "not-reproduced": "bold red", "unstable": "yellow"}


class Terminal:
    """The two streams. `quiet` leaves only the verdicts; `json_only` leaves standard output to the JSON record."""

    def __init__(self, quiet: bool = False, json_only: bool = False):
        self.quiet = quiet
        self.json_only = json_only
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def note(self, text: str) -> None:
        """A line about what is going on, for the person at the terminal."""
        if not self.quiet:
            self.err.print(Text(text), soft_wrap=True)

    def show(self, *renderables) -> None:
        """Results that `--quiet` may leave out."""
        if not self.quiet and not self.json_only:
            self.out.print(*renderables)

    def json(self, record: dict) -> None:
        """The whole record, where it is all that standard output is for."""
        if self.json_only:
            self.out.file.write(json.dumps(record, indent=1) + "\n")

    def verdicts(self, judgements: list[Judgement], last_line: str) -> None:
        """One line a claim, the reasons indented below it, the greppable line last."""
        if self.json_only:
            return
        if not self.quiet:
            self.out.print(Text(f"{'verdict':<20}  {'claim':<23}  {'paper':>11}  {'here':>8}  scope", style="bold"))
        for judgement, following in zip(judgements, [*judgements[1:], None], strict=True):
            self.out.print(_verdict_line(judgement))
            if not self.quiet and (following is None or _details(following) != _details(judgement)):
                for detail in _details(judgement):
                    self.out.print(Padding(Text(detail, style="dim"), (0, 0, 0, 4), expand=False))
        self.out.print(Text(last_line, style="bold"), soft_wrap=True)

    @contextmanager
    def progress(self, label: str) -> Iterator:
        """Gives `step(done, total, detail)`: a bar with the time left, or now and then a line into a pipe."""
        if self.quiet:
            yield lambda done, total, detail="": None
        elif self.err.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, TextColumn("left  {task.fields[detail]}"), console=self.err, transient=True) as bar:
                task = bar.add_task(label, total=None, detail="")
                yield lambda done, total, detail="": bar.update(task, completed=done, total=total, detail=detail)
        else:
            yield _plain_progress(self.err, label)


def _console(stream) -> Console:
    console = Console(file=stream, highlight=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    return console


def _plain_progress(console: Console, label: str):
    start = last = time.monotonic()
    said = 0

    def step(done: int, total: int, detail: str = "") -> None:
        nonlocal last, said
        now = time.monotonic()
        if done > said and (now - last >= PLAIN_SECONDS or done == total):
            last, said = now, done
            left = (now - start) / done * (total - done)
            ending = f", about {left:.0f} s left" if done < total else f" in {now - start:.0f} s"
            console.print(Text(f"{label}: {done} of {total}{ending}  {detail}".rstrip()), soft_wrap=True)

    return step


def _details(judgement: Judgement) -> list[str]:
    return [detail for detail in (judgement.where, judgement.reason) if detail]


def _verdict_line(judgement: Judgement) -> Text:
    claim = judgement.claim
    here = "-" if judgement.measured is None else claim.show(judgement.measured).removesuffix(" of 47")
    line = Text(f"{judgement.verdict:<20}", style=STYLES.get(judgement.verdict, ""))
    line.append(f"  {claim.id:<23}  {claim.published:>11}  {here:>8}  {claim.scope}", style="default")
    line.no_wrap = True
    return line


def _table(title: str | None, *columns: tuple[str, str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_style="bold"
    )
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def workload_table(record: dict) -> Table:
    """One scope's rows: tokens, both times, the backend taken, ratio, share of copy bandwidth, error, spread."""
    title = f"{record['scope']} scope, {record['timer']}, {record['flush']} L2 flush, {record['statistic']} of each row"
    names = ("#", "B", "tokens", "ours us", "FlashInfer us", "ratio", "copy", "error", "spread", "")
    table = _table(title, *((name, "left" if name == "" else "right") for name in names))
    for row in record["rows"]:
        table.add_row(
            str(row["index"]),
            str(row["batch"]),
            f"{row['tokens']:,}",
            number(row["ours_us"], ".1f"),
            f"{number(row['baseline_us'], '.1f')} {row['baseline']}",
            number(row["ratio"], ".2f", "x"),
            number(row["bandwidth_share"], ".0%"),
            number(row["error_ratio"], ".0e"),
            number(row["spread"], ".0%"),
            "" if row["status"] == "ok" else status(row["status"]),
            style={"wrong": "red", "unstable": "yellow"}.get(row["status"]),
        )
    if any(row["status"] == "unstable" for row in record["rows"]):
        table.caption, table.caption_justify, table.caption_style = WIDE, "left", ""
    return table


def scope_summary(record: dict) -> str:
    """Geometric and arithmetic mean, wins, losses and the worst workload, each labelled."""
    summary = record["summary"]
    if summary["geomean"] is None:
        why = (
            f"wrong on workload {summary['wrong']}"
            if summary["wrong"]
            else record["baseline_error"] or "no workload has a ratio"
        )
        return f"no mean: {why}"
    batches = summary["geomean_by_batch"]
    worst = f"worst workload {summary['worst']['index']} at {summary['worst']['ratio']:.2f}x"
    by_batch = "by batch: " + ", ".join(f"B={batch} {value:.2f}x" for batch, value in batches.items()) + "; "
    return (
        f"geometric mean {summary['geomean']:.2f}x, arithmetic mean {summary['arithmetic_mean']:.2f}x, "
        f"faster on {summary['wins']} of {summary['n']}\n"
        f"{by_batch if len(batches) <= 4 else ''}{worst}"
    )


def runs_per_plan_table(record: dict) -> Table:
    """The ratio against how many runs one plan() serves."""
    table = _table("geometric mean by runs per plan", *((str(n), "right") for n in record["runs_per_plan"]))
    table.add_row(*(number(ratio, ".2f", "x") for ratio in record["runs_per_plan"].values()))
    return table


def runs_per_plan_note(record: dict) -> str:
    """At how many runs per plan the paper's figure with plan would follow from its figure without."""
    runs = record["paper_runs_per_plan"]
    found = "at no number of runs per plan" if runs is None else f"at {runs:,.0f} runs per plan"
    return f"A kernel at the paper's 0.96x without plan would reach its 1.21x with plan {found} here."


def comparison_table(comparison: dict) -> Table:
    """This run's geometric means beside the shipped record's."""
    title = f"geometric means here and in the record of {comparison['created'][:10]} on {comparison['device']}"
    table = _table(title, ("measurement", "left"), ("here", "right"), ("record", "right"))
    for row in comparison["rows"]:
        table.add_row(row["measurement"], number(row["now"], ".2f", "x"), number(row["recorded"], ".2f", "x"))
    return table


def arms_table(runs: list[dict], how: str) -> Table:
    """Runs of the arms: what each reached, and what it spent in the budget's unit."""
    names = ("arm", "task", "best", "attempts", "wide rows", "teams", "tokens")
    table = _table(
        f"runs of the arms, {how}", *((name, "left" if name in ("arm", "task") else "right") for name in names)
    )
    for run in runs:
        best = run["best"]["score"] if run["best"] else None
        wide = f"{run['spread']['wide']}/{run['spread']['rows']}"
        counts = (str(len(run["attempts"])), wide, str(len(run["teams"])), f"{run['spend']['tokens']:,.0f}")
        table.add_row(run["arm"], run["task"], number(best, ".2f", "x"), *counts)
    return table


def selfcheck_tables(found: dict) -> list[Table]:
    """What was learned without a GPU: the interpreter's answers and the compilers' figures."""
    checks = _table(
        "on this CPU (Triton kernels in its interpreter), against fp64",
        ("input", "left"),
        ("result", "left"),
        ("error", "right"),
        ("seconds", "right"),
    )
    checks.columns[1].no_wrap = False
    for row in found["interpreter"]:
        style = "red" if row["reason"] else None
        checks.add_row(
            row["name"],
            row["reason"] or "right",
            number(row["error_ratio"], ".1e"),
            number(row["seconds"], ".1f"),
            style=style,
        )
    names = ("registers", "spilled B", "shared B", "compiler")
    compiled = _table("compiled for sm_90", ("kernel, variant", "left"), *((name, "right") for name in names))
    compiled.columns[0].no_wrap = False
    for row in found["compiled"]:
        sizes = (number(row[key], ",.0f") for key in ("registers", "spill_bytes", "shared_bytes"))
        compiled.add_row(f"{row['kernel']}, {row['variant']}", *sizes, row["compiler"])
    return [checks, compiled] if found["compiled"] else [checks]


def kda_table(part: dict) -> Table:
    """One kind of evidence about KDA prefill (evoteam.reporting.kda.view)."""
    left = ("case", "kernel", "for", "heads x tokens", "result")
    table = _table(part["title"], *((name, "left" if name in left else "right") for name in part["columns"]))
    for row in part["rows"]:
        table.add_row(*row, style="red" if row[-1] == "wrong" else None)
    return table


def claim_list(claims: tuple[Claim, ...]) -> Table:
    """What `--list` prints: every claim with its mode and how it is judged."""
    table = _table(
        None, ("mode", "left"), ("claim", "left"), ("paper", "right"), ("judged", "left"), ("hardware", "left")
    )
    for claim in claims:
        table.add_row(claim.mode, claim.id, claim.published, claim.judge, claim.hardware or "not named")
    return table

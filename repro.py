"""Checks the kernel claims of "Evolving Agent Teams" on this machine and says which of them hold."""

import json
import math
import secrets
import signal
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are loaded, Ctrl-C ends it without a traceback

import click

from evoteam.reporting import claims, process, record
from evoteam.reporting.console import Terminal, claim_list
from evoteam.reporting.expected import ClaimsError, load
from evoteam.reporting.formats import finite

EXPECTED = Path(__file__).with_name("expected_results.json")
EXIT_STATUS = """\b
Exit status: 2 for a wrong command, or if there is no report; else 1 if a claim
is not reproduced; else, with --strict, 3 if a claim could not be judged here;
else 0."""


@click.command(epilog=EXIT_STATUS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--mode", type=click.Choice([*claims.MODES, "all"]), default="all", show_default=True, help="Which claims."
)
@click.option(
    "--kernel",
    default="mla_paged_decode",
    show_default=True,
    metavar="NAME|FILE.py:FUNC",
    help="Kernel to judge: one that ships here, or a function of your own file.",
)
@click.option(
    "--workloads",
    default="all",
    show_default=True,
    metavar="CHOICE",
    help="all, feedback, family:6, or numbers as in 1,5,9. Only all can judge a claim.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="FlashInfer-Trace checkout to take page tables from.",
)
@click.option(
    "--out",
    callback=lambda context, parameter, value: _folder(value),
    default="repro-report",
    show_default=True,
    metavar="DIR",
    help="Folder for report.json and report.html.",
)
@click.option("--json", "json_only", is_flag=True, help="Print report.json instead of tables.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the inputs.  [default: from the system]")
@click.option("--live", is_flag=True, help="Run the arms of same-budget or fixed-team afresh.")
@click.option("--model", help="With --live: a model's name, or mailbox.")
@click.option(
    "--budget-tokens",
    type=click.FloatRange(min=0, min_open=True),
    help="With --live: input-equivalent tokens of each arm.",
)
@click.option("--task", help="With --live: what to optimize, such as mla-paged-decode-cpu.")
@click.option("--agent", metavar="NAME|FILE", help="With --live: command line that writes, as in `evoteam run`.")
@click.option("--strict", is_flag=True, help="Exit 3 if a claim could not be judged here.")
@click.option("--quiet", is_flag=True, help="Print one line a claim, nothing else.")
@click.option("--list", "list_only", is_flag=True, help="List the claims and exit.")
@click.pass_context
def main(context, mode, kernel, workloads, trace, out, json_only, seed, strict, quiet, list_only, **live_options):
    """Measure the kernel claims of "Evolving Agent Teams" on this machine and say which hold.

    Without a GPU the shipped measurements are shown, the kernel is checked in Triton's interpreter and
    compiled for sm_90.
    """
    terminal = Terminal(quiet, json_only)
    expected = _usage("expected_results.json", load, ClaimsError, EXPECTED)
    chosen = tuple(claim for claim in expected.claims if mode in (claim.mode, "all"))
    if list_only:
        terminal.out.print(claim_list(chosen))
        return
    live = _live(mode, out, **live_options)
    folder = out.absolute()  # a kernel may change the working directory
    try:
        from evoteam.reporting import parts, report

        session = _session(terminal, chosen, kernel, workloads, trace, seed)
        _usage("--out", record.prepare, record.RecordError, folder)
        terminal.note(f"report: {out}/report.json, {out}/report.html")
        parts.run(session, live)
    except KeyboardInterrupt:
        terminal.note("interrupted: no report was written")
        context.exit(process.INTERRUPTED)

    judgements = [
        claims.judge(claim, session.evidence.get(claim.id, claims.Evidence(claims.NOT_RUN))) for claim in chosen
    ]
    last_line = claims.summary_line(judgements)
    full = finite(
        session.report
        | {
            "paper": expected.paper,
            "sources": expected.sources,
            "caveats": expected.caveats,
            "claims": [judgement.to_json() for judgement in judgements],
            "summary": last_line,
        }
    )
    unwritten = [record.save(folder / "report.json", json.dumps(full, indent=1, ensure_ascii=False))]
    terminal.json(full)
    terminal.verdicts(judgements, last_line)
    unwritten.append(record.save(folder / "report.html", report.render(full, _views(full))))
    if any(unwritten):
        raise Unwritten("; ".join(filter(None, unwritten)))
    context.exit(claims.exit_status(judgements, strict))


class Unwritten(click.ClickException):
    """A file of the report could not be written."""

    exit_code = 2


def _session(terminal, chosen, kernel, workloads, trace, seed):
    """What the command line chose, checked and loaded."""
    from evoteam.reporting import mla
    from evoteam.reporting.session import Session
    from kernels import flashinfer_trace, selection

    process.reserve_stdout()
    seed = secrets.randbits(32) if seed is None else seed
    session = Session(
        claims=chosen,
        workloads=_usage("--workloads", selection.select_workloads, selection.SelectionError, workloads),
        tables=trace and _usage("--trace", flashinfer_trace.load_page_tables, flashinfer_trace.TraceError, trace),
        seed=seed,
        terminal=terminal,
        report=record.begin(record.command_line(), tuple(dict.fromkeys(claim.mode for claim in chosen)), seed),
        kernel=None,
    )
    if set(session.modes) & set(mla.SCOPE_OF):
        session.kernel = _usage("--kernel", selection.load_kernel, selection.KernelError, kernel)
        session.report["kernel"] = session.kernel.to_json()
    return session


def _folder(name):
    if not name:
        raise click.BadParameter("is empty; give the folder to write to")
    try:
        Path(name).absolute()
    except OSError as error:
        raise click.BadParameter(f"the working directory cannot be read: {error.strerror}") from error
    return Path(name)


def _live(mode, out, live, model, budget_tokens, task, agent):
    """The checked options of a live run, None without `--live`."""
    from evoteam.reporting.arms import ARMS, Live

    options = {"--model": model, "--budget-tokens": budget_tokens, "--task": task, "--agent": agent}
    given = [name for name, value in options.items() if value]
    if not live:
        if given:
            raise click.UsageError(f"{' and '.join(given)} can be given only with --live")
        return None
    if mode not in ARMS:
        raise click.UsageError(f"--live needs --mode {' or '.join(ARMS)}, and it is {mode}")
    if not model or not task or not budget_tokens or not math.isfinite(budget_tokens):
        raise click.UsageError("--live needs --model NAME (or mailbox), --budget-tokens N and --task NAME")
    if agent == "codex" and mode != "fixed-team":
        raise click.UsageError("--agent codex makes the row of one Codex agent, which stands in --mode fixed-team")
    return Live(model, budget_tokens, task, out / "runs", agent or "")


def _views(full):
    """The page's sections on searches, by task, where there are any."""
    if not full["runs"]:
        return []
    from evoteam.reporting.run_report import views

    tasks = dict.fromkeys(run["task"] for run in full["runs"])
    return [view for task in tasks for view in views([run for run in full["runs"] if run["task"] == task])]


def _usage(name, call, error_type, *arguments):
    """`call(*arguments)`, its error turned into one line and exit status 2."""
    try:
        return call(*arguments)
    except error_type as error:
        raise click.UsageError(f"{name}: {error}") from error


def _status():
    """Exit status of the command. What ends it otherwise, SystemExit of a kernel too, is passed on."""
    try:
        return main(prog_name="repro.py", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return process.INTERRUPTED


if __name__ == "__main__":
    process.run(_status)

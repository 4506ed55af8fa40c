"""The command line of `python -m evoteam`."""

import errno
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from evoteam.journal import JOURNAL, FolderError

ARMS = ("evolving", "single", "fixed-four")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
FOLDER = click.Path(file_okay=False, path_type=Path)


class Stopped(click.ClickException):
    """The command cannot go on; one message, exit status 1, or 130 after an interrupt."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: Any = None) -> None:
        click.echo(f"evoteam: {self.message}", err=True)


class Commands(click.Group):
    """Whatever a user can do something about ends every command with one message."""

    def invoke(self, ctx: click.Context) -> Any:
        with _clear_errors():
            return super().invoke(ctx)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Teams of agents that write kernels, and a supervisor that rewrites the team when work stalls."""


@main.command()
@click.option("--folder", type=FOLDER, required=True, help="Run folder; everything is written there.")
@click.option("--task", help="What to optimize, such as mla-paged-decode-cpu.")
@click.option(
    "--arm",
    type=click.Choice(ARMS),
    default="evolving",
    show_default=True,
    help="The team, and whether it may be revised.",
)
@click.option("--model", help="A model's name, `mailbox`, or `scripted:FILE`.")
@click.option(
    "--agent",
    metavar="NAME|FILE",
    help="Command line that sits in every role that writes candidates: claude-code, codex, or a file that describes one. "
    "[default: the tool loop]",
)
@click.option("--budget-tokens", type=float, help="Ceiling in input-equivalent tokens.")
@click.option("--budget-dollars", type=float, help="Ceiling in dollars; needs a model with a known price.")
@click.option(
    "--effort", type=click.Choice(EFFORTS), help="Effort asked of the model, for every role. [default: the provider's]"
)
@click.option(
    "--evaluate-by",
    type=click.Choice(["here", "mailbox"]),
    default="here",
    show_default=True,
    help="Where verdicts are made.",
)
@click.option("--base-url", help="A server that speaks the Messages API. [default: ANTHROPIC_BASE_URL]")
@click.option("--no-stream", is_flag=True, help="Ask for whole answers, for servers that cannot stream.")
@click.option("--unsafe", is_flag=True, help="Evaluate without confinement where none works.")
@click.option("--resume", is_flag=True, help="Go on with the run in --folder.")
def run(folder: Path, resume: bool, unsafe: bool, base_url: str | None, no_stream: bool, **chosen: Any) -> None:
    """Run one arm: a team works on a task until its budget is used."""
    from evoteam.memory import SharedFolder
    from evoteam.search import Search

    with _clear_errors(folder, resume):
        config = SharedFolder.read(folder).state.config if resume else _configuration(**chosen)
        task, sessions = _task(config["task"]), _sessions(config, base_url, unsafe)
        model = _model(config, folder, base_url, not no_stream)
        with SharedFolder.open(folder, None if resume else config) as shared, _judge(config, unsafe) as judge:
            Search(shared, model, judge, task, say=click.echo, sessions=sessions).run()
            click.echo(_ending(shared.state))


def _configuration(
    task: str | None,
    arm: str,
    model: str | None,
    budget_tokens: float | None,
    budget_dollars: float | None,
    **rest: Any,
) -> dict:
    from evoteam.budget import Budget, BudgetError
    from evoteam.search import configuration

    missing = [name for name, value in (("--task", task), ("--model", model)) if not value]
    if missing:
        raise click.UsageError(f"a new run needs {' and '.join(missing)}; --resume goes on with the one in --folder")
    _task(task)
    if rest["agent"] and (model == "mailbox" or model.startswith("scripted:")):
        raise click.UsageError(f"--agent needs the name of the model that its command line asks; --model is {model}")
    try:
        return configuration(
            task=task, arm=arm, model=model, budget=Budget(budget_tokens, budget_dollars), effort=rest["effort"] or "",
            evaluate_by=rest["evaluate_by"], agent=_agent(rest["agent"]),
        )  # fmt: skip
    except BudgetError as error:
        raise click.UsageError(str(error)) from None


def _task(name: str) -> Any:
    from kernels.tasks import TaskError, load_task

    try:
        return load_task(name)
    except TaskError as error:
        raise click.UsageError(str(error)) from None


def _agent(name: str | None) -> dict | None:
    from evoteam.sessions.agents import AgentError, load

    try:
        return load(name).with_version().model_dump(mode="json") if name else None
    except AgentError as error:
        raise click.UsageError(str(error)) from None


def _sessions(config: dict, base_url: str | None, unsafe: bool) -> Any:
    if "agent" not in config:
        return None
    from evoteam.judging.sandbox import SandboxError
    from evoteam.sessions.agents import Agent, AgentError
    from evoteam.sessions.live import LiveSessions

    try:
        return LiveSessions(Agent.model_validate(config["agent"]), config["model"], base_url=base_url, unsafe=unsafe)
    except (AgentError, SandboxError) as error:
        raise Stopped(str(error)) from None


def _model(config: dict, folder: Path, base_url: str | None, stream: bool) -> Any:
    name = config["model"]
    if name == "mailbox":
        from evoteam.mailbox import MailboxModel

        return MailboxModel(folder / "mailbox", say=click.echo)
    from evoteam.llm import ScriptedModel

    if name.startswith("scripted:"):
        return ScriptedModel.load(Path(name.removeprefix("scripted:")))
    if "agent" in config and config["arm"] == "single":
        return ScriptedModel({})  # its one role is sat by the agent; no other is ever asked
    from evoteam.anthropic_model import AnthropicModel

    return AnthropicModel(name, base_url=base_url, stream=stream)


def _judge(config: dict, unsafe: bool) -> Any:
    from evoteam.judges import LocalJudge
    from evoteam.judging.evaluator import evaluator_sha256, task_sha256
    from evoteam.mailbox import MailboxJudge

    task = config["task"]
    if config["evaluate_by"] == "here":
        return LocalJudge(task, unsafe=unsafe)
    hashes = {"task_sha256": task_sha256(task), "evaluator_sha256": evaluator_sha256()}
    return nullcontext(MailboxJudge(task, hashes, say=click.echo))


class _clear_errors:
    """Errors that a user can do something about become one message. `folder`, `resume`: the run that is worked on."""

    def __init__(self, folder: Path | None = None, resume: bool = False):
        self.folder = folder
        self.another = not resume and self._begun()  # a run that is none of this command's

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        from evoteam.judging.evaluator import EvaluationError
        from evoteam.llm import ProviderError

        kept = "the run is kept: go on with --resume and the same --folder" if self._kept() else ""
        if isinstance(error, KeyboardInterrupt):
            raise Stopped("; ".join(filter(None, ["interrupted", kept])), 130) from None
        if isinstance(error, (EvaluationError, ProviderError)):
            raise Stopped("\n".join(filter(None, [str(error), kept]))) from None
        if isinstance(error, FolderError):
            raise Stopped(str(error)) from None
        if isinstance(error, OSError) and error.errno != errno.EPIPE:
            what = f"use {error.filename}" if error.filename else "go on"
            raise Stopped("\n".join(filter(None, [f"cannot {what}: {error.strerror or error}", kept]))) from None

    def _begun(self) -> bool:
        return self.folder is not None and os.path.exists(self.folder / JOURNAL)

    def _kept(self) -> bool:
        return self._begun() and not self.another


def _ending(state: Any) -> str:
    from evoteam.digest import count

    total, best = state.ledger.total, state.best
    found = f"best {best.id}: {best.score:.3f}" if best else "nothing valid was found"
    used = f"{total.tokens:,.0f} tokens, {count(total.evaluations, 'evaluation')}, {count(len(state.tenures), 'team')}"
    return f"ended ({state.end['reason']}): {found}; {used}"


@main.command()
@click.argument("folder", type=FOLDER)
@click.option("--watch", is_flag=True, help="Print again whenever something changed, until the run ends.")
def status(folder: Path, watch: bool) -> None:
    """How a run stands: best, tokens, team, last diagnosis."""
    from evoteam.memory import SharedFolder
    from evoteam.summary import status_text

    shown = ""
    while True:
        shared = SharedFolder.read(folder)
        text = status_text(shared)
        if text != shown:
            click.echo(text + ("\n" if watch else ""))
            shown = text
        if not watch or shared.state.end:
            return
        time.sleep(2)


@main.command()
@click.argument("folder", type=FOLDER)
def teams(folder: Path) -> None:
    """The lineage of a run: every team, what caused it, what it changed and achieved."""
    from evoteam.memory import SharedFolder
    from evoteam.summary import teams_text

    click.echo(teams_text(SharedFolder.read(folder).state))


@main.command()
@click.argument("folders", nargs=-1, required=True, type=FOLDER)
@click.option("--out", type=FOLDER, help="Folder to write to. [default: the first run's]")
def report(folders: tuple[Path, ...], out: Path | None) -> None:
    """Write report.html and report.json of a run, or of several arms side by side."""
    from evoteam.reporting.record import RecordError
    from evoteam.reporting.run_report import write

    try:
        click.echo(write(folders, out or folders[0]))
    except RecordError as error:
        raise Stopped(str(error)) from None


@main.command()
@click.argument("folder", type=FOLDER)
@click.option("--remeasure", is_flag=True, help="Recorded answers, fresh evaluations.")
@click.option("--into", type=FOLDER, help="Keep the new run here. [default: thrown away]")
@click.option("--unsafe", is_flag=True, help="Evaluate without confinement where none works.")
def replay(folder: Path, remeasure: bool, into: Path | None, unsafe: bool) -> None:
    """Run a recorded run again from its recorded answers and say whether every decision is the same."""
    from evoteam.replay import replay as again

    target = into or Path(tempfile.mkdtemp(prefix="evoteam-replay-"))
    try:
        outcome = again(folder, target, remeasure=remeasure, unsafe=unsafe)
    finally:
        if into is None:
            shutil.rmtree(target, ignore_errors=True)
    click.echo(outcome.text)
    if not outcome.equal and not remeasure:
        sys.exit(1)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--task", required=True, help="Task to judge by.")
@click.option("--full", is_flag=True, help="All workloads, not only those that a run's agents see.")
@click.option("--unsafe", is_flag=True, help="Evaluate without confinement where none works.")
def evaluate(paths: tuple[Path, ...], task: str, full: bool, unsafe: bool) -> None:
    """Judge source files, or attempt folders (kernel.py inside; verdict.json is written beside it)."""
    from evoteam.digest import verdict_digest
    from evoteam.judging.evaluator import Evaluator, read_source
    from evoteam.judging.files import write_atomically

    _task(task)
    sources = [path / "kernel.py" if path.is_dir() else path for path in paths]
    for source in sources:
        read_source(source)
    failed = False
    with Evaluator(task, unsafe=unsafe) as evaluator:
        for number, (path, source) in enumerate(zip(paths, sources), 1):
            with nullcontext(path) if path.is_dir() else tempfile.TemporaryDirectory() as attempt_dir:
                verdict = evaluator.evaluate(source, Path(attempt_dir), full=full, more=number < len(paths))
            failed |= bool(verdict.failure)
            click.echo(verdict_digest(str(path), verdict.to_json()))
            if path.is_dir():
                write_atomically(path / "verdict.json", json.dumps(verdict.to_json(), indent=1) + "\n")
    sys.exit(1 if failed else 0)


@main.command("new-task")
@click.argument("name")
def new_task(name: str) -> None:
    """Write a working task to start from: definition, reference, workloads, baseline and tests."""
    from evoteam.new_task import NewTaskError, create

    root = Path(__file__).resolve().parents[1]
    try:
        written = create(name, root)
    except NewTaskError as error:
        raise click.UsageError(str(error)) from None
    for path in written:
        click.echo(f"wrote {path.relative_to(root)}")
    click.echo(f"try it: python -m pytest {written[1].relative_to(root)} (pytest comes with the extra `test`)")

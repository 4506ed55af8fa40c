"""The command line: every subcommand, and one clear message for every wrong use."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoteam import cli, replay
from evoteam.llm import ProviderError, ScriptedModel
from evoteam.memory import SharedFolder
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.test_search import evolving_script, revise
from tests.evoteam.toy import TASK, ToyJudge, events, run, settings, use

ROOT = Path(__file__).parents[2]


def command(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture
def toy(monkeypatch):
    """The command line on the toy task and its judge."""
    monkeypatch.setattr(cli, "_task", lambda name: TASK)
    monkeypatch.setattr(replay, "load_task", lambda name: TASK)
    monkeypatch.setattr(cli, "_judge", lambda config, unsafe: cli.nullcontext(ToyJudge()))


def script(tmp_path, answers):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(answers))
    return f"scripted:{path}"


def test_run_status_teams_and_replay(tmp_path, toy):
    folder = tmp_path / "r"
    model = script(tmp_path, evolving_script([revise()]).answers)
    done = command("run", "--folder", folder, "--task", "toy", "--model", model, "--budget-tokens", "1e6")
    assert done.exit_code == 0, done.output
    assert (
        "turn0001 writer: finished, 1 attempts" in done.output
        and "supervisor: revise: they gave split-kv up" in done.output
    )
    assert "ended (answers): best a0006: 3.000" in done.output and "2 teams" in done.output

    status = command("status", folder).output
    assert "best       3.000 by a0006 (repairer, t0002)" in status
    assert (
        "diagnosis  round 3, revise: they gave split-kv up after two failures" in status
        and "ended      answers" in status
    )

    teams = command("teams", folder).output
    first, second = teams.split("\n\n")
    assert (
        first.startswith("t0001, the first team\n  role     writer: ") and "  order    writer, then critic\n" in first
    )
    assert "  worked   3 rounds (1 to 3), " in first and "  attempts 5, 3 valid\n" in first
    assert "  best     nothing valid before, 1.002 after" in first
    assert second.startswith("t0002, made of t0001\n  because: they gave split-kv up after two failures\n")
    assert "+ role repairer: Repair split-kv from a0002; change nothing else." in second and "- role critic" in second
    assert "  attempts 1, 1 valid\n  best     1.002 before, 3.000 after" in second

    again = command("replay", folder)
    assert again.exit_code == 0 and "decisions are the recorded ones; best score 3.000" in again.output
    assert (
        command("replay", folder, "--into", tmp_path / "kept").exit_code == 0
        and SharedFolder.read(tmp_path / "kept").state.end
    )
    assert "already holds a run" in command("replay", folder, "--into", tmp_path / "kept").output

    before = (folder / "events.jsonl").read_bytes()
    again = command("run", "--folder", folder, "--resume")
    assert (
        "ended (answers)" in again.output and again.exit_code == 0 and (folder / "events.jsonl").read_bytes() == before
    )


def test_status_of_a_run_that_waits_for_the_mailbox_names_the_file(tmp_path):
    from evoteam.mailbox import MailboxModel

    class Gone(Exception):
        pass

    def leave(line):
        raise Gone

    with pytest.raises(Gone):
        run(tmp_path / "r", MailboxModel(tmp_path / "r" / "mailbox", say=leave))
    status = command("status", tmp_path / "r").output
    assert "now        turn0001 of engineer, call 1" in status and "turn0001.01-engineer.request.md" in status


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["run", "--folder", "r"], "a new run needs --task and --model", 2),
        (
            ["run", "--folder", "r", "--task", "nope", "--model", "mailbox", "--budget-tokens", "9"],
            "there is no task 'nope'",
            2,
        ),
        (["run", "--folder", "r", "--task", "mla-paged-decode-cpu", "--model", "mailbox"], "a run needs a ceiling", 2),
        (
            ["run", "--folder", "r", "--task", "mla-paged-decode-cpu", "--model", "mailbox", "--budget-dollars", "1"],
            "no price is known",
            2,
        ),
        (["run", "--folder", "r", "--resume"], "is not a run folder", 1),
        (
            [
                "run",
                "--folder",
                "r",
                "--task",
                "mla-paged-decode-cpu",
                "--model",
                "claude-sonnet-5-5",
                "--budget-tokens",
                "1e6",
            ],
            "ANTHROPIC_API_KEY is not set",
            1,
        ),
        (
            [
                "run",
                "--folder",
                "r",
                "--task",
                "mla-paged-decode-cpu",
                "--model",
                "scripted:none.json",
                "--budget-tokens",
                "1e6",
            ],
            "cannot read the script none.json",
            1,
        ),
        (["status", "r"], "is not a run folder", 1),
        (["teams", "r"], "is not a run folder", 1),
        (["replay", "r"], "is not a run folder", 1),
        (["evaluate", "missing.py", "--task", "mla-paged-decode-cpu"], "does not exist", 2),
    ],
)
def test_a_wrong_command_gets_one_clear_message(tmp_path, monkeypatch, arguments, message, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    done = command(*arguments)
    assert message in done.output and done.exit_code == code and "Traceback" not in done.output


def test_a_model_that_cannot_be_had_leaves_no_run_behind(tmp_path, monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    arguments = [
        "run",
        "--folder",
        tmp_path / "r",
        "--task",
        "mla-paged-decode-cpu",
        "--model",
        "m",
        "--budget-tokens",
        "1e6",
    ]
    assert command(*arguments).exit_code == 1 and not (tmp_path / "r").exists()


def test_over_http_from_the_command_line_and_resumed_after_a_provider_failure(tmp_path, toy, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted")
    monkeypatch.setattr("evoteam.anthropic_model.TRIES", 1)
    answers = [("answer", [use("write_kernel", source="SPEED = 2.0\n", idea="i") | {"id": "x"}]), ("status", (400, {}))]
    folder = tmp_path / "r"
    with serve(MessagesServer(answers)) as url:
        start = [
            "run",
            "--folder",
            folder,
            "--task",
            "toy",
            "--arm",
            "single",
            "--model",
            "claude-sonnet-5-5",
            "--budget-tokens",
            "2e4",
        ]
        stopped = command(*start, "--base-url", url, "--effort", "high")
        assert stopped.exit_code == 1 and "HTTP 400" in stopped.output and "--resume" in stopped.output
        done = command("run", "--folder", folder, "--resume", "--base-url", url, "--no-stream")
    assert done.exit_code == 0 and SharedFolder.read(folder).state.best.score == 2.0
    assert len(events(folder, "provider")) == 1


HEAVY = "[name for name in ('pydantic', 'anthropic', 'torch', 'numpy') if name in sys.modules]"
EVALUATE = f"""
import sys
from click.testing import CliRunner
from evoteam import cli
done = CliRunner().invoke(cli.main, ["evaluate", *sys.argv[1:], "--task", "mla-paged-decode-cpu"])
print(done.output, done.exit_code, {HEAVY})
"""


def test_the_help_needs_nothing_heavy():
    command = [sys.executable, "-c", f"import sys, evoteam.cli; print({HEAVY})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_evaluate_loads_neither_pydantic_nor_anthropic_nor_torch_here(tmp_path):
    (tmp_path / "bad.py").write_text("import evoteam\n")
    (tmp_path / "a0001").mkdir()
    (tmp_path / "a0001" / "kernel.py").write_text("def wrong(:\n")
    command = [sys.executable, "-c", EVALUATE, tmp_path / "bad.py", tmp_path / "a0001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("1 []"), done.stdout + done.stderr
    assert done.stdout.count("failed in phase screen") == 2
    verdict = json.loads((tmp_path / "a0001" / "verdict.json").read_text())
    assert verdict["failure"] == "screen" and len(verdict["source_sha256"]) == 64


def test_an_interrupt_keeps_the_run(tmp_path, toy, monkeypatch):
    def interrupted(self, request):
        raise KeyboardInterrupt

    monkeypatch.setattr(ScriptedModel, "ask", interrupted)
    done = command(
        "run",
        "--folder",
        tmp_path / "r",
        "--task",
        "toy",
        "--arm",
        "single",
        "--model",
        script(tmp_path, {}),
        "--budget-tokens",
        "1e6",
    )
    assert done.exit_code == 130
    assert done.output == "evoteam: interrupted; the run is kept: go on with --resume and the same --folder\n"
    monkeypatch.undo()
    assert SharedFolder.read(tmp_path / "r").state.talk


RUN = ["run", "--folder", "r", "--task", "mla-paged-decode-cpu", "--arm", "single", "--budget-tokens", "1e5", "--model"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"5", "is int, wanted an object that holds a list of answers for each role"),
        (b"[]", "is list, wanted an object"),
        (b'{"writer": 5}', "has int for 'writer', wanted an object that holds a list of answers"),
        (b"writer: []", "it is not JSON (Expecting value"),
        (b"[" * 200_000, "it is not JSON (maximum recursion depth exceeded"),
        (b'{"writer": ["\xe9"]}', "it is not JSON ('utf-8' codec can't decode byte 0xe9"),
        (None, "it is a folder, wanted a regular file"),
    ],
)
def test_a_script_that_cannot_be_used_is_one_clear_line_and_no_run(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("script").mkdir() if content is None else Path("script").write_bytes(content)
    done = command(*RUN, "scripted:script")
    assert message in done.output and (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "--resume" not in done.output and not Path("r").exists()


@pytest.mark.parametrize("value", ["inf", "nan", "1e400", "-1", "0"])
@pytest.mark.parametrize("ceiling", ["tokens", "dollars"])
def test_a_ceiling_is_a_finite_number_above_zero(tmp_path, value, ceiling):
    options = ["--task", "mla-paged-decode-cpu", "--model", "claude-sonnet-5-5", f"--budget-{ceiling}={value}"]
    done = command("run", "--folder", tmp_path / "r", *options)
    assert done.exit_code == 2 and f"the ceiling for {ceiling} is" in done.output
    assert "wanted a number above 0, and finite" in done.output and not (tmp_path / "r").exists()


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        [*RUN[:2], LONG, *RUN[3:], "scripted:script"],
        [*RUN, f"scripted:{LONG}"],
        ["run", "--resume", "--folder", LONG],
        ["status", LONG],
        ["teams", LONG],
        ["report", LONG],
        ["report", "recorded", "--out", LONG],
        ["replay", LONG],
        ["replay", "recorded", "--into", LONG],
        ["new-task", LONG],
    ],
)
def test_a_path_that_is_too_long_is_one_clear_line(tmp_path, toy, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("script").write_text("{}")
    run(Path("recorded"), ScriptedModel({"engineer": []}))
    done = command(*arguments)
    assert done.exit_code == 1 and "File name too long" in done.output and done.output.count("\n") == 1


def test_what_a_run_leaves_is_offered_only_where_it_has_begun(tmp_path, toy, monkeypatch):
    def fails(self, request):
        raise ProviderError("no answer")

    monkeypatch.setattr(ScriptedModel, "ask", fails)
    arguments = ["run", "--folder", tmp_path / "r", "--task", "toy", "--arm", "single", "--budget-tokens", "1e5"]
    kept = "the run is kept: go on with --resume and the same --folder"
    assert kept not in command(*arguments, "--model", "scripted:missing").output
    assert kept in command(*arguments, "--model", script(tmp_path, {})).output
    assert kept not in command(*arguments, "--model", "scripted:missing").output  # this command's run has not begun
    assert kept in command("run", "--folder", tmp_path / "r", "--resume").output


@pytest.mark.parametrize("name", ["status", "evaluate"])
def test_an_interrupt_ends_any_command_with_one_line(tmp_path, name):
    with SharedFolder.open(tmp_path / "r", settings()):
        pass
    (tmp_path / "slow.py").write_text("import time\ndef mla_paged_decode(*_):\n    time.sleep(3600)\n")
    arguments = {
        "status": ["status", "--watch", tmp_path / "r"],
        "evaluate": ["evaluate", tmp_path / "slow.py", "--task", "mla-paged-decode-cpu"],
    }[name]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "evoteam", *map(str, arguments)], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        if name == "status":
            assert process.stdout.readline()
        else:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("evoteam-????????")) and time.monotonic() < deadline:
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "evoteam: interrupted\n")
    assert not list(tmp_path.glob("evoteam-????????"))  # the candidate's folder has gone with it


def test_evaluate_replaces_links_and_leaves_their_targets_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.py").write_text("def decode(): ...\n")
    for name in ("log.txt", "verdict.json"):
        (tmp_path / "a" / name).symlink_to("../precious")
    (tmp_path / "b" / "verdict.json").mkdir(parents=True)
    (tmp_path / "b" / "kernel.py").write_text("def decode(): ...\n")
    done = command("evaluate", tmp_path / "a", tmp_path / "b", "--task", "mla-paged-decode-cpu")
    assert done.output.count("the source does not define mla_paged_decode; it defines decode") == 2
    assert done.exit_code == 1 and f"cannot use {tmp_path / 'b' / 'verdict.json'}: Is a directory" in done.output
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((tmp_path / "a" / "verdict.json").read_text())["failure"] == "screen"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["kernel.py", "log.txt", "verdict.json"]
    assert not any(path.is_symlink() for path in (tmp_path / "a").iterdir())


def test_evaluate_of_no_source_file_starts_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "pipe", "it is a pipe"),
        ("/dev/zero", "it is a device"),
        (tmp_path, "No such file"),
    ):
        start = time.monotonic()
        done = command("evaluate", path, "--task", "mla-paged-decode-cpu")
        assert done.exit_code == 1 and words in done.output and done.output.count("\n") == 1
        assert time.monotonic() - start < 5


def test_a_gpu_task_without_a_gpu_is_one_clear_message(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "kernel.py").write_text("def mla_paged_decode(*arguments): ...\n")
    done = command("evaluate", tmp_path / "kernel.py", "--task", "mla-paged-decode")
    assert done.exit_code == 1
    assert "task mla-paged-decode is judged on a GPU and none is here" in done.output and "Traceback" not in done.output

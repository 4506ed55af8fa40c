"""What a session may and may not do at its door, with a small stand-in for a command line."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest

from evoteam import replay
from evoteam.judging import sandbox
from evoteam.llm import ProviderError, ScriptedModel
from evoteam.memory import SharedFolder
from evoteam.sessions import agents
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.sitting import MODEL, say, sit, stand_in
from tests.evoteam.test_cli import command, toy  # noqa: F401
from tests.evoteam.test_sessions import living
from tests.evoteam.toy import FINISH, TASK, ToyJudge, events


def session(tmp_path, code, answers=(), tokens=30_000, judge=None, **more):
    """One session that does `code`; the run's folder, what the session printed, and its server."""
    server = MessagesServer(answers, last=say())
    agent = stand_in(tmp_path, dedent(code) + "\nwhile True: ask()\n", **more)
    with serve(server) as url:
        folder = sit(tmp_path / "r", agent, url, tokens=tokens, judge=judge)
    return folder, (folder.path / "sessions" / "turn0001.log").read_text(), server


def test_the_limits_of_the_tool_loop_hold_in_a_session(tmp_path):
    code = """
    for speed in (1, 1, 2, 3, 4):
        open("k.py", "w").write(f"SPEED = {speed}\\n")
        run("evaluate", "k.py", "--idea", f"speed {speed}", "--base", "a0001" if speed > 1 else "")
    run("evaluate", "k.py", "--idea", "x", "--base", "a0099")
    run("note", "x", "--evidence", "a0099")
    run("read", "attempts/a0002/kernel.py")
    run("read", "../../../etc/passwd")
    run("evaluate", "k.py", "--idea", "")
    """
    judge = ToyJudge()
    folder, printed, _ = session(tmp_path, code, judge=judge)
    state = folder.state
    assert judge.asked == ["a0001", "a0002", "a0003"] and state.attempts["a0003"].base == "a0001"
    assert len(state.repeats) == 1 and "same program as a0001 (1.000x); it was not evaluated again" in printed
    assert "all 3 evaluations of this turn are used" in printed and "no attempt 'a0099' that you can see" in printed
    assert "evidence must be ids of attempts" in printed and not state.notes
    assert "SPEED = 2\n" in printed and "root:" not in printed and "readable are attempts/<id>/kernel.py" in printed
    assert "idea: String should have at least 1 character" in printed


def test_a_call_of_another_model_or_without_the_secret_is_refused_and_server_side_tools_are_taken_out(tmp_path):
    code = """
    print(ask(model="another"))
    print(ask(max_tokens=-5, tools=[{"name": "mine", "input_schema": {}}, {"type": "web_search_20250305"}], mcp_servers=[1]))
    os.environ["MODEL_URL"] = os.environ["MODEL_URL"].rpartition("/")[0]
    print(ask())
    os.environ["MODEL_URL"] += "/" + "0" * 32
    print(ask())
    sys.exit()
    """
    folder, printed, server = session(tmp_path, code, tokens=12_000)
    assert "400" in printed and f"this run is answered by {MODEL}, not by another" in printed
    assert printed.count("404 ") == 2 and folder.state.turns[0].reason == "finished"
    assert {r["model"] for r in server.requests} == {MODEL}
    body = server.requests[1]
    assert body["tools"] == [{"name": "mine", "input_schema": {}}] and "mcp_servers" not in body
    assert 0 < body["max_tokens"] <= 16_000


@pytest.mark.parametrize(
    ("answer", "kind", "error"),
    [
        (("cut", [{"type": "text", "text": "w" * 4_000}]), "provider", "the answer broke off"),
        (("reset", [{"type": "text", "text": "w" * 4_000}]), "provider", "Error"),
        (("error", None), "provider", "too busy"),
        (("status", (503, {})), "provider", "HTTP 503"),
    ],
)
def test_an_answer_that_breaks_off_is_charged_for_what_was_seen(tmp_path, answer, kind, error):
    folder, _, _ = session(tmp_path, "", [("answer", say()), answer])
    (failure,) = events(folder.path, kind)
    assert error in failure["error"] and failure["key"] == "turn0001.02"
    charged = failure["usage"]
    assert charged["estimated"] == (answer[0] != "status")
    assert charged["output"] >= {"cut": 1_000, "reset": 1}.get(answer[0], 0)
    assert bool(charged["cache_write"]) == (answer[0] != "status")
    assert folder.state.ledger.total.calls > 2  # the session went on


def test_what_a_session_lost_is_charged_once_in_a_replay_of_a_mixed_team(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "load_task", lambda name: TASK)
    cut = ("cut", [{"type": "text", "text": "w" * 4_000}])
    agent = stand_in(tmp_path, "ask(); ask()")
    with serve(MessagesServer([("answer", say()), cut], last=say())) as url:
        folder = sit(tmp_path / "r", agent, url, arm="evolving", model=ScriptedModel({"critic": [[FINISH]]}))
    assert [turn.role for turn in folder.state.turns] == ["writer", "critic"] and events(folder.path, "provider")
    assert replay.replay(folder.path, tmp_path / "again").equal
    assert SharedFolder.read(tmp_path / "again").state.ledger == folder.state.ledger


def test_a_session_that_hangs_up_pays_for_its_call(tmp_path):
    code = """
    import socket, urllib.parse
    where = urllib.parse.urlparse(os.environ["MODEL_URL"])
    line = socket.create_connection((where.hostname, where.port))
    body = json.dumps({"model": "%s", "stream": True, "system": "s", "messages": [{"role": "user", "content": "x"}]})
    head = f"POST {where.path}/v1/messages HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
    line.sendall((head + body).encode())
    line.close()
    """
    folder, _, server = session(tmp_path, code % MODEL, [("answer", say()), ("answer", say("w" * 8_000))])
    assert folder.state.ledger.total.calls == len(server.requests) > 2
    assert folder.state.ledger.total.usage.output >= sum(count["output_tokens"] for count in server.billed) * 0.9


def test_a_session_that_asks_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("evoteam.sessions.live.QUESTIONS", 4)
    folder, _, _ = session(tmp_path, "for n in range(100): run('note', f'note {n}')", tokens=7_000)
    assert [turn.reason for turn in folder.state.turns] == ["calls", "budget"] and len(folder.state.notes) == 4


def test_a_command_line_that_asks_nothing_stops_the_run_and_shows_its_last_words(tmp_path):
    agent = stand_in(tmp_path, "")
    Path(agent.program).write_text("#!/bin/sh\necho cannot find my settings\nexit 3\n")
    with (
        serve(MessagesServer([])) as url,
        pytest.raises(ProviderError, match="without asking.*cannot find my settings"),
    ):
        sit(tmp_path / "r", agent, url)
    assert not events(tmp_path / "r", "turn_end")


def test_the_time_of_an_evaluation_is_not_the_sessions(tmp_path):
    class Slow(ToyJudge):
        def evaluate(self, *arguments, **more):
            time.sleep(7)
            return super().evaluate(*arguments, **more)

    code = (
        "open('k.py', 'w').write('SPEED = 2\\n'); run('evaluate', 'k.py', '--idea', 'x'); run('note', 'x'); sys.exit()"
    )
    folder, _, _ = session(tmp_path, code, tokens=7_000, judge=Slow(), minutes=0.1)
    assert folder.state.turns[0].reason == "finished" and len(folder.state.notes) == 1


def test_a_session_that_only_waits_stops_the_run_when_its_time_is_up(tmp_path):
    agent = stand_in(tmp_path, "", minutes=0.02)
    Path(agent.program).write_text("#!/bin/sh\nsleep 98762\n")
    with (
        serve(MessagesServer([])) as url,
        pytest.raises(ProviderError, match="ended .timeout. without asking its model"),
    ):
        sit(tmp_path / "r", agent, url)
    assert not living("98762")


@pytest.mark.skipif(not sandbox._candidates_for("bubblewrap"), reason="bubblewrap is not here")
def test_a_scorer_among_the_packages_is_shown_empty(tmp_path):
    place = Path(sandbox.package_roots()[0]) / "torch"
    walls = sandbox._candidates_for("bubblewrap")[0]
    code = f"import os; print(len(os.listdir({str(place)!r})))"
    for hide, shown in (((), False), ((place, tmp_path), True)):
        command = walls.command([sys.executable, "-I", "-c", code], tmp_path, hide=hide)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip() == "0") == shown, done.stderr


def test_a_request_to_a_server_that_is_not_there_is_a_provider_failure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ProviderError, match="stand-in: its model's server failed: ConnectError"):
        sit(tmp_path / "r", stand_in(tmp_path, ""), url)
    (failure,) = events(tmp_path / "r", "provider")
    assert failure["usage"]["output"] == failure["usage"]["cache_write"] == 0


def test_a_prompt_may_be_an_argument_and_stands_after_the_instructions(tmp_path):
    command = ["{program}", "--do", "{prompt}"]
    code = "print('GIVEN', len(prompt), sys.argv[1], sys.argv[2][:20], 'Three commands reach' in sys.argv[2])"
    _, printed, _ = session(tmp_path, code, tokens=8_000, command=command)
    assert "GIVEN 0 --do You are **engineer** True" in printed


def test_a_file_of_ones_own_describes_an_agent_and_its_faults_are_one_line(tmp_path):
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({"name": "mine", "program": "sh", "api": "messages", "command": ["{program}"]}))
    assert agents.load(str(path)).find().name == "sh"
    path.write_text(json.dumps({"name": "mine", "program": "sh", "api": "chat", "commands": []}))
    with pytest.raises(agents.AgentError) as error:
        agents.load(str(path))
    text = str(error.value)
    assert "\n" not in text and "api: " in text and "command: " in text and "commands: " in text


@pytest.mark.parametrize(
    ("agent", "message", "code"),
    [
        ("cursor", "there is no agent 'cursor': give one of claude-code, codex, or a file that describes one", 2),
        ("absent.json", "the command line 'no-such-program' of agent absent is not installed: npm install it", 2),
        ("broken.json", "broken.json is not JSON", 2),
        ("keyless.json", "ANTHROPIC_API_KEY is not set: export it, the agent keyless needs it", 1),
    ],
)
def test_what_is_missing_is_one_line(tmp_path, monkeypatch, toy, agent, message, code):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    record = {"name": "absent", "program": "no-such-program", "install": "npm install it", "api": "messages"}
    Path("absent.json").write_text(json.dumps(record | {"command": ["{program}"]}))
    Path("keyless.json").write_text(json.dumps(record | {"name": "keyless", "program": "true", "command": []}))
    Path("broken.json").write_text("{")
    arguments = ["run", "--folder", "r", "--task", "toy", "--model", MODEL, "--budget-tokens", "1e6", "--agent", agent]
    done = command(*arguments)
    assert message in done.output and done.exit_code == code and "Traceback" not in done.output
    assert not Path("r").exists()


def test_an_agent_needs_the_name_of_a_model(tmp_path, toy):  # noqa: F811
    arguments = ["run", "--folder", tmp_path / "r", "--task", "toy", "--budget-tokens", "1e6", "--agent", "codex"]
    done = command(*arguments, "--model", "mailbox")
    assert done.exit_code == 2 and "--agent needs the name of the model" in done.output


def test_without_bubblewrap_a_session_is_refused_unless_unsafe(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "_candidates_for", lambda level: [])
    agent = stand_in(tmp_path, "run('note', 'unconfined')\nwhile True: ask()")
    from evoteam.sessions.live import LiveSessions

    with pytest.raises(sandbox.SandboxError, match="--unsafe"):
        LiveSessions(agent, MODEL, base_url="http://127.0.0.1:1")
    assert LiveSessions(agent, MODEL, base_url="http://127.0.0.1:1", unsafe=True).walls.level == "none"
    monkeypatch.setattr("evoteam.sessions.live.walls", lambda unsafe: sandbox.Confinement("none"))
    with serve(MessagesServer([], last=say())) as url:
        folder = sit(tmp_path / "r", agent, url, tokens=20_000)
    assert folder.state.notes["n0001"].text == "unconfined" and folder.state.end["reason"] == "budget"
    assert threading.active_count() < 8


def test_what_lies_beside_the_program_is_not_shown(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "secret").write_text("x")
    code = "print('BESIDE', os.listdir(os.path.dirname(sys.argv[0]))); sys.exit()"
    _, printed, _ = session(tmp_path, code, tokens=7_000)
    assert "BESIDE ['agent']" in printed

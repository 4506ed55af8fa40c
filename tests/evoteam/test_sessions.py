"""The real command lines in a role, against a local server of their models."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evoteam import replay
from evoteam.llm import ProviderError
from evoteam.memory import SharedFolder
from tests.evoteam import responses_server
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.sitting import bash, real, say, sit, tool
from tests.evoteam.toy import TASK, end_state, events

ROOT = Path(__file__).parents[2]
WRITE = ("answer", [tool("Write", file_path="kernel.py", content="SPEED = 2.0\n")])
EVALUATE = ("answer", [bash("python -m evoteam evaluate kernel.py --idea 'twice as fast' --technique split-kv")])
NOTE = ("answer", [bash("python -m evoteam note 'two is fast' --evidence a0001")])


def living(marker):
    """Processes with this word in their command lines."""
    return [
        pid for pid in filter(str.isdigit, os.listdir("/proc"))
        if pid != str(os.getpid()) and marker.encode() in _command(pid)
    ]  # fmt: skip


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def same_spend(folder, billed):
    """The ledger holds what the server counted, and nothing else."""
    usage = folder.state.ledger.total.usage
    sums = {name: sum(count[name] for count in billed) for name in billed[0]}
    assert usage.input == sums["input_tokens"] and usage.output == sums["output_tokens"]
    assert usage.cache_write == sums["cache_creation_input_tokens"]
    assert usage.cache_read == sums["cache_read_input_tokens"]
    assert not usage.estimated


def replayed(path, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "load_task", lambda name: TASK)
    outcome = replay.replay(path, tmp_path / "again")
    assert outcome.equal, outcome.text
    return SharedFolder.read(tmp_path / "again").state


def test_claude_code_edits_evaluates_and_notes_and_its_ledger_is_the_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted-key")
    server = MessagesServer([WRITE, EVALUATE, NOTE, ("answer", say())], last=say())
    with serve(server) as url:
        folder = sit(tmp_path / "r", real("claude-code"), url, tokens=60_000)
    state = folder.state
    assert state.best.score == 2.0 and state.attempts["a0001"].idea == "twice as fast"
    assert state.notes["n0001"].evidence == ("a0001",) and state.turns[0].reason == "finished"
    assert "a0001: score 2.000" in str(server.requests[2]["messages"])  # the verdict came back into the session
    assert "You are **engineer**" in str(server.requests[0]["system"])
    assert {request["model"] for request in server.requests} == {"claude-sonnet-5-5"}
    same_spend(folder, server.billed)
    assert state.ledger.total.calls == len(server.requests) and state.ledger.total.tokens <= 60_000
    assert state.end["reason"] == "budget"
    assert {headers["x-api-key"] for headers in server.headers} == {"planted-key"}
    files = [file for file in folder.path.rglob("*") if file.is_file()]
    assert not [file for file in files if b"planted-key" in file.read_bytes()]
    assert replayed(folder.path, tmp_path, monkeypatch).ledger.total.tokens == state.ledger.total.tokens
    assert end_state(tmp_path / "again") == end_state(folder.path)


ESCAPES = """
touch {outside}/made; echo x > /usr/made; ls {folder}/events.jsonl {folder}/attempts
python -c 'import evoteam.judging' || echo no-scorer
python -c 'import kernels.reference' || echo no-reference
python -c 'import socket; socket.create_connection(("127.0.0.1", {port}), 2)' || echo no-network
env; cat /proc/*/environ | tr '\\0' '\\n'; ls -d {outside} || echo invisible
"""


def test_a_session_sees_and_writes_nothing_outside_its_workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted-key")
    outside = tmp_path / "outside"
    outside.mkdir()
    server = MessagesServer([], last=say())
    with serve(server) as url:
        port = url.rpartition(":")[2]
        escapes = ESCAPES.format(outside=outside, folder=tmp_path / "r", port=port)
        link = f"ln -s {outside} link; ln -s {tmp_path / 'r'} up; echo linked"
        server.behaviors += [
            ("answer", [bash(escapes)]),
            ("answer", [tool("Write", file_path=str(outside / "made"), content="x")]),
            ("answer", [bash(link)]),
            ("answer", [tool("Write", file_path="link/made", content="x")]),
        ]
        sit(tmp_path / "r", real("claude-code"), url, tokens=50_000)
    told = str(server.requests[1]["messages"][-1])
    for sign in ("no-scorer", "no-reference", "no-network", "invisible"):
        assert told.count(sign) >= 1, told
    assert "planted-key" not in str([request["messages"] for request in server.requests])
    assert not list(outside.iterdir()) and not Path("/usr/made").exists()
    assert "denied" in str(server.requests[2]["messages"][-1])
    assert str(tmp_path / "r" / "events.jsonl") + "\n" not in told


def test_a_session_that_would_go_beyond_the_budget_is_cut_off_before_it_pays(tmp_path):
    server = MessagesServer([], last=[bash("echo again")])
    with serve(server) as url:
        folder = sit(tmp_path / "r", real("claude-code"), url, tokens=30_000)
    assert folder.state.end["reason"] == "budget" and folder.state.turns[-1].reason == "budget"
    assert 15_000 < folder.state.ledger.total.tokens <= 30_000
    same_spend(folder, server.billed)


def test_a_session_out_of_time_leaves_no_process(tmp_path):
    command = "setsid nohup sleep 98761 & sleep 98761"
    agent = real("claude-code").model_copy(update={"minutes": 0.15})
    server = MessagesServer([("answer", [bash(command)])], last=[bash("echo again")])
    with serve(server) as url:
        started = time.monotonic()
        folder = sit(tmp_path / "r", agent, url, tokens=30_000)
    assert folder.state.turns[0].reason == "timeout" and time.monotonic() - started < 60
    assert not living("98761") and not living("evoteam-")
    assert not list((folder.path / "sessions").glob("*.shared"))


def test_a_provider_failure_keeps_the_run_and_a_passing_one_is_no_failure(tmp_path):
    agent = real("claude-code")
    agent = agent.model_copy(update={"environment": agent.environment | {"CLAUDE_CODE_MAX_RETRIES": "1"}})
    refused = [("status", (401, {}))] * 20
    server = MessagesServer([("status", (529, {})), WRITE, *refused], last=say())
    with serve(server) as url:
        with pytest.raises(ProviderError, match="claude-code: its model's server failed: HTTP 401"):
            sit(tmp_path / "r", agent, url, tokens=50_000)
        assert {event["error"][:8] for event in events(tmp_path / "r", "provider")} == {"HTTP 529", "HTTP 401"}
        server.behaviors.clear()
        folder = sit(tmp_path / "r", agent, url, resume=True)
    assert folder.state.end["reason"] == "budget" and folder.state.turns[0].reason == "finished"


KILLED = """
import os, signal, sys
from pathlib import Path
from evoteam.memory import SharedFolder
from tests.evoteam.sitting import real, sit
from tests.evoteam.toy import ToyJudge

append = SharedFolder.append

def mortal(self, kind, **fields):
    if [kind, fields.get("key", "")] == sys.argv[3:5]:
        os.kill(os.getpid(), signal.SIGKILL)
    return append(self, kind, **fields)

SharedFolder.append = mortal
sit(Path(sys.argv[1]), real("claude-code"), sys.argv[2], tokens=200_000)
"""


@pytest.mark.parametrize(("kind", "key", "lost"), [("tool", "turn0001.q01", 0), ("spent", "turn0001.02", 1)])
def test_killed_in_the_middle_it_goes_on_and_pays_nothing_twice(tmp_path, monkeypatch, kind, key, lost):
    real("claude-code")
    last = [("answer", say())] * 2
    server = MessagesServer([WRITE, EVALUATE, *([EVALUATE] if lost else []), NOTE, *last], last=[bash("echo again")])
    with serve(server) as url:
        command = [sys.executable, "-c", KILLED, tmp_path / "r", url, kind, key]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, timeout=60)
        assert done.returncode == -9
        time.sleep(1)
        assert not living("evoteam-")
        folder = sit(tmp_path / "r", real("claude-code"), url, resume=True)
    state = folder.state
    assert [attempt.id for attempt in state.attempts.values()] == ["a0001"] and len(events(folder.path, "verdict")) == 1
    assert state.notes["n0001"].role == "engineer"
    assert state.turns[0].reason == ("tokens" if lost else "finished")  # a lost call costs what was reserved for it
    (resumed,) = events(folder.path, "resume")
    assert bool(resumed.get("lost")) == bool(lost)
    if lost:
        assert resumed["lost"] == key and state.ledger.estimated_calls == 1
        assert state.ledger.total.calls == len(server.requests)
    else:
        same_spend(folder, server.billed)
        assert "a0001: score 2.000" in str(server.requests[2]["messages"])  # the new session is told what was done
    again = replayed(folder.path, tmp_path, monkeypatch)
    assert again.ledger.total.tokens == pytest.approx(state.ledger.total.tokens)


def test_codex_evaluates_and_notes_and_its_ledger_is_the_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "planted-key")
    server = responses_server.ResponsesServer([
        "printf 'SPEED = 3.0\\n' > kernel.py; python -m evoteam evaluate kernel.py --idea thrice",
        "python -m evoteam note 'three is faster' --evidence a0001",
    ])  # fmt: skip
    with responses_server.serve(server) as url:
        folder = sit(tmp_path / "r", real("codex"), url, name="gpt-5-codex", tokens=30_000)
    state = folder.state
    assert state.best.score == 3.0 and state.notes["n0001"].text == "three is faster"
    assert state.turns[0].reason == "finished" and state.end["reason"] == "budget"
    usage = state.ledger.total.usage
    assert usage.input == sum(count["input_tokens"] - 4_000 for count in server.billed)
    assert usage.cache_read == 4_000 * len(server.billed) and usage.output == 90 * len(server.billed)
    assert not [tool for request in server.requests for tool in request["tools"] if tool["type"] != "function"]
    assert {request["max_output_tokens"] for request in server.requests} <= set(range(1_024, 16_001))
    assert {headers["authorization"] for headers in server.headers} == {"Bearer planted-key"}
    assert "You are **engineer**" in str(server.requests[0]["input"])
    assert replayed(folder.path, tmp_path, monkeypatch).best.score == 3.0

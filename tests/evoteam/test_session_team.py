"""An evolving team with two Claude Code roles and one of the tool loop, on the CPU task, from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from evoteam.memory import SharedFolder
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.sitting import MODEL, bash, real, say, tool
from tests.evoteam.test_cpu_run import PLAIN
from tests.evoteam.toy import FINISH, events, use

ROOT = Path(__file__).parents[2]
TEAM = {
    "rationale": "two agents write, one advises",
    "roles": [
        {"name": "writer", "tools": ["write_kernel", "note"], "share": 0.4},
        {"name": "tuner", "mandate": "Make the best faster.", "tools": ["edit_kernel", "read"], "share": 0.4},
        {"name": "critic", "tools": ["read", "note"], "share": 0.2},
    ],
    "order": [["writer"], ["tuner"], ["critic"]],
    "sharing": {"writer": ["best_code"], "tuner": ["best_code", "team_attempts"], "critic": ["team_attempts"]},
}
TUNE = """cp {shared}/attempts/a0001/kernel.py k.py && grep -c double k.py &&
sed -i "s/double/float/; s/range(3)/range(1)/; s/::3/::1/" k.py &&
python -m evoteam evaluate k.py --idea fp32 --base a0001"""


class TeamServer(MessagesServer):
    """Answers by the role that its prompt names; `shared` stands for the folder that the prompt names."""

    def __init__(self, answers, last):
        super().__init__([])
        self.answers, self.last_of = answers, last

    def next(self, body, headers):
        super().next(body, headers)
        prompt = json.dumps([body["system"], body["messages"]])
        role = next(role for role in self.last_of if f"You are **{role}**" in prompt or f"the **{role}**" in prompt)
        blocks = self.answers[role].pop(0) if self.answers.get(role) else self.last_of[role]
        shared = prompt.partition("stand in `")[2].partition("`")[0]
        return "answer", json.loads(json.dumps(blocks).replace("{shared}", shared))


def test_two_claude_code_roles_and_a_tool_loop_role_on_the_cpu_task(tmp_path):
    real("claude-code")
    decide = {"diagnosis": "nobody writes", "evidence": []}
    answers = {
        "supervisor": [[use("decide", action="revise", team=TEAM, **decide) | {"id": "d"}]],
        "writer": [
            say(),  # a round without an attempt: the supervisor is asked
            [tool("Write", file_path="kernel.py", content=PLAIN)],
            [bash("python -m evoteam evaluate kernel.py --idea 'plain, in fp64'")],
            say(),
        ],
        "tuner": [[bash(TUNE)], say()],
        "critic": [
            [FINISH | {"id": "f"}],
            [use("note", text="fp32 is enough", evidence=["a0002"]) | {"id": "n"}, FINISH | {"id": "f"}],
        ],
    }
    last = {
        "supervisor": [use("decide", action="continue", **decide) | {"id": "d"}],
        "writer": say(),
        "tuner": say(),
        "critic": [FINISH | {"id": "f"}],
    }
    server = TeamServer(answers, last)
    with serve(server) as url:
        command = ["run", "--task", "mla-paged-decode-cpu", "--agent", "claude-code", "--model", MODEL]
        command += ["--budget-tokens", "120000", "--base-url", url, "--folder", tmp_path / "r"]
        environment = os.environ | {"ANTHROPIC_API_KEY": "planted-key"}
        done = subprocess.run(
            [sys.executable, "-m", "evoteam", *map(str, command)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    state = SharedFolder.read(tmp_path / "r").state
    first, second = state.attempts["a0001"], state.attempts["a0002"]
    assert (first.role, second.role, second.base) == ("writer", "tuner", "a0001")
    assert first.valid and second.valid and second.score > first.score, done.stdout
    assert first.verdict["confinement"]["level"] != "none"
    seats = {event["role"]: event.get("agent") for event in events(tmp_path / "r", "turn")}
    assert seats == {"writer": "claude-code", "tuner": "claude-code", "critic": None, "supervisor": None}
    assert state.notes["n0001"].role == "critic" and state.end["reason"] == "budget"

    asked = next(body for body in server.requests if "the **supervisor**" in str(body["system"]))
    assert "sessions of the coding agent claude-code" in str(asked["messages"])
    usage, total = state.ledger.total.usage, state.ledger.total
    billed = {name: sum(count[name] for count in server.billed) for name in server.billed[0]}
    assert usage.record() == {
        "input": billed["input_tokens"],
        "cache_write": billed["cache_creation_input_tokens"],
        "cache_read": billed["cache_read_input_tokens"],
        "output": billed["output_tokens"],
        "estimated": False,
    }
    assert total.calls == len(server.requests) and total.tokens <= 120_000
    replayed = subprocess.run(
        [sys.executable, "-m", "evoteam", "replay", tmp_path / "r"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert replayed.returncode == 0 and "decisions are the recorded ones" in replayed.stdout, replayed.stdout

"""Runs whose writing roles a command line sits in: the real ones, or a small stand-in that does what it is told."""

import json
import sys
from textwrap import dedent

import pytest

from evoteam.judging.sandbox import SandboxError
from evoteam.llm import ScriptedModel
from evoteam.memory import SharedFolder
from evoteam.search import Search
from evoteam.sessions import agents
from evoteam.sessions.live import LiveSessions
from tests.evoteam.toy import TASK, ToyJudge, settings, use

MODEL = "claude-sonnet-5-5"


def real(name):
    """The agent of this name; skips where it is not installed."""
    agent = agents.load(name)
    try:
        agent.find()
    except agents.AgentError as error:
        pytest.skip(str(error))
    return agent


STAND_IN = """\
#!{python}
import json, os, subprocess, sys, urllib.error, urllib.request

def ask(text="go on", **more):
    body = {{"model": "{model}", "max_tokens": 5000, "stream": True, "system": "s", "tools": []}}
    body |= {{"messages": [{{"role": "user", "content": text}}]}} | more
    request = urllib.request.Request(os.environ["MODEL_URL"] + "/v1/messages", json.dumps(body).encode())
    try:
        return urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        return f"{{error.code}} {{error.read().decode()}}"

def run(*arguments):
    done = subprocess.run([sys.executable, "-m", "evoteam", *arguments], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.stdout + done.stderr

prompt = sys.stdin.read()
ask(prompt)
"""


def stand_in(tmp_path, code, **more):
    """An agent whose session asks its model once and then does `code`; `ask` and `run` are at hand."""
    program = tmp_path / "program" / "agent"
    program.parent.mkdir(exist_ok=True)
    program.write_text(STAND_IN.format(python=sys.executable, model=MODEL) + dedent(code))
    program.chmod(0o755)
    record = {"name": "stand-in", "program": str(program), "api": "messages", "command": ["{program}"]}
    record |= {"environment": {"MODEL_URL": "{door}"}} | more
    path = tmp_path / "program" / "agent.json"
    path.write_text(json.dumps(record))
    return agents.load(str(path))


def tool(name, **given):
    return use(name, **given) | {"id": f"toolu_{abs(hash((name, str(given)))):x}"}


def bash(command):
    return tool("Bash", command=command, description="a step")


def say(text="done"):
    return [{"type": "text", "text": text}]


def sit(path, agent, url, *, arm="single", judge=None, resume=False, model=None, **rest):
    """Run or resume an arm whose writing roles the agent sits in; the folder as read again from disk."""
    name = rest.pop("name", MODEL)
    config = None if resume else settings(arm, model=name, agent=agent.model_dump(mode="json"), **rest)
    try:
        sessions = LiveSessions(agent, name, base_url=url)
    except SandboxError as error:
        pytest.skip(str(error))
    with SharedFolder.open(path, config) as folder:
        Search(
            folder, model or ScriptedModel({}), judge or ToyJudge(), TASK, say=lambda line: None, sessions=sessions
        ).run()
    return SharedFolder.read(path)

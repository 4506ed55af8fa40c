"""Which command lines can sit in a role: rows of agents.json, or a file of the same form."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evoteam.team import problems_of

TABLE = json.loads(Path(__file__).with_name("agents.json").read_text("utf-8"))


class AgentError(ValueError):
    """The command line cannot sit in a role; the message says what to install or set."""


class Agent(BaseModel):
    """One command line.

    program: its name on the PATH, or its path; carried_by: `package:file` of a Python package that brings it;
    command: its arguments; `{prompt}` there takes the prompt, which otherwise goes to standard input, and `{system}`
    the role's instructions, which otherwise stand before the prompt. {model}, {max_tokens} and {door}, the address of
    its model, are filled in in both `command` and `environment`; `effort` is added where an effort was asked for.
    api: the row of `apis` it speaks, which also says how usage is read. minutes: of one session, evaluations excluded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    program: str
    carried_by: str = ""
    install: str = ""
    api: Literal["messages", "responses"]
    command: tuple[str, ...]
    effort: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    minutes: float = 60
    version: str = ""

    def find(self) -> Path:
        """The program. AgentError if it is not installed."""
        package, _, inner = self.carried_by.partition(":")
        spec = importlib.util.find_spec(package) if package else None
        carried = Path(spec.origin).parent / inner if spec and spec.origin else None
        if carried and os.access(carried, os.X_OK):
            return carried
        if found := shutil.which(self.program):
            return Path(found).absolute()
        how = f": {self.install}" if self.install else ""
        raise AgentError(f"the command line {self.program!r} of agent {self.name} is not installed{how}")

    def with_version(self) -> "Agent":
        """The same with what the program answers to --version, for the record."""
        try:
            done = subprocess.run([self.find(), "--version"], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AgentError(
                f"the command line {self.program!r} of agent {self.name} does not start: {error}"
            ) from None
        return self.model_copy(update={"version": done.stdout.strip()[:200]})

    def server(self, base_url: str | None) -> tuple[str, str]:
        """Address and key of its model. A server of one's own may need no key."""
        api = TABLE["apis"][self.api]
        named = base_url or os.environ.get(api["server_variable"])
        key = os.environ.get(api["key_variable"], "")
        if not key and not named:
            raise AgentError(f"{api['key_variable']} is not set: export it, the agent {self.name} needs it")
        return (named or api["server"]).rstrip("/"), key


def load(name: str) -> Agent:
    """The agent of this name, or the one that the file of this name describes."""
    if name in TABLE["agents"]:
        return Agent.model_validate(TABLE["agents"][name])
    path = Path(name)
    if not path.is_file():
        known = ", ".join(TABLE["agents"])
        raise AgentError(f"there is no agent {name!r}: give one of {known}, or a file that describes one")
    try:
        return Agent.model_validate(json.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise AgentError(f"{path} does not describe an agent: " + "; ".join(problems_of(error))) from None
    except ValueError as error:
        raise AgentError(f"{path} is not JSON: {error}") from None

"""Where a session works: its files, and its walls.

| level      | reads                                           | writes        | network        | other processes |
|------------|-------------------------------------------------|---------------|----------------|-----------------|
| bubblewrap | system, packages, its program, what it is shown | its workspace | the door alone | invisible       |
| none       | everything                                      | everything    | all            | all             |

At both levels processes, memory and the size of the workspace are watched, and the run's key stays outside. `none` is
taken with unsafe=True only, where bubblewrap does not work.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from evoteam.judging import processes, sandbox
from evoteam.memory import SharedFolder
from evoteam.sessions.agents import Agent
from evoteam.state import Talk
from evoteam.views import may_read, view

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCORER = ("evoteam", "kernels", "tests")
COOKIE = "EVOTEAM_SESSION"
PROCESSES, MEMORY_BYTES, WORKSPACE_BYTES = 200, 8 << 30, 4 << 30


class Workplace:
    """The files of one session and its process; a context manager that leaves no process behind.

    `workspace` belongs to the role and stays. `shared` and `tools` are made anew and removed at the end; the run never
    writes where a session may, nor opens a path that a session named.
    """

    def __init__(self, folder: SharedFolder, talk: Talk):
        own = folder.path.resolve() / "sessions"
        self.workspace, self.shared, self.tools = (
            own / talk.role,
            own / f"{talk.turn}.shared",
            own / f"{talk.turn}.tools",
        )
        self.log = own / f"{talk.turn}.log"
        self.temporary = Path(tempfile.mkdtemp(prefix="evoteam-"))
        self.socket, self.scratch = self.temporary / "door", self.temporary / "scratch"
        self.cookie = secrets.token_hex(16)
        self.process: subprocess.Popen | None = None
        for path in (self.shared, self.tools):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.workspace, self.shared, self.tools / "evoteam", self.scratch):
            path.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / "client.py", self.tools / "evoteam" / "__main__.py")
        shutil.copyfile(HERE / "relay.py", self.tools / "relay.py")
        self._show(folder, talk)

    def __enter__(self) -> "Workplace":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for path in (self.shared, self.tools, self.temporary):
            shutil.rmtree(path, ignore_errors=True)

    def _show(self, folder: SharedFolder, talk: Talk) -> None:
        state = folder.state
        paths = [f"attempts/{name}/{file}" for name in state.attempts for file in ("kernel.py", "log.txt")]
        paths += [f"notes/{note.role}/{note.id}.md" for note in state.notes.values()]
        for path in paths:
            if not may_read(path, state, talk) and (folder.path / path).is_file():
                (self.shared / path).parent.mkdir(parents=True, exist_ok=True)
                (self.shared / path).write_text(folder.text(path), encoding="utf-8")
        (self.shared / "sections.md").write_text(view(folder, talk) + "\n", encoding="utf-8")

    def start(self, agent: Agent, confinement: sandbox.Confinement, secret: str, values: dict[str, str], effort: str):
        """Start the command line. values: what its template's names stand for."""
        program = agent.find().resolve()
        own = _parts(program)
        values = values | {"program": str(program), "effort": effort}
        parts = (*agent.command, *(agent.effort if effort else ()))
        prompt = values["prompt"]
        if not any("{system}" in part for part in parts):
            prompt = values["prompt"] = f"{values['system']}\n\n{prompt}"
        piped = not any("{prompt}" in part for part in parts)
        (self.temporary / "prompt").write_text(prompt if piped else "", encoding="utf-8")
        relay = [sys.executable, "-I", str(self.tools / "relay.py"), str(self.socket), secret, str(self.workspace)]
        argv = [*relay, *(_filled(part, values) for part in parts)]
        shown = (*own, self.shared, self.tools)
        hidden = tuple(ROOT / name for name in SCORER)
        command = confinement.command(argv, self.scratch, shown, write=(self.workspace, self.socket), hide=hidden)
        environment = sandbox.environment(confinement.home(self.scratch), {COOKIE: self.cookie})
        environment |= {name: _filled(text, values) for name, text in agent.environment.items()}
        environment["PATH"] += "".join(f":{path.parent}" for path in (program, *own))
        environment["PYTHONPATH"] = f"{self.tools}:{':'.join(sandbox.package_roots())}"
        environment["EVOTEAM_DOOR"] = "{door}"
        with open(self.log, "ab") as log, open(self.temporary / "prompt", "rb") as prompt_file:
            self.process = subprocess.Popen(
                command, stdin=prompt_file, stdout=log, stderr=log, env=environment, cwd=self.scratch,
                start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        """End the session with everything it started."""
        if self.process:
            processes.sweep(f"{COOKIE}={self.cookie}", [self.process.pid])
            self.process.wait()

    def excess(self) -> str:
        """What the session uses too much of: "processes", "memory" or "disk", "" for nothing."""
        tree = processes.descendants_quickly(self.process.pid)
        if len(tree) > PROCESSES:
            return "processes"
        if processes.resident_bytes(tree) > MEMORY_BYTES and processes.memory_bytes(tree) > MEMORY_BYTES:
            return "memory"
        return "disk" if _size(self.workspace, WORKSPACE_BYTES) > WORKSPACE_BYTES else ""

    def last_words(self) -> str:
        """The end of what the command line printed."""
        with open(self.log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 500))
            return log.read().decode("utf-8", "replace").strip()


def walls(unsafe: bool) -> sandbox.Confinement:
    """bubblewrap; none with `unsafe` where it does not work. SandboxError otherwise."""
    return sandbox.choose(unsafe, levels=("bubblewrap",))


def _size(folder: Path, enough: int) -> int:
    """Bytes on disk below `folder`, links not followed; counting stops at `enough`."""
    size, waiting = 0, [folder]
    while waiting and size <= enough:
        try:
            for entry in os.scandir(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return size


def _filled(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        if part == "{" + name + "}":
            return value
        if name not in ("prompt", "system"):
            part = part.replace("{" + name + "}", value)
    return part


def _parts(program: Path) -> tuple[Path, ...]:
    """What a program needs of its own: its file, or the tree of modules it belongs to and what runs them."""
    trees = [parent for parent in program.parents if parent.name == "node_modules"]
    node = shutil.which("node")
    return (trees[-1], *([Path(node).resolve()] if node else [])) if trees else (program,)

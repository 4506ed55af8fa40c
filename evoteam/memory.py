"""The shared folder of a run: one append-only journal, immutable records beside it, one writing process.

Everything known about a run is read from `events.jsonl`; the other files are what its events point at.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from evoteam.journal import JOURNAL, SCHEMA, FolderError, damaged, line_of, read_lines
from evoteam.journal import read_events as read_events
from evoteam.judging import files
from evoteam.state import State

MIN_FREE = 16 * 2**20  # bytes wanted on the disk before anything is paid for
PAID = (
    "reply",
    "spent",
    "verdict",
    "provider",
    "decision",
    "end",
)  # must outlive a power cut; what follows from them is made again


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, data: str, durable: bool = True) -> None:
    """As `files.write_atomically`; FolderError where it cannot be done."""
    try:
        files.write_atomically(path, data, durable)
    except OSError as error:
        raise FolderError(f"cannot write {path}: {error.strerror}; make room and continue with --resume") from error


def _apply(state: State, event: dict, journal: Path, number: int) -> None:
    try:
        state.apply(event)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"the event {event['kind']!r} does not fit what came before it"
        raise damaged(journal, number, f"{what} ({type(error).__name__}: {error})") from error


class SharedFolder:
    """A run folder. `open` to write it (one process at a time), `SharedFolder.read` to look at it."""

    def __init__(self, path: Path, state: State, torn: int):
        self.path, self.state, self.torn, self.durable = path, state, torn, True
        self._file: int | None = None
        self._lock: FileLock | None = None

    @classmethod
    def read(cls, path: Path) -> "SharedFolder":
        """A run folder as it stands now, without the right to write. A running writer is not disturbed."""
        folder = cls._read(path)
        if folder.state.seq < 0:
            raise FolderError(f"{path / JOURNAL} holds no event yet; start a run with `run --folder {path}`")
        return folder

    @classmethod
    def _read(cls, path: Path) -> "SharedFolder":
        journal, state, torn = path / JOURNAL, State(), 0
        try:
            if not journal.is_file():
                raise FolderError(
                    f"{path} is not a run folder: it has no {JOURNAL}; start one with `run --folder {path}`"
                )
            for number, event in read_lines(journal):
                torn += event is None
                if event:
                    _apply(state, event, journal, number)
        except OSError as error:
            raise FolderError(f"cannot read {journal}: {error.strerror}") from error
        return cls(path, state, torn)

    @classmethod
    def open(cls, path: Path, config: dict | None = None) -> "SharedFolder":
        """The folder with the right to write. `config`: start a new run; None: go on with the one that is there."""
        lock = FileLock(path / ".lock")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderError(f"another process is writing {path}; wait for it or choose another --folder") from None
        except OSError as error:
            raise FolderError(f"cannot write {path}: {error.strerror}; choose another --folder") from error
        try:
            return cls._open(path, config, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open(cls, path: Path, config: dict | None, lock: FileLock) -> "SharedFolder":
        journal = path / JOURNAL
        folder = cls._read(path) if journal.is_file() else cls(path, State(), 0)
        started = folder.state.seq >= 0
        if config is not None and started:
            raise FolderError(f"{path} already holds a run; continue it with --resume or choose another --folder")
        if config is None and not started:
            raise FolderError(f"{path} holds no run to resume; start one without --resume")
        folder._file, folder._lock = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), lock
        if journal.read_bytes()[-1:] not in (b"", b"\n"):
            folder._write(b"\n", True)
        if config is not None:
            folder.append("run", schema=SCHEMA, config=config)
        if not (path / "run.json").exists():
            write_atomically(path / "run.json", json.dumps({"schema": SCHEMA} | folder.state.config, indent=1) + "\n")
        return folder

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._lock.release()
            self._file = None

    def __enter__(self) -> "SharedFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def append(self, kind: str, **fields: Any) -> dict:
        """Write one event and take it into the state."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        event = {"seq": self.state.seq + 1, "t": stamp, "kind": kind} | fields
        line = line_of(event)
        self._write(line, self.durable and kind in PAID)
        self.state.apply(json.loads(line))
        return event

    def _write(self, line: bytes, durable: bool) -> None:
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written == len(line):
                if durable:
                    os.fsync(self._file)
                return
            reason = f"only {written} of {len(line)} bytes fitted"
        except OSError as error:
            reason = error.strerror
        os.ftruncate(self._file, size)
        then = "continue with --resume" if self.state.seq >= 0 else "start again"
        raise FolderError(f"cannot write {self.path / JOURNAL}: {reason}; make room and {then}")

    def check_space(self) -> None:
        """Refuse to go on when the disk could not hold what is about to be paid for."""
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE:
            raise FolderError(
                f"{free / 2**20:.1f} MB are free under {self.path}, wanted {MIN_FREE / 2**20:.0f}; "
                "make room and continue with --resume"
            )

    def store(self, relative: str, files: dict[str, str]) -> Path:
        """A record folder that appears whole or not at all; one that is there already is left as it is."""
        target = self.path / relative
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, text in files.items():
            write_atomically(temporary / name, text, self.durable)
        os.rename(temporary, target)
        return target

    def store_file(self, relative: str, text: str, durable: bool = True) -> Path:
        path = self.path / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, durable and self.durable)
        return path

    def publish_best(self) -> None:
        """Bring the copy in best/ up to date."""
        if best := self.state.best:
            self.store_file("best/kernel.py", self.source(best.id), durable=False)
            self.store_file("best/verdict.json", self.text(f"attempts/{best.id}/verdict.json"), durable=False)

    def source(self, attempt: str) -> str:
        """Source of an attempt, checked against the journal."""
        path = self.path / "attempts" / attempt / "kernel.py"
        text = path.read_bytes().decode("utf-8", "replace")
        if sha256(text) != self.state.attempts[attempt].source_sha256:
            raise FolderError(
                f"{path} is not what was evaluated: its hash differs from the journal's; restore it from a copy"
            )
        return text

    def text(self, relative: str) -> str:
        """A text file of the folder; FolderError for a path that leads out of it, links included."""
        path = (self.path / relative).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise FolderError(
                f"{relative!r} leads out of the shared folder; give a path inside it, such as attempts/a0001/kernel.py"
            )
        if not path.is_file():
            raise FolderError(f"there is no file {relative!r} in the shared folder")
        return path.read_bytes().decode("utf-8", "replace")

"""report.json: how one is begun, written and compared with the measurement that ships with the code."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from kernels.foreign import describe, one_line

SCHEMA = 1
PROGRAM, RUNS_PROGRAM = "evoteam", "evoteam report"  # what repro.py and `python -m evoteam report` sign with
ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "kernels" / "archive" / "measurements"
PACKAGES = ("torch", "triton", "flashinfer-python", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")


class RecordError(ValueError):
    """A stored record cannot be read, or a new one cannot be written."""


def begin(command: list[str], modes: tuple[str, ...], seed: int) -> dict:
    """The head of a record: when, by which command, from which commit, on which host and versions."""
    return {
        "schema": SCHEMA,
        "program": PROGRAM,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "modes": list(modes),
        "seed": seed,
        "git": git_state(),
        "host": {"system": platform.platform(), "python": platform.python_version(), "cpu_count": os.cpu_count()},
        "versions": versions(),
        "device": None,
        "kernel": None,
        "measurements": {},
        "recorded": None,  # the shipped measurement, where it is shown instead of one made now
        "comparison": None,  # this run's means beside the shipped ones
        "selfcheck": None,
        "kda": None,  # evidence of the KDA part
        "runs": [],  # summaries of searches
        "observations": [],  # what was measured but is nobody's claim
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a measurement; a missing one is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict | None:
    """Commit of this checkout and whether tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def read(path: Path) -> dict:
    """A report.json, checked for its schema. Raises RecordError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("program") != PROGRAM or record.get("schema") != SCHEMA:
        raise RecordError(f"{path} is not a record of this program with schema {SCHEMA}")
    return record


def shipped(
    kernel: str, folder: Path = MEASUREMENTS, complain: Callable[[str], object] | None = None
) -> tuple[Path, dict] | None:
    """The newest shipped record of `kernel` measured on a GPU, with its path; None where there is none.

    A file that is no such record is left out, and `complain` is told which and why.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = read(path)
            _check_measured(path, record)
        except RecordError as error:
            if complain:
                complain(f"left out: {error}")
            continue
        if record["kernel"]["name"] == kernel:
            records.append((path, record))
    return max(records, key=lambda item: item[1]["created"], default=None)


def _check_measured(path: Path, record: dict) -> None:
    """Raises RecordError unless `record` can be shown and compared with."""
    from evoteam.reporting import console, sections

    kernel, device = (record.get(key) if isinstance(record.get(key), dict) else {} for key in ("kernel", "device"))
    named = {
        "created": record.get("created"),
        "device.name": device.get("name"),
        "kernel.name": kernel.get("name"),
        "kernel.sha256": kernel.get("sha256"),
    }
    missing = [name for name, value in named.items() if not isinstance(value, str)]
    if missing:
        raise RecordError(f"{path} has no text under {', '.join(missing)}")
    try:
        for name, scope in record["measurements"].items():
            if name in sections.MEASUREMENTS:
                [(figure.wide, figure.narrow) for figure in sections.section(name, scope)["figures"]]
            if "summary" in scope:
                console.scope_summary(scope)
                console.workload_table(scope)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecordError(f"{path} has measurements that cannot be shown: {describe(error)}") from error


def compare(now: dict, then: dict) -> list[dict]:
    """Geometric means of two records, scope by scope where both have one with the same workloads."""
    rows = []
    for name, scope in now["measurements"].items():
        other = then["measurements"].get(name)
        if not other or "summary" not in scope or scope["summary"]["n"] != other["summary"]["n"]:
            continue
        rows.append({"measurement": name, "now": scope["summary"]["geomean"], "recorded": other["summary"]["geomean"]})
    return rows


def prepare(out: Path, program: str = PROGRAM) -> None:
    """Make the folder of a report and prove that both of its files can be written and may be replaced.

    Raises RecordError. This comes before anything is measured, so that nothing measured is lost.
    """
    elsewhere = "give another folder with --out"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise RecordError(f"cannot write to {one_line(str(out), 100)}: {error.strerror}; {elsewhere}") from error
    for name, ours in (("report.json", _is_report), ("report.html", _is_page)):
        path = out / name
        if not os.path.lexists(path):
            continue
        if not path.is_file():
            raise RecordError(f"{path} is not a file, and the report goes there; move it, or {elsewhere}")
        if not path.stat().st_mode & 0o222:
            raise RecordError(f"{path} is read-only, and the report goes there; make it writable, or {elsewhere}")
        if not ours(path, program):
            raise RecordError(f"{path} was not written by this command and would be replaced; move it, or {elsewhere}")


def _is_report(path: Path, program: str) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("program") == program


def _is_page(path: Path, program: str) -> bool:
    try:
        with path.open("rb") as page:
            return generator(program).encode() in page.read(2000)
    except OSError:
        return False


def generator(program: str) -> str:
    """The tag by which a page is known as ours."""
    return f'<meta name="generator" content="{program}">'


def save(path: Path, text: str) -> str:
    """Write a file of a report, in the folder for temporary files where it cannot be written; "" or what went wrong."""
    try:
        write(path, text)
    except RecordError as error:
        try:
            kept = Path(tempfile.mkdtemp(prefix="evoteam-")) / path.name
            write(kept, text)
        except (RecordError, OSError):
            return f"{error}, nor below {tempfile.gettempdir()}"
        return f"{error}; it was saved as {kept}"
    return ""


def write(path: Path, text: str) -> None:
    """Replace `path` as a whole, so that a reader never sees half a report. Raises RecordError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror}") from error


def command_line() -> list[str]:
    """The command as typed, without the folder that repro.py lies in."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return [os.fsencode(word).decode("utf-8", "replace") for word in words]

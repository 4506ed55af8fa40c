"""report.json: how one is begun, written and compared with the measurement that ships with the code."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

SCHEMA = 1
ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "kernels" / "archive" / "measurements"
PACKAGES = ("torch", "triton", "flashinfer-python", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")


class RecordError(ValueError):
    """A stored record cannot be read, or a new one cannot be written."""


def begin(command: list[str], modes: tuple[str, ...], seed: int) -> dict:
    """The head of a record: when, by which command, from which commit, on which host and versions."""
    return {
        "schema": SCHEMA,
        "program": "evoteam",
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
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("program") != "evoteam" or record.get("schema") != SCHEMA:
        raise RecordError(f"{path} is not a record of this program with schema {SCHEMA}")
    return record


def shipped(kernel: str, folder: Path = MEASUREMENTS) -> tuple[Path, dict] | None:
    """The newest shipped record of `kernel` measured on a GPU, with its path; None where there is none."""
    records = [(path, read(path)) for path in sorted(folder.glob("*.json"))]
    records = [(path, record) for path, record in records if record["device"] and record["kernel"]["name"] == kernel]
    return max(records, key=lambda item: item[1]["created"], default=None)


def compare(now: dict, then: dict) -> list[dict]:
    """Geometric means of two records, scope by scope where both have one with the same workloads."""
    rows = []
    for name, scope in now["measurements"].items():
        other = then["measurements"].get(name)
        if not other or "summary" not in scope or scope["summary"]["n"] != other["summary"]["n"]:
            continue
        rows.append({"measurement": name, "now": scope["summary"]["geomean"], "recorded": other["summary"]["geomean"]})
    return rows


def prepare(out: Path) -> None:
    """Make the folder of a report and prove that it can be written, before anything is measured. Raises RecordError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise RecordError(f"cannot write to {out}: {error.strerror}; give another folder with --out") from error


def write(path: Path, text: str) -> None:
    """Replace `path` as a whole, so that a reader never sees half a report. Raises RecordError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror}") from error


def command_line() -> list[str]:
    """The command as typed, without the folder that repro.py lies in."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]

"""Shared by all tests: the repository root, and a run of repro.py as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def repro(tmp_path):
    """`repro(*arguments)` starts repro.py in an empty folder and returns the finished process, output as text."""

    def run(*arguments, cwd=tmp_path, **environment):
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TRITON_INTERPRET")}
        return subprocess.run(
            [sys.executable, str(ROOT / "repro.py"), *map(str, arguments)],
            cwd=cwd,
            env=clean | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run

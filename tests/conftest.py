"""Shared by all tests: repro.py as a user would start it, made-up records and runs, a page in a real browser."""

import os
import shutil
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


@pytest.fixture
def scope_record():
    """`scope_record("step", speedup=1.5)`: a made-up record of one scope over the 47 workloads."""
    from tests.made_up import make_scope

    return make_scope


@pytest.fixture
def report_record():
    """A whole report.json with made-up measurements."""
    from tests.made_up import make_report

    return make_report()


@pytest.fixture
def kda_evidence():
    """What kernels.kda_evidence gives, made up."""
    from tests.made_up import make_kda

    return make_kda()


@pytest.fixture
def run_folder(tmp_path):
    """`run_folder("name", attempts=1)`: a made-up run folder, read by the same code as a real one."""
    from tests.made_up import make_run

    return lambda name, **facts: make_run(tmp_path / name, **facts)


@pytest.fixture
def browser(tmp_path):
    """`browser(html, *flags)` opens a page in headless Chromium: its DOM is on stdout, its console on stderr."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here")
    quiet = (
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    )

    def open_page(html, *flags):
        page = tmp_path / "opened.html"
        page.write_text(html, encoding="utf-8")
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            *quiet,
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command += ["--dump-dom", "--enable-logging=stderr", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return open_page

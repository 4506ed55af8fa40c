"""A task made from the template works as it is, and bad requests write nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evoteam.new_task import NewTaskError, create

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fork(tmp_path):
    """A clone of the two packages."""
    for package in ("evoteam", "kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "archive"))
    return tmp_path


def test_new_task_passes_its_own_tests(fork):
    written = create("row-norm", fork)
    assert [str(path.relative_to(fork)) for path in written] == [
        "kernels/row_norm_task.py",
        "tests/kernels/test_row_norm_task.py",
    ]
    assert "@" not in "".join(
        path.read_text().replace("@pytest", "").replace("@dataclass", "").replace("@property", "") for path in written
    )
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written[1])],
        cwd=fork,
        env=os.environ | {"PYTHONPATH": str(fork)},
        capture_output=True,
        text=True,
        timeout=3600,  # against a hang: on a busy machine a whole evaluation takes minutes
    )
    assert "12 passed" in found.stdout, found.stdout + found.stderr


def test_existing_task_is_not_overwritten(fork):
    create("row-norm", fork)
    with pytest.raises(NewTaskError, match="row_norm_task.py exists already"):
        create("row-norm", fork)


@pytest.mark.parametrize("name", ["", "Row", "../row", "row norm", "-row", "row_norm"])
def test_bad_name_is_refused(fork, name):
    with pytest.raises(NewTaskError, match="must be words of small letters"):
        create(name, fork)
    assert not list(fork.rglob("*_norm*"))


def test_folder_without_the_project_is_refused(tmp_path):
    with pytest.raises(NewTaskError, match="has no kernels/tasks.py"):
        create("row-norm", tmp_path)
    assert not list(tmp_path.iterdir())

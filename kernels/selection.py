"""What a user picks: a kernel to judge (one that ships here, or `path.py:function`) and the workloads for it."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kernels import foreign
from kernels.workloads import FEEDBACK, Workload, load_workloads

FOLDER = Path(__file__).parent
DEFAULT = "mla_paged_decode"
# name -> module in this folder, and every file whose change makes it another kernel
SHIPPED = {
    "mla_paged_decode": ("mla_paged_decode", ("mla_paged_decode*.py", "mla_paged_decode*.cu")),
    "mla_paged_decode_triton": (
        "mla_paged_decode_triton",
        ("mla_paged_decode_triton.py", "mla_paged_decode_arguments.py"),
    ),
}
SHOWN = 100  # of what the user gave, in a message
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
        shown = foreign.one_line(spec, SHOWN)
        raise KernelError(f"{shown!r} is neither a kernel that ships here ({', '.join(SHIPPED)}) nor path.py:function")
    path, source, function = Path(path_text), _source(path_text), foreign.one_line(function, SHOWN)
    try:
        module = foreign.call(_import_file, path)
    except foreign.Raised as error:
        raise KernelError(f"{path} cannot be imported: {error}") from error
    try:
        call = foreign.call(getattr, module, function, None)
    except foreign.Raised as error:
        raise KernelError(f"{path} raised when asked for {function!r}: {error}") from error
    if not callable(call):
        raise KernelError(f"{path} defines no function {function!r}; it defines {_functions(source)}")
    _check_signature(spec, call)
    return Kernel(spec, call, hashlib.sha256(source).hexdigest())


def _source(path_text: str) -> bytes:
    try:
        if not Path(path_text).is_file():
            raise KernelError(f"{foreign.one_line(path_text, SHOWN)} does not exist or is not a file")
        return Path(path_text).read_bytes()
    except OSError as error:
        raise KernelError(f"cannot read {foreign.one_line(path_text, SHOWN)}: {error.strerror}") from error


def shipped_sha256(name: str) -> str:
    """Hash over the source files of a kernel that ships here."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SHIPPED[name][1] for path in FOLDER.glob(pattern)}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _import_file(path: Path) -> ModuleType:
    name = f"judged_kernel_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    known = dict(sys.modules)
    sys.modules[name] = module  # dataclasses and triton.jit look their module up there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        module_spec.loader.exec_module(module)
        return module
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        sys.modules.update(known)  # the file may have thrown out or replaced what everybody else still uses


def _functions(source: bytes) -> str:
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return foreign.one_line(", ".join(names)) if names else "none"


def _check_signature(spec: str, call: Callable) -> None:
    try:
        signature = foreign.call(inspect.signature, call)
    except foreign.Raised:
        return  # some callables do not tell; the first call will
    try:
        signature.bind(*ARGUMENTS)
    except TypeError as error:
        try:
            shown = foreign.one_line(foreign.call(str, signature))
        except foreign.Raised:
            shown = "that cannot be shown"
        raise KernelError(
            f"{spec} has signature {shown}, wanted the positional arguments {', '.join(ARGUMENTS)} ({error})"
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
    texts = [text.strip() for text in spec.removeprefix("family:").split(",")]
    shown = foreign.one_line(spec, SHOWN)
    if not any(texts):
        texts = []  # nothing is named at all
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise SelectionError(f"{shown!r} is not a choice of workloads; {wanted}")
    known = {str(w.family if by_family else w.index) for w in everything}
    named = {text.lstrip("0") or "0" for text in texts}  # as text: int() refuses numbers of thousands of digits
    unknown = sorted(named - known, key=lambda text: (len(text), text))
    if unknown or not named:
        what = f"[{foreign.one_line(', '.join(unknown), SHOWN)}]" if unknown else "no workload"
        raise SelectionError(f"{shown!r} names {what}; {wanted}")
    return tuple(w for w in everything if str(w.family if by_family else w.index) in named)

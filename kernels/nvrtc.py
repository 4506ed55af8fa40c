"""Compile a CUDA C++ file with NVRTC to a cubin, once a machine: no nvcc, no headers, no GPU needed to compile.

The cubin is kept on disk under a hash of everything that decides its content, so a second process starts without compiling.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


class CompileError(RuntimeError):
    """NVRTC rejected the source, or NVRTC itself is missing; the message says which."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel and what the assembler said about it.

    ``registers`` a thread; ``spill_bytes`` stored and loaded a thread; ``stack_bytes`` a thread; ``static_shared_bytes`` a CTA.
    """

    code: bytes
    kernel: str
    arch: str
    nvrtc: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/evoteam/cubin``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evoteam" / "cubin"


def compile_cubin(source: Path, kernel: str, arch: str, defines: Mapping[str, int] | None = None) -> Cubin:
    """Compile ``kernel`` (an ``extern "C"`` name) of ``source`` for ``arch`` ("sm_90a") with the given macros.

    Raises CompileError with NVRTC's log. A broken or unwritable cache costs time, never an error.
    """
    version = _nvrtc_version()
    text = Path(source).read_text()
    defines = dict(sorted((defines or {}).items()))
    key = hashlib.sha256(json.dumps([text, kernel, arch, defines, version]).encode()).hexdigest()
    folder = cache_folder() / key[:32]
    try:
        facts = json.loads((folder / "facts.json").read_text())
        code = (folder / "kernel.cubin").read_bytes()
        if hashlib.sha256(code).hexdigest() == facts.pop("sha256"):
            return Cubin(code=code, **facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, torn or of another layout: compile again
    cubin = _compile(text, Path(source).name, kernel, arch, defines, version)
    _store(folder, cubin)
    return cubin


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompileError(f"NVRTC is not available ({error}); install it with: pip install cuda-core nvidia-cuda-nvrtc") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC does not answer for its version: {status.name}")
    return f"{major}.{minor}"


def _compile(text: str, name: str, kernel: str, arch: str, defines: Mapping[str, int], version: str) -> Cubin:
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v"]
    options += ["--no-cache"]  # a hit in the driver's cache comes without the assembler's report
    options += [f"-D{key}={value}" for key, value in defines.items()]
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{name}: NVRTC took no program: {status.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").strip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} does not compile for {arch} with {dict(defines)} (NVRTC {version}, {status.name}):\n{log}")
        code = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(code, kernel, arch, version, **_resources(log, kernel))


def _read(size_of, read, program) -> bytes:
    _, size = size_of(program)
    buffer = bytearray(size)
    read(program, buffer)
    return bytes(buffer)


def _resources(log: str, kernel: str) -> dict[str, int]:
    """Registers, spills, stack and static shared memory from the assembler's ``-v`` lines for ``kernel``."""
    start = log.find(f"'{kernel}'")
    lines = log[start:] if start >= 0 else log

    def number(pattern: str) -> int:
        found = re.search(pattern, lines)
        return int(found.group(1)) if found else 0

    registers = number(r"Used (\d+) registers")
    if not registers:
        raise CompileError(f"the assembler's report names no registers for {kernel}; its text was:\n{log}")
    return {
        "registers": registers,
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "static_shared_bytes": number(r"(\d+) bytes smem"),
    }


def _store(folder: Path, cubin: Cubin) -> None:
    """Write the cubin beside its final place and rename, so that no reader sees half of it."""
    facts = asdict(cubin)
    code = facts.pop("code")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            staged = Path(temporary) / "entry"
            staged.mkdir()
            (staged / "kernel.cubin").write_bytes(code)
            (staged / "facts.json").write_text(json.dumps({**facts, "sha256": hashlib.sha256(code).hexdigest()}))
            if folder.exists():  # an entry that could not be read
                os.rename(folder, Path(temporary) / "old")
            os.rename(staged, folder)
    except OSError:
        pass  # another process was first, or the cache is not writable: only time is lost

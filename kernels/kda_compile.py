"""Machine code of the portable KDA kernels for GPUs that are not here, and what it says: registers, spills, matrix
instructions.

Needs Triton alone: its wheel brings the assemblers for NVIDIA and AMD and NVIDIA's disassembler.
"""

import hashlib
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import kda_prefill as kda

TARGETS = {
    "sm_90a": (GPUTarget("cuda", 90, 32), "sm_90"),
    "sm_100a": (GPUTarget("cuda", 100, 32), "cuda"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hip"),
}
HEADS = 32  # of the tensors compiled for: row strides are compile-time constants
MATRIX_INSTRUCTIONS = {"cuda": r"HGMMA|HMMA|UTC\w*MMA", "hip": r"v_mfma\w*"}


@dataclass(frozen=True, slots=True)
class Machine:
    """One kernel's machine code. Registers and spills a thread, shared memory a CTA in bytes, instructions by name."""

    kernel: str
    target: str
    triton: str
    sha256: str
    code_bytes: int
    registers: int
    spilled: int  # NVIDIA: local loads and stores; AMD: spilled vector registers
    shared_bytes: int
    matrix_instructions: dict[str, int]

    def to_json(self) -> dict:
        return asdict(self)


def kernels(target: str) -> dict[str, tuple]:
    """Name -> (function, arguments, constants, warps) of every kernel as `kda_prefill` would launch it on `target`."""
    kind = TARGETS[target][1]
    precision = "ieee" if kind == "hip" else "tf32"
    schedule = kda.choose_schedule(target=kind, sms=132, sequences=1, heads=12, tokens=8192)
    operands = {"w": "*bf16", "qg": "*bf16", "kg": "*bf16", "ut": "*bf16", "aqk": "*bf16", "decay": "*fp32"}
    counts = {"num_seqs": "i32", "seq_len": "i32", "num_heads": "i32"}
    inputs = ("q", "k", "v", "g", "beta")
    prologue = (
        dict.fromkeys(inputs, "*bf16") | {"A_log": "*fp32", "dt_bias": "*fp32", "cu_seqlens": "*i64"} | operands
        | {f"{name}_{part}": "i32" for name in inputs for part in ("batch", "head")}
        | {"scale": "fp32", "lower_bound": "fp32"} | counts
    )  # fmt: skip
    rows = {f"{name.upper()}_ROW": HEADS * kda.HEAD_DIM for name in inputs[:4]} | {"BETA_ROW": HEADS}
    shapes = {"D": kda.HEAD_DIM, "BT": kda.CHUNK, "VARLEN": True}
    states = {"initial": "*fp32", "final": "*fp32", "summary": "*fp32", "cu_seqlens": "*i64"}
    recurrence = (
        operands | {"out": "*bf16"} | states | dict.fromkeys(("out_batch", "out_row", "out_head"), "i32") | counts
    )
    scan = {"summary": "*fp32", "initial": "*fp32", "cu_seqlens": "*i64", "seq_len": "i32", "num_heads": "i32"}
    walk = shapes | {"INITIAL": True, "STAGES": schedule.stages}
    scan_shapes = shapes | {"SPAN": 2048, "BV": kda.SCAN_BLOCK_V, "INITIAL": True, "PRECISION": precision, "STAGES": 2}
    scan_shapes.pop("BT")
    gates = shapes | rows | {"PRECISION": precision}
    serial = walk | {"BV": schedule.block_v, "SEGMENT": 0, "SUMMARIZE": False}
    summary = walk | {"BV": min(schedule.block_v, 64), "SEGMENT": 32, "SUMMARIZE": True}
    return {
        "prologue, safe gate": (kda._prologue, prologue, gates | {"SAFE": True}, 4),
        "prologue, softplus gate": (kda._prologue, prologue, gates | {"SAFE": False}, 4),
        "recurrence": (kda._recurrence, recurrence, serial, schedule.warps),
        "segment summary": (kda._recurrence, recurrence, summary, 4),
        "segment scan": (kda._scan, scan, scan_shapes, 4),
    }


def compile_kernel(target: str, name: str) -> Machine:
    """Compile one kernel of `kernels(target)`. Raises what Triton raises when it cannot."""
    function, arguments, constants, warps = kernels(target)[name]
    # what the launcher finds out about real arguments: addresses and strides that 16 divides
    aligned = [
        i
        for i, (key, kind) in enumerate(arguments.items())
        if kind[0] == "*" or key.endswith(("_batch", "_row", "_head"))
    ]
    source = ASTSource(
        function,
        signature=arguments | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    gpu = TARGETS[target][0]
    compiled = triton.compile(source, target=gpu, options={"num_warps": warps})
    code = compiled.asm["cubin" if gpu.backend == "cuda" else "hsaco"]
    read = _read_cubin if gpu.backend == "cuda" else _read_amdgcn
    registers, spilled, text = read(code if gpu.backend == "cuda" else compiled.asm["amdgcn"])
    found = re.findall(rf"\b({MATRIX_INSTRUCTIONS[gpu.backend]})", text)
    return Machine(
        kernel=name,
        target=target,
        triton=triton.__version__,
        sha256=hashlib.sha256(code).hexdigest(),
        code_bytes=len(code),
        registers=registers,
        spilled=spilled,
        shared_bytes=compiled.metadata.shared,
        matrix_instructions={instruction: found.count(instruction) for instruction in sorted(set(found))},
    )


def _read_cubin(code: bytes) -> tuple[int, int, str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, text = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return int(re.search(r"REG:(\d+)", usage)[1]), len(re.findall(r"\b(?:STL|LDL)\b", text)), text


def _read_amdgcn(text: str) -> tuple[int, int, str]:
    def number(field):
        return int(re.search(rf"\.{field}:\s*(\d+)", text)[1])

    return number("vgpr_count"), number("vgpr_spill_count"), text

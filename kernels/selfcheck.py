"""What can be known of the kernels without a GPU: right in Triton's interpreter, and what the compilers make of them.

The interpreter runs programs one after another and computes in fp32: it shows that the algorithm is right, not that it
is free of races, and nothing about speed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kernels import foreign, nvrtc
from kernels.nvrtc import CompileError
from kernels.selection import load_kernel
from kernels.tasks import load_task
from kernels.workloads import Workload

TIMEOUT_S = 75
SEED = 7
H200_MULTIPROCESSORS = 132
LOG_TAIL = 1 << 16  # bytes of a kernel's output that are looked at
MOST_REQUESTS = 64  # the interpreter takes minutes for the plan of a larger batch
Progress = Callable[[int, int, str], object]
Job = tuple[str, str, Callable[[], dict]]  # kernel, compiler, what compiles one variant


def interpret(spec: str, progress: Progress, timeout_s: float = TIMEOUT_S) -> list[dict]:
    """Run kernel `spec` on small awkward CPU inputs, in a process of its own with Triton's interpreter on.

    One dict a case: name, reason ("" when right), error_ratio, lse_error, seconds. A case not reached says why.
    """
    cases = _cases()
    with tempfile.TemporaryDirectory() as folder:
        rows_file, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        rows_file.touch()
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "kernels.selfcheck", spec, str(rows_file)]
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline, ending = time.monotonic() + timeout_s, f"not reached within {timeout_s:.0f} s"
        try:
            while time.monotonic() < deadline:
                try:
                    child.wait(timeout=0.2)
                    ending = _last_line(log) or f"the process ended with status {child.returncode}"
                    break
                except subprocess.TimeoutExpired:
                    rows = _rows(rows_file)
                    progress(len(rows), len(cases), _name(cases[min(len(rows), len(cases) - 1)]))
        finally:
            child.kill()
            child.wait()
        rows = _rows(rows_file)
    unreached = {"reason": ending, "error_ratio": None, "lse_error": None, "seconds": None}
    return rows + [{"name": _name(case)} | unreached for case in cases[len(rows) :]]


def _name(case: Workload) -> str:
    return case.uuid.removeprefix("awkward-")


def _cases() -> list[Workload]:
    return [case for case in load_task("mla-paged-decode").awkward if case.batch <= MOST_REQUESTS]


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _last_line(log: Path) -> str:
    with log.open("rb") as output:
        output.seek(max(log.stat().st_size - LOG_TAIL, 0))
        lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return foreign.one_line(lines[-1]) if lines else ""


def _interpret_here(spec: str, rows_file: Path) -> None:
    """The child's side of `interpret`: every case, a line as soon as it is judged."""
    import torch

    torch.set_num_threads(1)
    task, kernel = load_task("mla-paged-decode"), load_kernel(spec)
    with rows_file.open("a") as rows:
        for case in _cases():
            start = time.monotonic()
            inputs = task.make_inputs(case, SEED, torch.device("cpu"))
            row = {"name": _name(case), "reason": "", "error_ratio": None, "lse_error": None}
            try:
                errors = task.compare(foreign.call(kernel.call, *inputs), task.reference(inputs))
                row |= {"reason": errors.reason, "error_ratio": errors.error_ratio, "lse_error": errors.lse_error}
            except foreign.Raised as error:
                row["reason"] = f"raised {error}"
            except Exception as error:  # outputs that cannot even be compared
                row["reason"] = f"gave outputs that cannot be compared: {foreign.describe(error)}"
            print(json.dumps(row | {"seconds": time.monotonic() - start}), file=rows, flush=True)


def compile_all(progress: Progress) -> list[dict]:
    """Compile every variant that the 47 workloads use for sm_90.

    One dict a variant: kernel, variant, registers and spill_bytes a thread, shared_bytes a CTA, compiler. A compiler
    that is not here gives a row whose `variant` says so and no numbers.
    """
    workloads = load_task("mla-paged-decode").workloads
    jobs = [*_cuda_jobs(workloads), *_triton_jobs(workloads)]
    rows = []
    for i, (kernel, compiler, job) in enumerate(jobs):
        try:
            rows.append(job())
        except (CompileError, ImportError, RuntimeError) as error:
            missing = dict.fromkeys(("registers", "spill_bytes", "shared_bytes"))
            rows.append({"kernel": kernel, "variant": foreign.one_line(str(error)), "compiler": compiler} | missing)
        progress(i + 1, len(jobs), f"{compiler}, {kernel}")
    return rows


def _cuda_jobs(workloads: tuple[Workload, ...]) -> list[Job]:
    from kernels.mla_paged_decode_cuda import ARCH, SOURCE, choose_variant

    shapes = {"head_groups": 1, "sm_count": H200_MULTIPROCESSORS, "fp16": False, "paged": False}
    variants = dict.fromkeys(choose_variant(batch=w.batch, tokens=w.tokens, **shapes) for w in workloads)

    def job(variant) -> dict:
        named = ", ".join(f"{name}={int(value)}" for name, value in asdict(variant).items())
        cubin = nvrtc.compile_cubin(SOURCE, "mla_paged_decode", ARCH, variant.defines())
        return {
            "kernel": SOURCE.name,
            "variant": f"{ARCH}, {named}",
            "registers": cubin.registers,
            "spill_bytes": cubin.spill_bytes,
            "shared_bytes": cubin.static_shared_bytes + variant.shared_bytes(),
            "compiler": f"NVRTC {cubin.nvrtc}",
        }

    return [(SOURCE.name, "NVRTC", partial(job, variant)) for variant in variants]


def _triton_jobs(workloads: tuple[Workload, ...]) -> list[Job]:
    def job(batch: int) -> dict:
        from kernels import mla_paged_decode_triton as portable

        if portable.INTERPRETED:
            raise RuntimeError("TRITON_INTERPRET is set; unset it to compile")
        return {key: value for key, value in portable.cross_compile("sm_90", batch=batch).items() if key != "ptx"}

    batches = (1, max(workload.batch for workload in workloads))
    return [("mla_paged_decode_triton.py", "Triton", partial(job, batch)) for batch in batches]


if __name__ == "__main__":
    _interpret_here(sys.argv[1], Path(sys.argv[2]))

"""Evaluating candidates without importing torch: a separate evaluator process does the work.

Threat model
------------
A candidate is hostile code. It runs alone in a fresh, confined process (`sandbox.py` has the levels). Clock, inputs,
reference, gate and verdict belong to the evaluator process, which shares with the candidate only the memory of inputs
and outputs, one socket and one output file. Every kind of cheat listed here has candidates in `tests/exploits/`.

Covered: wrong answers of every kind (zeros, NaN, -inf where none is due, other dtypes, too low a precision, one wrong
element); patched clocks and synchronization; results kept by pointer, shape or fingerprint; results left over in
memory; batched, deferred and background work, also by processes of its own or by the one that confines it; forged
replies; edited inputs; files outside its folder, network, other processes; hanging, forking, flooding the log, filling
disk or memory, killing its own process, outliving its limit.

Not covered: bugs of the operating system's kernel, of the GPU driver and of the GPU (a kernel can hang or crash the
GPU, and read what other processes left in its memory); a CPU candidate that moves to a quieter core, or shares its work
with processes that start and end within one call; approximations that the gate and the distribution of inputs allow;
whatever the recorded level of confinement leaves open. Run the code of strangers on a machine of its own.
"""

import hashlib
import inspect
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from evoteam.judging import processes
from evoteam.judging.child import Limits
from evoteam.judging.files import read_regular, write_atomically
from evoteam.judging.verdict import MAX_SOURCE_BYTES, Verdict

ROOT = Path(__file__).resolve().parents[2]
EVALUATOR_FILES = (
    *("arena", "child", "confine", "evaluator", "files", "gate", "gpu_bench", "gpu_harness", "gpu_side"),
    *("harness", "judge", "processes", "sandbox", "verdict", "wall_bench"),
)
TASK_FILES = ("tasks.py", "workloads.py", "workloads.json", "reference.py", "baselines.py", "timing.py", "measure.py")
COOKIE = "EVOTEAM_EVALUATION"
LOG = "log.txt"
READ_BYTES = 16 * MAX_SOURCE_BYTES  # what is longer than a source may be gets a verdict, what is absurd does not
GRACE_SECONDS = 420  # beside the candidate's own limits: start-up, references, waiting for another timing


class EvaluationError(RuntimeError):
    """The evaluation could not be done; nothing is said about the candidate."""


def read_source(path: Path) -> bytes:
    """The bytes of a candidate. Raises EvaluationError when they cannot be had."""
    try:
        source = read_regular(path, READ_BYTES + 1)
    except OSError as error:
        raise EvaluationError(f"cannot read the candidate {path}: {error.strerror}") from error
    if len(source) > READ_BYTES:
        raise EvaluationError(
            f"cannot read the candidate {path}: it has more than {READ_BYTES >> 20} MiB, "
            f"a source may have {MAX_SOURCE_BYTES >> 20} MiB"
        )
    return source


def _write_log(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, durable=False)
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror}") from error


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def evaluator_sha256() -> str:
    """Identifies the evaluator: a hash over its source files."""
    return _digest([Path(__file__).with_name(f"{name}.py") for name in EVALUATOR_FILES])


def task_sha256(name: str) -> str:
    """Identifies a task: a hash over the sources of its definition, workloads, reference, baseline and timing."""
    from kernels import tasks

    folder = Path(tasks.__file__).parent
    paths = {folder / file for file in TASK_FILES} | {Path(inspect.getfile(tasks.load_task(name).make_inputs))}
    return _digest([path for path in paths if path.exists()])


class Evaluator:
    """Evaluates candidates for one task, one after another; a context manager.

    The evaluator process stays warm between candidates and keeps the next candidate's process ready, but no process is
    ever given a second candidate.
    """

    def __init__(self, task: str, *, unsafe: bool = False, limits: Limits | None = None):
        self.task, self.unsafe, self.limits = task, unsafe, limits or Limits()
        self.task_sha256, self.evaluator_sha256 = task_sha256(task), evaluator_sha256()
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> "Evaluator":
        self._start()
        return self

    def __exit__(self, kind, *_) -> None:
        if kind and self.process:
            self.process.terminate()  # it ends at once what it is doing
        self._stop()

    def evaluate(
        self, source: Path, attempt_dir: Path, *, full: bool = False, best: float | None = None, more: bool = True
    ) -> Verdict:
        """Judges one source file; its log goes into `attempt_dir`.

        full: run all workloads, not only the task's feedback. best: run all of them if the score is above this one.
        more: another candidate will follow, so have its process ready.
        A verdict that fails through a GPU left broken is asked for once more, from a new process.
        Raises EvaluationError when the source cannot be read, the log not be written, or no confinement works here.
        """
        source, log = Path(source).absolute(), Path(attempt_dir) / LOG
        read_source(source)
        _write_log(log, "")  # an earlier one is not this candidate's
        request = {"source": str(source), "full": full, "best": best, "more": more}
        for _ in range(2):
            judged = self._judged(request)
            healthy = judged.pop("healthy")
            if not healthy:
                self._stop()  # the next one gets a new process
            if healthy or judged["failure"] != "evaluator":
                break  # else a GPU that an earlier candidate left broken failed this one
        _write_log(log, judged.pop("output"))
        return Verdict(task=self.task, task_sha256=self.task_sha256, evaluator_sha256=self.evaluator_sha256, **judged)

    def _start(self) -> None:
        self.cookie = f"{COOKIE}={secrets.token_hex(16)}"
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        options = {"task": self.task, "unsafe": self.unsafe, "limits": asdict(self.limits)}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        name, value = self.cookie.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evoteam.judging.judge", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUTF8": "1", name: value},
            start_new_session=True,
        )

    def _judged(self, request: dict) -> dict:
        if self.process is None or self.process.poll() is not None:
            self._start()
        deadline = time.monotonic() + self.limits.total_s + GRACE_SECONDS
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line(deadline)
        except (BrokenPipeError, TimeoutError) as error:
            line = b""
            reason = str(error)
        else:
            reason = "it ended"
        if line:
            return json.loads(line)
        self.errors.seek(0)
        text = self.errors.read().decode("utf-8", "replace").strip()
        self._stop()
        raise EvaluationError(f"the evaluator process gave no verdict ({reason}):\n{text[-2000:]}")

    def _line(self, deadline: float) -> bytes:
        stream, received = self.process.stdout.fileno(), b""
        while not received.endswith(b"\n"):
            if not select.select([stream], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"no answer within {self.limits.total_s + GRACE_SECONDS:.0f} s")
            part = os.read(stream, 1 << 20)
            if not part:
                return b""
            received += part
        return received

    def _stop(self) -> None:
        if self.process is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        processes.sweep(self.cookie, [self.process.pid])
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()
        self.process = None


def evaluate(
    source: Path,
    task: str,
    attempt_dir: Path,
    *,
    unsafe: bool = False,
    full: bool = False,
    limits: Limits | None = None,
) -> Verdict:
    """Judges one candidate with an evaluator process of its own. See `Evaluator.evaluate`."""
    with Evaluator(task, unsafe=unsafe, limits=limits) as evaluator:
        return evaluator.evaluate(source, attempt_dir, full=full, more=False)

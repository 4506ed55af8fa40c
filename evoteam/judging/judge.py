"""The evaluator process: `python -m evoteam.judging.judge OPTIONS`, a JSON request a line in, a verdict a line out.

It imports torch, the task and its reference, which the caller's process never does, and it ends when the caller does.
While it gets ready, and after every evaluation, it starts the next candidate's confined process, which imports torch at
the same time.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from evoteam.judging import processes, sandbox
from evoteam.judging.child import Child, Failure, Limits
from evoteam.judging.evaluator import LOG, EvaluationError, read_source
from evoteam.judging.verdict import MAX_SOURCE_BYTES, head_and_tail, printable
from kernels.tasks import TaskError, load_task

MAX_LINE = 1_000  # a pattern may take time that is quadratic in it
MESSAGE_LIMIT = 4_000
LOG_LIMIT = 200_000
FORBIDDEN = {
    "evoteam": "the evaluator is not the candidate's to use",
    "kernels": "a candidate is one self-contained file",
    "flashinfer": "the baseline cannot be the candidate",
}
LOCK_SECONDS = 300


def screen(source: bytes, entry_point: str) -> ast.Module:
    """The parsed source. Raises Failure when it is not a module that defines the entry point and stands alone."""
    if len(source) > MAX_SOURCE_BYTES:
        raise Failure("screen", f"the source has {len(source):,} bytes, at most {MAX_SOURCE_BYTES:,} are allowed")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Failure("screen", f"the source does not parse: {type(error).__name__}: {error}") from error
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id)
                elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                    names |= {alias.asname or alias.name for alias in inner.names}
                elif isinstance(inner, ast.FunctionDef):
                    names.add(inner.name)
    if entry_point not in names:
        found = ", ".join(sorted(names)) or "nothing"
        raise Failure("screen", f"the source does not define {entry_point}; it defines {found}")
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            reason = FORBIDDEN.get(module.split(".")[0])
            if reason:
                raise Failure("screen", f"line {node.lineno} imports {module}: {reason}")
    return tree


def declared_techniques(tree: ast.Module) -> list[str]:
    """Tags in a module-level `TECHNIQUES = [...]` of string literals."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "TECHNIQUES" for t in node.targets):
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return []
            tags = value if isinstance(value, (list, tuple)) else []
            return [printable(str(tag).encode("utf-8", "replace"))[:64] for tag in tags[:32]]
    return []


def confirmed_techniques(tree: ast.Module, patterns: dict[str, str]) -> list[str]:
    """Tags whose pattern is found in the code; comments, docstrings and the declaration itself do not count."""
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [line for line in node.body if not _is_talk(line)] or [ast.Pass()]
    try:
        code = ast.unparse(tree)
    except RecursionError as error:
        raise Failure("screen", "the source is nested too deeply") from error
    # a string that holds a program in another language is one line of code here
    lines = [line[:MAX_LINE] for line in re.split(r"\n|\\n", code)]
    return [tag for tag, pattern in patterns.items() if any(re.search(pattern, line) for line in lines)]


def _is_talk(line: ast.stmt) -> bool:
    if isinstance(line, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "TECHNIQUES" for target in line.targets)
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


@dataclass(slots=True)
class Evaluation:
    """What is known so far of the candidate at hand."""

    phase: str = "screen"
    source_sha256: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    rows: list[dict] = field(default_factory=list)
    score: float = 0.0
    full_score: float | None = None
    techniques: dict = field(default_factory=lambda: {"declared": [], "confirmed": []})

    @contextlib.contextmanager
    def enter(self, phase: str):
        self.phase, start = phase, time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.monotonic() - start, 3)


class Judge:
    """One task, one level of confinement, any number of candidates one after another."""

    def __init__(self, task_name: str, *, unsafe: bool, limits: Limits):
        processes.become_subreaper()
        self.limits = limits
        self.task = load_task(task_name)
        self.cuda = self.task.device == "cuda"
        self.confinement = sandbox.choose(unsafe, self.cuda)
        self.cpu = None if self.cuda else max(os.sched_getaffinity(0))
        self.spare: Child | None = None

    def prepare(self) -> None:
        """Starts the process that the next candidate will get."""
        with _on_cpu(self.cpu):
            self.spare = Child(self.confinement, self.limits, gpu_task=self.task.name if self.cuda else "")

    def load_libraries(self) -> None:
        import torch

        if self.cuda and not torch.cuda.is_available():
            name = self.task.name
            sys.exit(f"task {name} is judged on a GPU and none is here; mla-paged-decode-cpu is judged on any machine")
        if self.cuda:
            from evoteam.judging.gpu_side import GpuSide

            self.side = GpuSide.on_gpu(self.task.name)
        else:
            torch.set_num_threads(1)
            others = os.sched_getaffinity(0) - {self.cpu}
            if others:
                os.sched_setaffinity(0, others)

    def judge(self, source_path: Path, *, full: bool, best: float | None) -> dict:
        """The verdict on one source file: the fields of a Verdict that are known here, and the candidate's `output`."""
        evaluation, failure = Evaluation(), None
        child, self.spare = self.spare, None
        try:
            self._run(evaluation, child, source_path, full, best)
        except Failure as problem:
            failure = problem
        except Exception:
            failure = Failure("evaluator", traceback.format_exc()[-MESSAGE_LIMIT:])
        except SystemExit:
            child.end()
            raise
        if evaluation.phase == "screen":
            self.spare = child
        elif child.end() and failure is None:
            failure = Failure("cheat", "some of its processes could not be ended")
        return self._verdict(evaluation, failure, child)

    def healthy(self) -> bool:
        """Whether this process can go on: some states of the GPU only a new process gets out of."""
        if not self.cuda:
            return True
        import torch

        try:
            return torch.ones(2, device="cuda").sum().item() == 2
        except RuntimeError:
            return False

    def _run(self, evaluation: Evaluation, child: Child, source_path: Path, full: bool, best: float | None) -> None:
        task = self.task
        with evaluation.enter("screen"):
            try:
                source = read_source(source_path)
            except EvaluationError as error:
                raise Failure("evaluator", str(error)) from error
            evaluation.source_sha256 = hashlib.sha256(source).hexdigest()
            tree = screen(source, task.entry_point)
            declared, confirmed = declared_techniques(tree), confirmed_techniques(tree, task.techniques)
            evaluation.techniques = {"declared": declared, "confirmed": confirmed}
        with evaluation.enter("import"):
            child.seconds_left = self.limits.import_s + 60  # the harness's own start is not the candidate's
            try:
                child.ready()
            except Failure as problem:
                reason = f"the confined process did not start: {problem.message}"
                raise Failure("evaluator", reason, explained=False) from problem
            child.seconds_left = self.limits.import_s
            bench = self._load(child, source)
        try:
            with evaluation.enter("compile"):
                child.seconds_left = self.limits.compile_s
                bench.first_call()
            feedback = [task.workloads[i] for i in task.feedback]
            with evaluation.enter("check"):
                child.seconds_left = self.limits.check_s
                for workload in (*task.awkward, *feedback):
                    bench.check(workload)
            with timing_lock(), evaluation.enter("time"):
                child.seconds_left = self.limits.time_s
                evaluation.rows += [bench.time(workload) for workload in feedback]
            evaluation.score = geomean(evaluation.rows)
            if full or (best is not None and evaluation.score > best):
                rest = [workload for i, workload in enumerate(task.workloads) if i not in task.feedback]
                with timing_lock(), evaluation.enter("full"):
                    child.seconds_left = self.limits.full_s
                    for workload in rest:
                        bench.check(workload)
                        evaluation.rows.append(bench.time(workload))
                evaluation.full_score = geomean(evaluation.rows)
        finally:
            bench.close()

    def _load(self, child: Child, source: bytes):
        """Gives the child its source and returns the bench that will test it."""
        from evoteam.judging.arena import Region
        from evoteam.judging.gpu_bench import GpuBench
        from evoteam.judging.wall_bench import WallBench, fork_baseline

        with tempfile.TemporaryFile() as file:
            file.write(source)
            file.seek(0)
            memory = Region() if self.cuda else None
            fds = (file.fileno(), memory.fd) if self.cuda else (file.fileno(),)
            reply = child.request("load", fds, entry_point=self.task.entry_point)
        if "error" in reply:
            raise Failure("import", reply["message"])
        if self.cuda:
            return GpuBench(self.task, child, self.side, memory)
        with _on_cpu(self.cpu):
            return WallBench(self.task, child, fork_baseline(self.task))

    def _verdict(self, evaluation: Evaluation, failure: Failure | None, child: Child) -> dict:
        log = child.log(LOG_LIMIT) if evaluation.phase != "screen" else ""
        worst = min(evaluation.rows, key=lambda row: row["ratio"], default={})
        message = ""
        if failure:
            worst = failure.row
            message = head_and_tail(failure.message.encode("utf-8", "replace"), MESSAGE_LIMIT)
            if not failure.explained and log.strip():
                message += "\n\nEnd of its output:\n" + printable(log.encode("utf-8", "replace"))[-MESSAGE_LIMIT // 2 :]
        on_gpu = sum(evaluation.seconds.get(phase, 0) for phase in ("compile", "check", "time", "full"))
        return {
            "source_sha256": evaluation.source_sha256,
            "phase": evaluation.phase,
            "failure": failure.kind if failure else "",
            "score": 0.0 if failure else evaluation.score,
            "full_score": None if failure else evaluation.full_score,
            "rows": evaluation.rows,
            "worst": worst,
            "message": message,
            "log": LOG,
            "output": log,
            "confinement": self.confinement.record(),
            "device": _device(self.cuda),
            "versions": _versions(),
            "seconds": evaluation.seconds,
            "gpu_seconds": round(on_gpu, 3) if self.cuda else 0.0,
            "techniques": evaluation.techniques,
        }


def geomean(rows: list[dict]) -> float:
    return statistics.geometric_mean([row["ratio"] for row in rows])


@contextlib.contextmanager
def _on_cpu(cpu: int | None):
    """What is started in here inherits this affinity."""
    before = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def timing_lock():
    """One timing at a time on this machine and account."""
    path = os.path.join(tempfile.gettempdir(), f"evoteam-timing-{os.getuid()}.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Failure("evaluator", f"another evaluation has held {path} for {LOCK_SECONDS} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _device(cuda: bool) -> str:
    if cuda:
        import torch

        return torch.cuda.get_device_name()
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else os.uname().machine


def _versions() -> dict[str, str]:
    from kernels.device import versions

    return versions()


def main() -> None:
    options = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not become a reply
    try:
        judge = Judge(options["task"], unsafe=options["unsafe"], limits=Limits(**options["limits"]))
    except (sandbox.SandboxError, TaskError) as error:
        sys.exit(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was told to end"))
    try:
        judge.prepare()
        judge.load_libraries()
        for line in sys.stdin:
            request = json.loads(line)
            if judge.spare is None or judge.spare.process.poll() is not None:
                judge.prepare()
            verdict = judge.judge(Path(request["source"]), full=request["full"], best=request["best"])
            healthy = judge.healthy()
            print(json.dumps(verdict | {"healthy": healthy}), file=replies, flush=True)
            if not healthy:
                break
            if request["more"] and judge.spare is None:
                judge.prepare()
    finally:
        if judge.spare:
            judge.spare.end()


if __name__ == "__main__":
    main()

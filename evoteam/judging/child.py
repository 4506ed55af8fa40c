"""The evaluator's end of a candidate's process: requests with deadlines, a watch on its use, and its certain end."""

import json
import math
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from evoteam.judging import processes, sandbox

HARNESS = Path(__file__).with_name("harness.py")
COOKIE = "EVOTEAM_CANDIDATE"
OWN_KERNELS = ("mla_paged_decode*", "kda_prefill*", "kda_prologue*", "*.cu")
WATCH_SECONDS = 0.02
TERM_SECONDS = 0.5
HOLD_SECONDS = 5.0  # a thread may be waiting for a disk
MESSAGE_BYTES = 1 << 18


class Failure(Exception):
    """Why an evaluation ends.

    kind: one of the verdict's failures. row: the workload it happened on. explained: the message holds all there is to
    know, the candidate's output adds nothing.
    """

    def __init__(self, kind: str, message: str, row: dict | None = None, *, explained: bool = True):
        super().__init__(message)
        self.kind, self.message, self.row, self.explained = kind, message, row or {}, explained


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds each phase may take, and what the candidate's processes may use together."""

    import_s: float = 60.0
    compile_s: float = 180.0
    check_s: float = 60.0
    time_s: float = 120.0
    full_s: float = 300.0
    workload_s: float = 0.5  # spent on timing one workload, at most
    memory_bytes: int = 8 << 30
    processes: int = 256
    file_bytes: int = 256 << 20
    open_files: int = 1024

    def seconds(self, phase: str) -> float:
        return getattr(self, f"{phase}_s")

    @property
    def total_s(self) -> float:
        return sum(self.seconds(phase) for phase in ("import", "compile", "check", "time", "full"))


class Peer:
    """A process that answers requests: one reply a request, repeating its nonce.

    at_fault: the kind of a failure that this process alone can cause.
    """

    at_fault = "evaluator"

    def __init__(self, sock: socket.socket, pid: int):
        self.sock, self.pid = sock, pid
        self.cpu_mark, self.arrivals_mark = 0, []
        self.seconds_left = math.inf  # what the phase has left; only waiting for replies counts

    def send(self, op: str, fds: tuple[int, ...] = (), **fields) -> str:
        nonce = secrets.token_hex(8)
        message = json.dumps({"op": op, "nonce": nonce, **fields}).encode()
        try:
            if fds:
                socket.send_fds(self.sock, [message], list(fds))
            else:
                self.sock.send(message)
        except OSError:
            self.lost()
        return nonce

    def receive(self, nonce: str) -> dict:
        """The reply to `nonce`. Raises Failure when it does not come in time or is not what it must be."""
        reply, sender = self._next_message()
        if reply.get("nonce") != nonce or sender not in (None, self.pid):
            raise Failure("cheat", "the candidate's process sent a reply of its own instead of the harness's")
        return reply

    def _next_message(self) -> tuple[dict, int | None]:
        start = time.monotonic()
        while not self._readable(min(WATCH_SECONDS, self.seconds_left + start - time.monotonic())):
            if time.monotonic() - start >= self.seconds_left:
                raise Failure("timeout", "it took longer than this phase may take", explained=False)
            self.watch()
        self.seconds_left -= time.monotonic() - start
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(64))
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.lost()
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            reply = {}
        for name in reply.keys() & {"error", "message"}:
            reply[name] = str(reply[name])
        return reply, _sender(ancillary)

    def request(self, op: str, fds: tuple[int, ...] = (), **fields) -> dict:
        return self.receive(self.send(op, fds, **fields))

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(max(seconds, 0) * 1e3))

    def watch(self) -> None:
        """Called fifty times a second while a reply is awaited."""

    def lost(self) -> NoReturn:
        raise Failure("evaluator", f"the process {self.pid} that runs the baseline ended")

    def kill(self) -> None:
        """Ends a process of our own."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.sock.close()

    @property
    def own(self) -> set[int]:
        """The processes whose work is this peer's: they are held, and their CPU time counts."""
        return {self.pid}

    def hold(self) -> None:
        """Stops the process with all its threads, and returns when nothing of it runs any more."""
        end, seen = time.monotonic() + HOLD_SECONDS, 0
        while seen < 2:  # whoever still ran when the others were looked at could have woken one of them
            self._signal(signal.SIGSTOP)
            try:
                self.arrivals_mark = self._arrivals()
                seen = seen + 1 if all(map(processes.stopped, self.own)) else 0
            except ProcessLookupError:
                self.lost()
            if time.monotonic() > end:
                raise Failure(self.at_fault, f"its process did not stop within {HOLD_SECONDS:.0f} s of its answer")

    def stood_still(self) -> bool:
        """Whether nothing of it runs, or has been given a CPU since `hold`.

        CPU time would not tell: a thread counts as stopped shortly before it leaves its CPU, and a virtual CPU may itself
        be taken away in between.
        """
        self.cpu_since_mark()  # what was so left is no part of the next call
        try:
            return all(map(processes.stopped, self.own)) and self._arrivals() == self.arrivals_mark
        except ProcessLookupError:
            self.lost()

    def _arrivals(self) -> list[dict[str, int]]:
        return list(map(processes.arrivals, self.own))

    def release(self) -> None:
        """Lets a stopped process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        try:
            for pid in self.own:
                os.kill(pid, number)
        except ProcessLookupError:
            self.lost()

    def cpu_since_mark(self) -> int:
        """CPU nanoseconds this process used since the last call of this method."""
        before = self.cpu_mark
        try:
            self.cpu_mark = sum(map(processes.cpu_ns, self.own))
        except ProcessLookupError:
            self.lost()
        return self.cpu_mark - before


class Child(Peer):
    """The confined process of one candidate."""

    at_fault = "crash"

    def __init__(self, confinement: sandbox.Confinement, limits: Limits, *, gpu_task: str = ""):
        self.limits, self.caller = limits, os.getppid()
        self.cookie = f"{COOKIE}={secrets.token_hex(16)}"
        self.scratch = tempfile.TemporaryDirectory(prefix="evoteam-")
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        cuda = bool(gpu_task)
        options = {"limits": self._rlimits(cuda), "gpu_task": gpu_task}
        argv = [sys.executable, str(HARNESS), str(theirs.fileno()), json.dumps(options)]
        with theirs:
            self.process = sandbox.start(
                confinement,
                argv,
                scratch=Path(self.scratch.name),
                output=self.output,
                cookies=dict([self.cookie.split("=", 1)]),
                pass_fds=(theirs.fileno(),),
                read=_readable(cuda),
                cuda=cuda,
            )
        super().__init__(ours, 0)
        self.known: set[int] = set()

    def _rlimits(self, cuda: bool) -> dict[str, int]:
        limits = {"RLIMIT_FSIZE": self.limits.file_bytes, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": self.limits.open_files}
        return limits if cuda else limits | {"RLIMIT_DATA": self.limits.memory_bytes}

    def ready(self) -> None:
        """Waits until the harness is up, and notes its pid here (it sees another one inside its namespace)."""
        _, self.pid = self._next_message()
        self.known = self.tree()
        self.cpu_since_mark()

    @property
    def own(self) -> set[int]:
        """What confines the harness too: the first process of its namespace is not safe from the candidate."""
        return self.known

    def tree(self) -> set[int]:
        """Everything below and including the process that was started here: orphans stay in it at every level."""
        return processes.descendants_quickly(self.process.pid) | {self.process.pid}

    def strays(self) -> set[int]:
        """Processes that the candidate started and that still live."""
        return self.tree() - self.known

    def watch(self) -> None:
        if os.getppid() != self.caller:
            sys.exit("the process that asked for this evaluation is gone")
        tree = self.tree()
        if len(tree) > self.limits.processes:
            raise Failure("crash", f"it started {len(tree)} processes, the limit is {self.limits.processes}")
        used = processes.resident_bytes(tree)
        if used > self.limits.memory_bytes:
            used = processes.memory_bytes(tree)
        if used > self.limits.memory_bytes:
            raise Failure(
                "crash", f"it used {used >> 20:,} MiB of memory, the limit is {self.limits.memory_bytes >> 20:,} MiB"
            )

    def lost(self) -> NoReturn:
        try:
            status = self.process.wait(2)
        except subprocess.TimeoutExpired:
            status = None
        raise Failure("crash", describe_exit(status), explained=False)

    def log(self, limit: int) -> str:
        """Head and tail of what the candidate's processes wrote, `limit` bytes at most."""
        size = self.output.seek(0, os.SEEK_END)
        if size <= limit:
            self.output.seek(0)
            return self.output.read().decode("utf-8", "replace")
        parts = []
        for position in (0, size - limit // 2):
            self.output.seek(position)
            parts.append(self.output.read(limit // 2).decode("utf-8", "replace"))
        return f"{parts[0]}\n[... {size - 2 * (limit // 2):,} bytes left out ...]\n{parts[1]}"

    def end(self) -> set[int]:
        """TERM, then KILL for everything it started. Returns what could not be ended (normally nothing)."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            os.killpg(self.process.pid, signal.SIGCONT)  # a stopped process would not end before it is killed
            self._ended_within(TERM_SECONDS)
        left = processes.sweep(self.cookie, [self.process.pid])
        self._ended_within(TERM_SECONDS)
        processes.reap()
        self.sock.close()
        self.scratch.cleanup()
        return left

    def _ended_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return True
            time.sleep(0.005)
        return False


def _readable(cuda: bool) -> tuple[Path, ...]:
    """Files of this project that a harness needs. The project's own kernels are not among them."""
    if not cuda:
        return (HARNESS,)
    kernels = HARNESS.parents[2] / "kernels"
    hidden = {path for pattern in OWN_KERNELS for path in kernels.glob(pattern)}
    files = [path for path in kernels.iterdir() if path.is_file() and path not in hidden]
    return (HARNESS, *(HARNESS.with_name(name) for name in ("gpu_harness.py", "gpu_side.py")), *sorted(files))


def _sender(ancillary) -> int | None:
    """The pid that sent a message, as the kernel says. Files that came with it are closed."""
    sender = None
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = struct.unpack("3i", payload[:12])[0]
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for (fd,) in struct.iter_unpack("i", payload[: len(payload) // 4 * 4]):
                os.close(fd)
    return sender


def describe_exit(status: int | None) -> str:
    """A process's exit status in words; confinement tools report a signal as 128 + its number."""
    if status is None:
        return "its process closed the connection and ran on"
    number = -status if status < 0 else status - 128
    if number in {int(sig) for sig in signal.Signals}:
        return f"its process was ended by {signal.Signals(number).name}"
    return f"its process ended with exit status {status}"

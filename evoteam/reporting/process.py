"""The processes and streams of repro.py: a judged kernel runs in its process, and must not end it without a word.

`run` starts the command in a child. A kernel that calls os._exit(0), crashes or kills its process ends the child only;
the parent says so and never reports success for it.
"""

import ctypes
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from kernels.foreign import Interrupted

FAILED, INTERRUPTED = 2, 130  # exit statuses
HEARD = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE_S = 1.0  # one Ctrl-C reaches the child twice, from the terminal and from the parent
PR_SET_PDEATHSIG = 1


class Output:
    """A text stream that may break: the first fault is kept and later text is dropped, so that the run goes on."""

    def __init__(self, file: Any):
        self.file = file
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        if self.fault is None:
            try:
                self.file.write(text)
                self.file.flush()
            except OSError as error:
                self.fault = error
        return len(text)

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def reserve_stdout() -> None:
    """From here on standard output is the report's alone; what kernels and compilers print goes to standard error."""
    mine = sys.stdout
    if isinstance(mine, Output):
        mine.file = os.fdopen(os.dup(1), "w", encoding=mine.encoding, errors=mine.errors)
        os.dup2(2, 1)
        sys.stdout = sys.stderr


def run(command: Callable[[], int]) -> NoReturn:
    """Call `command` in a child, and end with the exit status that it returns."""
    _open_missing_streams()
    reads, writes = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard = {number for number in HEARD if signal.getsignal(number) is not signal.SIG_IGN}  # nohup, a shell's &
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # the parent takes them one by one: none gets lost
    child = os.fork()
    if child == 0:
        os.close(reads)
        _child(command, writes, before)
    os.close(writes)
    sys.exit(_parent(child, reads, heard))


def _open_missing_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _child(command: Callable[[], int], writes: int, mask: set) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupts())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    out, sys.stderr = Output(sys.stdout), Output(sys.stderr)
    out.reconfigure(errors="backslashreplace")
    sys.stdout = out
    try:
        status = command()
    except SystemExit as end:  # of a kernel: the command itself returns
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if out.fault and out.fault.errno != errno.EPIPE:  # a reader that has read enough closes the pipe
        print(f"Error: cannot write to standard output: {out.fault.strerror}", file=sys.stderr)
        status = status or FAILED
    os.write(writes, bytes([status]))
    os._exit(status)  # what a kernel left behind (threads, atexit) has no say


def _interrupts() -> Callable:
    last = -ONCE_S

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= ONCE_S:
            raise Interrupted

    return interrupt


def _parent(child: int, reads: int, heard: set) -> int:
    received: dict[int, float] = {}
    status = None
    while status is None:
        number = signal.sigwait(heard)
        if number == signal.SIGCHLD:
            ended, found = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if ended else None
            continue
        asked = received.setdefault(number, time.monotonic())
        deaf = time.monotonic() - asked >= ONCE_S  # asked a second time: the child did not listen
        os.kill(child, signal.SIGKILL if deaf else number)
    os.set_blocking(reads, False)  # a process that the kernel left behind may hold the other end
    try:
        said = os.read(reads, 1)
    except BlockingIOError:
        said = b""
    if said:
        return said[0]
    if received:
        return 128 + next(iter(received))
    if status < 0:
        how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
    else:
        how = f"ended with status {status}"
    text = f"Error: the process that runs the kernel {how}, so there is no report and nothing was judged."
    print(f"{text} A kernel must return or raise: look for os._exit, a signal or a crash.", file=sys.stderr)
    return FAILED

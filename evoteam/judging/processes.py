"""Processes of other people's code under Linux: which there are, what they use, and how all of them are ended.

A process group is not enough: a grandchild in a session of its own outlives `killpg`. So descendants are followed
through /proc (with this process as subreaper, orphans stay below it), and whatever carries the environment cookie
counts as well.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

PR_SET_CHILD_SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")
DEAD, HELD = (b"Z", b"X"), (b"T", b"t", b"Z", b"X")  # states of a process or thread, proc(5)
THREADS = 15  # number of threads among the fields behind state and parent


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, instead of slipping away to init."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _stat(path: str) -> list[bytes]:
    """The fields of a process or thread from its state on. Raises OSError when it is gone."""
    with open(f"{path}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _parents() -> dict[int, int]:
    """pid -> parent pid of every process that can be seen; zombies excluded."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent, *rest = _stat(f"/proc/{entry}")
                threads = int(rest[THREADS])
            except (OSError, ValueError):
                continue
            if state not in DEAD or threads > 1:  # the other threads run on when the first one has ended
                parents[int(entry)] = int(parent)
    return parents


def stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped or has ended. Raises ProcessLookupError when it is gone."""
    threads = None
    while threads != (threads := _threads(pid)):  # one that is stopped cannot begin another
        for thread in threads:
            try:
                if _stat(f"/proc/{pid}/task/{thread}")[0] not in HELD:
                    return False
            except OSError:
                return False
    return True


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def descendants(root: int) -> set[int]:
    """Living processes below `root`, without `root` itself."""
    below: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        below.setdefault(parent, []).append(pid)
    return _below(root, lambda pid: below.get(pid, ()))


def descendants_quickly(root: int) -> set[int]:
    """As `descendants`, zombies included, from the kernel's lists of children: in 0.1 ms instead of several.

    Where the kernel keeps no such lists, the same as `descendants`.
    """
    return _below(root, _children) if os.path.exists("/proc/thread-self/children") else descendants(root)


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def _below(root: int, children: Callable[[int], Iterable[int]]) -> set[int]:
    found, waiting = set(), [root]
    while waiting:
        fresh = set(children(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found


def _read(pid: int, name: str) -> bytes:
    """A file of /proc about the memory of a process, b"" when it is gone: asked of a thread that has not ended."""
    try:
        threads = _threads(pid)
    except ProcessLookupError:
        return b""
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/{name}", "rb") as file:
                if (data := file.read()) and data.strip(b"0 \n"):
                    return data
        except OSError:
            continue
    return b""


def with_cookie(cookie: str) -> set[int]:
    """Living processes whose environment holds the text `cookie`, this one excluded."""
    return {pid for pid in _parents() if cookie.encode() in _read(pid, "environ")} - {os.getpid()}


def memory_bytes(pids: Iterable[int], patience: float = 1.0) -> int:
    """Resident memory of these processes, shared pages counted once in all; those that are gone count nothing.

    A process that forks without end makes whoever reads its page tables wait: after `patience` seconds the rest is
    left out.
    """
    total, end = 0, time.monotonic() + patience
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except OSError:
            total += resident_bytes([pid])
        if time.monotonic() > end:
            break
    return total


def resident_bytes(pids: Iterable[int]) -> int:
    """As `memory_bytes`, but shared pages count for every process: an upper bound, read a hundred times faster."""
    return sum(int(fields[1]) * PAGE for pid in pids if (fields := _read(pid, "statm").split()))


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, ended ones included. Raises ProcessLookupError when it is gone."""
    # the kernel's encoding of another process's CPU clock, as clock_getcpuclockid(3) returns it
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def waited_ns(pid: int) -> int:
    """Time that a main thread was ready to run while others had its CPU; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def arrivals(pid: int) -> dict[str, int]:
    """How often each thread of a process has been given a CPU; its CPU time in ns where the kernel does not count that.

    Raises ProcessLookupError when it is gone.
    """
    counts = {}
    try:
        for thread in _threads(pid):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                counts[thread] = int(file.read().split()[2])
    except (FileNotFoundError, IndexError, ValueError):
        counts = {}
    return counts if any(counts.values()) else {"": cpu_ns(pid)}


def begun() -> int:
    """How many processes and threads have been begun on this machine: a count that never comes back to where it was."""
    with open("/proc/stat", "rb") as file:
        return int(file.read().rpartition(b"\nprocesses ")[2].split()[0])


def reap() -> None:
    """Collects ended children that nobody waits for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def sweep(cookie: str, roots: Iterable[int] = (), patience: float = 4.0) -> set[int]:
    """Kills everything below `roots`, the roots too, and everything with the cookie, until nothing is left.

    Returns what was still alive after `patience` seconds (normally the empty set). Processes are stopped before they
    are killed, so that one which forks faster than it is found cannot win.
    """
    end = time.monotonic() + patience
    roots = set(roots)
    while True:
        alive = with_cookie(cookie) | {pid for root in roots for pid in descendants(root)} | (roots & _parents().keys())
        alive -= {os.getpid()}
        if not alive or time.monotonic() > end:
            return alive
        for sig in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                try:
                    os.kill(pid, sig)
                except (ProcessLookupError, PermissionError):
                    pass
        time.sleep(0.005)

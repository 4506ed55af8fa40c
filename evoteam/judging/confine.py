"""Starts a program at the lower levels of confinement; run as a script, with nothing of this project importable.

argv: level (unshare | landlock | none), scratch folder, JSON list of readable paths, then the program and its
arguments. This process stays as the parent, so that the program's orphans stay below it, and ends with its status.
"""

import ctypes
import json
import os
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
# these numbers are the same on every architecture
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
MS_NOSUID, MS_NODEV = 2, 4

LANDLOCK_ABI = 6  # Linux 6.12: files, TCP, and no signals to processes outside
FS_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read folder
FS_ALL = (1 << 16) - 1
FS_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights that a file, not a folder, can have
NET_TCP = 3
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
SCRATCH_BYTES = 1 << 30
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm")


def check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def private_files(scratch: str, scratch_bytes: int) -> None:
    """Inside new namespaces: every mount read-only, a tmpfs of bounded size over the scratch folder and /dev/shm."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    check(
        libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)),
        "read-only /",
    )
    for folder in (scratch, "/dev/shm"):
        options = f"size={scratch_bytes},mode=0700".encode()
        check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"tmpfs on {folder}")
    os.chdir(scratch)


def landlock(scratch: str, readable: list[str]) -> None:
    """Reads only `readable` and /proc, writes only `scratch`, its own /proc, devices; no TCP, no signals outside."""
    abi = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < LANDLOCK_ABI:
        raise OSError(f"Landlock has ABI {abi} here, {LANDLOCK_ABI} or newer is needed (Linux 6.12)")
    ruleset = (ctypes.c_uint64 * 3)(FS_ALL, NET_TCP, SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    handle = check(libc.syscall(SYS_LANDLOCK_CREATE_RULESET, ruleset, ctypes.sizeof(ruleset), 0), "Landlock ruleset")

    class PathRule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]

    def allow(path: str, access: int) -> None:
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = PathRule(access if os.path.isdir(path) else access & FS_FILE, fd)
            check(libc.syscall(SYS_LANDLOCK_ADD_RULE, handle, 1, ctypes.byref(rule), 0), f"Landlock rule for {path}")
            os.close(fd)

    for path in (*readable, "/proc"):
        allow(path, FS_READ)
    gpus = [f"/dev/{name}" for name in os.listdir("/dev") if name.startswith("nvidia")]
    for path in (scratch, "/proc/self", *DEVICES, *gpus):
        allow(path, FS_ALL)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, handle, 0), "Landlock")


def drop_capabilities() -> None:
    """Nothing executed from here on has a capability, not even as root."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def end_others() -> None:
    """Kills what the program left behind: orphans are children of this process."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> int:
    level, scratch, readable, *program = sys.argv[1:]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            if level == "unshare":
                private_files(scratch, SCRATCH_BYTES)
            elif level == "landlock":
                landlock(scratch, json.loads(readable))
            if level != "none":
                drop_capabilities()
            os.execvp(program[0], program)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(126)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the program gets it too; this process stays until nothing is left
    while True:
        pid, status = os.wait()
        if pid == child:
            end_others()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

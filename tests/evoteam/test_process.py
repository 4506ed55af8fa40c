"""The process around the command: whatever ends the child, the status and the last words are right."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(body, **streams):
    """A process whose command is `body`; it prints `ready` to standard error first."""
    code = "import os, signal, sys, time\nfrom evoteam.reporting import process\ndef command():\n"
    code += "".join(f"    {line}\n" for line in ("print('ready', file=sys.stderr)", *body.splitlines()))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(
        [sys.executable, "-c", code + "process.run(command)"], cwd=ROOT, text=True, start_new_session=True, **streams
    )


def ended(body, **streams):
    child = started(body, **streams)
    out, err = child.communicate(timeout=20)
    return child.returncode, out, (err or "").removeprefix("ready\n")


@pytest.mark.parametrize("status", [0, 1, 3, 130])
def test_the_status_that_the_command_returns(status):
    assert ended(f"print('out')\nreturn {status}") == (status, "out\n", "")


@pytest.mark.parametrize(
    "body, how",
    [
        ("os._exit(0)", "ended with status 0"),
        ("os._exit(3)", "ended with status 3"),
        ("sys.exit()", "ended with status 0"),
        ("sys.exit('no')", "ended with status 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9 (Killed)"),
        ("import ctypes; ctypes.string_at(0)", "was ended by signal 11 (Segmentation fault)"),
    ],
)
def test_a_kernel_that_ends_the_process_is_no_success(body, how):
    status, out, err = ended(body)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert f"Error: the process that runs the kernel {how}, so there is no report and nothing was judged." in err


def test_what_a_kernel_leaves_behind_changes_nothing():
    body = "import atexit, threading\natexit.register(os._exit, 0)\n"
    body += "threading.Thread(target=time.sleep, args=(60,)).start()\nreturn 1"
    assert ended(body) == (1, "", "")


def test_a_fork_that_keeps_the_pipe_open_is_not_waited_for():
    body = "if os.fork() == 0:\n    time.sleep(20)\nos._exit(0)"
    assert started(body, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(timeout=10) == 2


def test_an_error_of_ours_shows_where_it_was():
    status, _, err = ended("1 / 0")
    assert status == 2 and "ZeroDivisionError" in err and "ended with status 1" in err


# Many short sleeps: a signal that comes just before a sleep begins is seen by Python when that sleep ends.
INTERRUPTED = """try:
    print(os.getpid(), flush=True)
    for _ in range(300):
        time.sleep(0.1)
except KeyboardInterrupt as error:
    print(type(error).__name__)
    time.sleep(0.6)
    return 130"""


@pytest.mark.parametrize("of_the_terminal", [False, True])
def test_ctrl_c_reaches_the_command_once(of_the_terminal):
    """A person who names the process reaches the parent only, a terminal both processes, one after the other."""
    child = started(INTERRUPTED)
    below = int(child.stdout.readline())
    if of_the_terminal:
        os.kill(below, signal.SIGINT)
        time.sleep(0.2)
    os.kill(child.pid, signal.SIGINT)
    assert child.communicate(timeout=20) == ("Interrupted\n", "ready\n") and child.returncode == 130


def test_a_second_ctrl_c_ends_a_command_that_does_not_listen():
    body = "while True:\n    try:\n        print('deaf', flush=True)\n"
    body += "        for _ in range(300):\n            time.sleep(0.1)\n"
    child = started(body + "    except KeyboardInterrupt:\n        pass")
    assert child.stdout.readline() == "deaf\n"
    os.kill(child.pid, signal.SIGINT)
    assert child.stdout.readline() == "deaf\n"
    time.sleep(1.2)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(timeout=20) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_the_one_that_was_started(number):
    child = started("print(os.getpid(), flush=True)\ntime.sleep(30)")
    below = int(child.stdout.readline())
    os.kill(child.pid, number)
    assert child.wait(timeout=20) == (-number if number == signal.SIGKILL else 128 + number)
    for _ in range(100):
        state = (
            Path(f"/proc/{below}/stat").read_text().rpartition(")")[2].split()[0]
            if Path(f"/proc/{below}").exists()
            else "Z"
        )
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {below} still runs")


def test_output_of_others_goes_to_standard_error():
    body = "own = sys.stdout\nprocess.reserve_stdout()\nprint('python')\nos.write(1, b'c\\n')\n"
    body += "own.write('mine\\n')\nreturn 0"
    assert ended(body) == (0, "mine\n", "python\nc\n")


def test_a_full_disk_behind_standard_output_is_said_at_the_end():
    with open("/dev/full", "w") as full:
        status, _, err = ended(
            "print('lost')\nprint('more')\nprint('still here', file=sys.stderr)\nreturn 0", stdout=full
        )
    assert status == 2
    assert err == "still here\nError: cannot write to standard output: No space left on device\n"


def test_a_closed_pipe_is_no_fault():
    reads, writes = os.pipe()
    os.close(reads)
    assert ended("print('lost')\nprint('still here', file=sys.stderr)\nreturn 1", stdout=writes)[::2] == (
        1,
        "still here\n",
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(closed, tmp_path):
    code = "import pathlib, sys; from evoteam.reporting import process\ndef command():\n"
    code += f"    print('x'); sys.stderr.write('y'); pathlib.Path({str(tmp_path / 'done')!r}).touch(); return 0\n"
    code += "process.run(command)"
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, timeout=20)
    assert done.returncode == 0 and (tmp_path / "done").exists()


def test_ctrl_c_is_left_alone_where_it_was_ignored():
    body = "for _ in range(2):\n    os.kill(os.getppid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"
    body += "    time.sleep(1.1)\nreturn 0"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = started(body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.communicate(timeout=20) == ("", "ready\n") and child.returncode == 0

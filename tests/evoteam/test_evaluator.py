"""The evaluator as its callers see it: light, warm, restartable, and with a verdict for whatever it is given."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from evoteam.judging import processes
from evoteam.judging.child import Failure, Limits
from evoteam.judging.evaluator import EvaluationError, Evaluator, evaluator_sha256, task_sha256
from evoteam.judging.judge import MAX_SOURCE_BYTES, confirmed_techniques, declared_techniques, screen
from evoteam.judging.verdict import Verdict, VerdictError, head_and_tail

ROOT = Path(__file__).parents[2]
TASK = "mla-paged-decode-cpu"
PLAIN = (ROOT / "tests" / "exploits" / "honest" / "plain_loop.py").read_text()
WRONG = "def mla_paged_decode(q_nope, *_):\n    return q_nope, q_nope[..., 0].float()\n"
RECORD = dict(task=TASK, source_sha256="a", task_sha256="b", evaluator_sha256="c", phase="time", score=1.5)


def python(code: str, *arguments, timeout=60, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator(TASK, limits=Limits(workload_s=0.2)) as evaluator:
        yield evaluator


@pytest.fixture
def write(tmp_path):
    def write(source: str | bytes, name="candidate.py") -> Path:
        path = tmp_path / name
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return path

    return write


def test_valid_candidate_has_a_whole_verdict(evaluator, write, tmp_path):
    source = write(PLAIN + '\nTECHNIQUES = ["batched", "no-such-tag"]\n# einsum in a comment confirms nothing\n')
    verdict = evaluator.evaluate(source, tmp_path / "attempt")
    assert (verdict.failure, verdict.phase, verdict.task) == ("", "time", TASK), verdict.message
    assert verdict.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (verdict.task_sha256, verdict.evaluator_sha256) == (task_sha256(TASK), evaluator_sha256())
    assert [row["index"] for row in verdict.rows] == [0, 1, 2, 3, 4] and verdict.full_score is None
    product = 1.0
    for row in verdict.rows:
        assert row["ratio"] == pytest.approx(row["baseline_us"] / row["ours_us"], rel=0.01)
        assert row["calls"] >= 9 and row["compared"] == 12 and row["error_ratio"] < 3e-3
        product *= row["ratio"]
    assert verdict.score == pytest.approx(product**0.2) and 0.5 < verdict.score < 1.5
    assert verdict.worst["ratio"] == min(row["ratio"] for row in verdict.rows)
    assert verdict.techniques == {"declared": ["batched", "no-such-tag"], "confirmed": []}
    assert verdict.confinement["level"] in ("bubblewrap", "unshare", "landlock") and verdict.confinement["open"]
    assert set(verdict.seconds) == {"screen", "import", "compile", "check", "time"}
    assert verdict.device and verdict.versions["torch"] and verdict.gpu_seconds == 0
    assert (tmp_path / "attempt" / verdict.log).is_file()
    assert Verdict.from_json(json.dumps(verdict.to_json())) == verdict


def test_new_best_is_run_on_all_workloads(evaluator, write, tmp_path):
    verdict = evaluator.evaluate(write(PLAIN), tmp_path, best=0.1)
    assert verdict.phase == "full" and len(verdict.rows) == 12, verdict.message
    assert 0.5 < verdict.full_score < 1.5


def test_failure_tells_where_and_why(evaluator, write, tmp_path):
    verdict = evaluator.evaluate(write(WRONG), tmp_path)
    assert (verdict.failure, verdict.phase, verdict.score, verdict.rows) == ("wrong-answer", "compile", 0, [])
    assert verdict.worst["workload"] == "one-row" and verdict.worst["max_abs"] > 0.01 and "must be" in verdict.message
    verdict = evaluator.evaluate(
        write("import math\ndef mla_paged_decode(*inputs):\n    return math.nonsense\n"), tmp_path
    )
    assert (verdict.failure, verdict.phase) == ("compile", "compile")
    assert (
        'candidate.py", line 3' in verdict.message
        and "nonsense" in verdict.message
        and "harness" not in verdict.message
    )
    verdict = evaluator.evaluate(write("import no_such_module\ndef mla_paged_decode(): pass\n"), tmp_path)
    assert (verdict.failure, verdict.phase) == ("import", "import") and "no_such_module" in verdict.message


def test_crash_brings_the_end_of_the_output(evaluator, write, tmp_path):
    verdict = evaluator.evaluate(
        write("import os\ndef mla_paged_decode(*_):\n    print('last words', flush=True)\n    os.abort()\n"), tmp_path
    )
    assert verdict.failure == "crash" and "SIGABRT" in verdict.message and "last words" in verdict.message


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(): pass", "does not define mla_paged_decode; it defines f"),
        ("", "it defines nothing"),
        ("def mla_paged_decode(:", "does not parse: SyntaxError"),
        ("x = '\0'\ndef mla_paged_decode(): pass", "does not parse"),
        (b"\xff\xfe\ndef mla_paged_decode(): pass", "does not parse"),
        ("def mla_paged_decode(): return " + "(" * 500 + ")" * 500, "does not parse"),
        ("def mla_paged_decode(): return " + "-" * 50_000 + "1", "does not parse"),
        ("def mla_paged_decode(): pass\n" + "#" * MAX_SOURCE_BYTES, "bytes, at most"),
        (
            "def mla_paged_decode():\n    from kernels import reference",
            "line 2 imports kernels: a candidate is one self-contained file",
        ),
        (
            "import flashinfer.mla\nmla_paged_decode = 1",
            "line 1 imports flashinfer.mla: the baseline cannot be the candidate",
        ),
    ],
)
def test_screen_refuses(source, words):
    with pytest.raises(Failure) as caught:
        screen(source if isinstance(source, bytes) else source.encode(), "mla_paged_decode")
    assert caught.value.kind == "screen" and words in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "from m import f as g",
        "try:\n    def g(): pass\nexcept ImportError:\n    g = None",
        "if 1:\n    g = lambda: 0",
        "class g: pass",
        "h = g = 1",
    ],
)
def test_screen_finds_the_entry_point_however_it_is_defined(source):
    screen(source.encode(), "g")


@pytest.mark.parametrize(
    "value, tags",
    [
        ("['a', 'b']", ["a", "b"]),
        ("('a',)", ["a"]),
        ("['a'] + x", []),
        ("3", []),
        ("[1]", ["1"]),
        (r"['\ud800\x1b']", ["?\ufffd"]),
    ],
)
def test_declared_techniques(value, tags):
    assert declared_techniques(screen(f"TECHNIQUES = {value}\ndef f(): pass".encode(), "f")) == tags


def test_techniques_are_confirmed_in_code_alone():
    patterns = {"split": "split", "tma": r"cp\.async\.bulk", "slow": r"a.*Z"}
    source = '"""split"""\nTECHNIQUES = ["split"]\n# split\ndef f():\n    "split"\n    return 1\n'
    assert confirmed_techniques(screen(source.encode(), "f"), patterns) == []
    source = 'KERNEL = """\n// ' + "x" * 5000 + '\n cp.async.bulk\n"""\ndef f(): return g.split()\n'
    assert confirmed_techniques(screen(source.encode(), "f"), patterns) == ["split", "tma"]
    start = time.monotonic()
    confirmed_techniques(screen(b"x = '" + b"a" * 200_000 + b"'\ndef f(): pass", "f"), patterns)
    assert time.monotonic() - start < 20


def test_screen_failure_uses_no_process(evaluator, write, tmp_path):
    start = time.monotonic()
    verdict = evaluator.evaluate(write("import kernels\n"), tmp_path)
    assert verdict.failure == "screen" and time.monotonic() - start < 8
    assert (tmp_path / "log.txt").read_text() == ""


def test_unreadable_source_is_an_error(evaluator, tmp_path):
    with pytest.raises(EvaluationError, match="cannot read the candidate"):
        evaluator.evaluate(tmp_path / "missing.py", tmp_path)


@pytest.fixture
def odd(tmp_path):
    """Paths of things that are no source files."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    return {"pipe": tmp_path / "pipe", "folder": tmp_path / "folder", "huge": tmp_path / "huge", "device": "/dev/zero"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipe", "it is a pipe, wanted a regular file"),
        ("folder", "it is a folder, wanted a regular file"),
        ("device", "it is a device, wanted a regular file"),
        ("huge", "it has more than 16 MiB, a source may have 1 MiB"),
    ],
)
def test_what_is_no_source_file_is_refused_at_once(evaluator, odd, tmp_path, name, words):
    start = time.monotonic()
    with pytest.raises(EvaluationError, match=words):
        evaluator.evaluate(odd[name], tmp_path / "attempt")
    assert time.monotonic() - start < 5 and not (tmp_path / "attempt").exists()


def test_the_log_replaces_a_link_and_leaves_its_target_alone(evaluator, write, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "log.txt").symlink_to("precious")
    assert evaluator.evaluate(write("import kernels\n"), tmp_path).failure == "screen"
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "log.txt").is_symlink()
    assert not list(tmp_path.glob(".log*"))
    (tmp_path / "taken" / "log.txt").mkdir(parents=True)
    with pytest.raises(EvaluationError, match="cannot write .*log.txt: Is a directory"):
        evaluator.evaluate(write(WRONG), tmp_path / "taken")


@pytest.mark.parametrize(
    ("ending", "words"),
    [("del mla_paged_decode", "mla_paged_decode is NoneType"), ("mla_paged_decode = 5", "mla_paged_decode is int")],
)
def test_a_module_without_the_function_is_told_its_name(evaluator, write, tmp_path, ending, words):
    verdict = evaluator.evaluate(write(f"{WRONG}{ending}\n"), tmp_path)
    assert (verdict.failure, verdict.phase) == ("import", "import")
    assert verdict.message == f"{words}, must be a function"


def test_unknown_task_is_named():
    with pytest.raises(ValueError, match="there is no task 'nonsense'"):
        Evaluator("nonsense")


def test_evaluator_process_that_dies_is_reported_and_replaced(write, tmp_path):
    slow = "import time\ndef mla_paged_decode(*_):\n    time.sleep(3600)\n"
    with Evaluator(TASK, limits=Limits(workload_s=0.1)) as evaluator:
        pid = evaluator.process.pid
        threading.Timer(3.0, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(EvaluationError, match="gave no verdict"):
            evaluator.evaluate(write(slow), tmp_path)
        assert evaluator.evaluate(write(WRONG), tmp_path).failure == "wrong-answer"
        assert evaluator.process.pid != pid


def test_a_process_with_a_broken_gpu_judges_no_further(write, tmp_path, monkeypatch):
    with Evaluator(TASK, limits=Limits(workload_s=0.1)) as evaluator:
        pids, judged = [], evaluator._judged

        def broken_at_first(request):
            reply = judged(request)
            pids.append(evaluator.process.pid)
            return reply | ({"healthy": False, "failure": "evaluator"} if len(pids) == 1 else {})

        monkeypatch.setattr(evaluator, "_judged", broken_at_first)
        assert evaluator.evaluate(write(WRONG), tmp_path).failure == "wrong-answer"
        assert len(set(pids)) == 2
        monkeypatch.setattr(evaluator, "_judged", lambda request: judged(request) | {"healthy": False})
        assert evaluator.evaluate(write(WRONG), tmp_path).failure == "wrong-answer" and evaluator.process is None


LIGHT = """
import sys
from pathlib import Path
from evoteam.judging.evaluator import evaluate
verdict = evaluate(Path(sys.argv[1]), "mla-paged-decode-cpu", Path(sys.argv[2]))
heavy = [name for name in ("torch", "triton", "pydantic", "anthropic", "flashinfer") if name in sys.modules]
print(verdict.failure, heavy, int(open("/proc/self/statm").read().split()[1]) * 4 // 1024)
"""


def test_caller_stays_light_and_locale_does_not_matter(write, tmp_path):
    source = WRONG + '\nMOOD = "🚀 naïve"\nprint(MOOD)\nimport os\nos.write(1, b"\\xff\\xfe")\n'
    found = python(LIGHT, write(source), tmp_path, LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    failure, heavy, mebibytes = found.stdout.decode().split()
    assert (failure, heavy) == ("wrong-answer", "[]"), found.stderr.decode()
    assert int(mebibytes) < 100
    assert "🚀 naïve" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def alive(pids: set[int]) -> set[int]:
    return {
        pid for pid in pids if os.path.exists(f"/proc/{pid}") and ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    }


def test_nothing_lives_on_when_the_caller_is_killed(write, tmp_path):
    source = write("import time\ndef mla_paged_decode(*_):\n    time.sleep(3600)\n")
    process = subprocess.Popen(
        [sys.executable, "-c", LIGHT, source, tmp_path], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 30
    while len(processes.descendants(process.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)  # it is in the call by now
    family = processes.descendants(process.pid)
    assert len(family) >= 4
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(family)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, that of its children not included."""
    return sum(map(int, processes._stat(f"/proc/{pid}")[11:13])) / os.sysconf("SC_CLK_TCK")


def crowded_seconds() -> float:
    """How long programs here have had to wait for a CPU, and CPUs for their host; 0 where the kernel does not tell."""
    pressure = Path("/proc/pressure/cpu")
    waited = int(pressure.read_text().split("total=")[1].split()[0]) / 1e6 if pressure.exists() else 0.0
    stolen = int(Path("/proc/stat").read_text().split("\n")[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    return waited + stolen


def test_a_candidate_costs_little_beside_its_own_run_time(write, tmp_path, monkeypatch):
    """With a warm evaluator, in seconds: baseline, comparisons and the candidate's own calls, three or four here.

    The evaluator's CPU time is held to it always, the wall clock where nothing had to wait for a CPU meanwhile.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a timing lock of its own: another evaluation's turn is no cost
    with Evaluator(TASK, limits=Limits(workload_s=0.2)) as evaluator:
        evaluator.evaluate(write(WRONG), tmp_path)
        pid = evaluator.process.pid
        for _ in range(3):
            time.sleep(3)  # as long as an author thinks at least; the next process gets ready meanwhile
            start, used, crowded = time.monotonic(), cpu_seconds(pid), crowded_seconds()
            assert evaluator.evaluate(write(PLAIN), tmp_path).failure == ""
            took, used, crowded = time.monotonic() - start, cpu_seconds(pid) - used, crowded_seconds() - crowded
            assert used < 6
            if took < 10:
                return
            assert crowded > 0.1 * took, f"{took:.1f} s on a quiet machine"
    pytest.skip(f"{took:.1f} s, in {crowded:.1f} s of which programs waited for a CPU: that says nothing")


def test_verdict_keeps_fields_it_does_not_know():
    record = Verdict(**RECORD).to_json() | {"invented_later": [1, 2]}
    verdict = Verdict.from_json(record)
    assert verdict.extra == {"invented_later": [1, 2]} and verdict.to_json() == record


@pytest.mark.parametrize(
    "record, words",
    [
        ("{", "not JSON"),
        ("[]", "is a list, must be a JSON object"),
        ({"task": TASK}, "lacks source_sha256, task_sha256, evaluator_sha256, phase"),
        (RECORD | {"phase": "lunch"}, "phase is 'lunch', must be one of"),
        (RECORD | {"failure": "crash"}, "a failed candidate scores 0"),
        (RECORD | {"score": float("nan")}, "must be finite"),
        (RECORD | {"score": "1"}, "score is a field of the wrong type: '1', not a number"),
        (RECORD | {"gpu_seconds": None}, "gpu_seconds is a field of the wrong type"),
        (RECORD | {"full_score": float("inf")}, "full_score is inf, must be finite"),
        (RECORD | {"message": ["x"]}, "message is a field of the wrong type"),
        (RECORD | {"rows": {}}, "rows is a field of the wrong type"),
        (RECORD | {"rows": [{"ratio": 1.0}]}, "must be an object with the index of its workload"),
        (RECORD | {"rows": [{"index": 1, "ratio": "fast"}]}, "ratio of a row is a field of the wrong type"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_verdict_is_refused(record, words):
    with pytest.raises(VerdictError, match=words):
        Verdict.from_json(record)


def test_long_output_is_cut_to_head_and_tail():
    assert head_and_tail(b"short") == "short" and head_and_tail(b"\x1b[2J\ta\n\r") == "\ufffd[2J\ta\n\ufffd"
    text = head_and_tail(b"a" * 5000 + b"\xff" + b"b" * 5000, 1000)
    assert text.startswith("a" * 500) and text.endswith("b" * 500) and "9,001 bytes left out" in text
    assert head_and_tail("🚀".encode() * 100, 10).count("left out") == 1


def test_hashes_tell_tasks_and_evaluators_apart():
    assert task_sha256(TASK) != task_sha256("mla-paged-decode") and len(evaluator_sha256()) == 64

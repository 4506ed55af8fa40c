"""repro.py as a user starts it: in a process of its own, from another folder, with good and bad input."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import repro as main_module
from evoteam.reporting import parts, record
from evoteam.reporting.session import Session

ROOT = Path(__file__).parents[1]


def test_list_names_every_claim(repro):
    result = repro("--list")
    expected = json.loads((ROOT / "expected_results.json").read_text())["claims"]
    assert result.returncode == 0
    assert [name for name in (c["id"] for c in expected) if not re.search(rf"\b{name}\b", result.stdout)] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--mode", "run"), "'run' is not one of 'run-only', 'extra-budget'"),
        (("--workloads", "47"), "'47' names [47]; wanted all, feedback, family:K, or numbers of 0..46"),
        (("--workloads", ""), "'' names no workload"),
        (("--workloads", ","), "',' names no workload"),
        (("--workloads", "family:9"), "'family:9' names [9]"),
        (("--workloads", "1,-2"), "'1,-2' is not a choice of workloads"),
        (("--workloads", "²"), "is not a choice of workloads"),
        (("--workloads", "9" * 5000), "wanted all, feedback, family:K, or numbers of 0..46"),
        (("--kernel", f"{'x' * 5000}.py:f"), "File name too long"),
        (("--trace", "x" * 5000), "File name too long"),
        (("--mode", "fixed-team", "--out", "x" * 5000), "File name too long; give another folder with --out"),
        (("--kernel", "flashmla"), "is neither a kernel that ships here (mla_paged_decode, mla_paged_decode_triton)"),
        (("--kernel", "missing.py:f"), "missing.py does not exist"),
        (("--kernel", "missing.py"), "nor path.py:function"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--out", ""), "is empty; give the folder to write to"),
        (
            ("--mode", "same-budget", "--live", "--model", "m", "--task", "t", "--budget-tokens", "nan"),
            "--budget-tokens N",
        ),
        (
            ("--mode", "same-budget", "--live", "--model", "m", "--task", "t", "--budget-tokens", "inf"),
            "--budget-tokens N",
        ),
        (("--nope",), "No such option"),
        (("extra",), "unexpected extra argument"),
    ],
)
def test_a_wrong_command_is_one_clear_error(repro, tmp_path, arguments, message):
    result = repro(*arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert result.stdout == "" and len(result.stderr) < 600


@pytest.mark.parametrize(
    "source, function, message",
    [
        ("def decode(*args): pass\ndef other(a): pass\n", "run", "defines no function 'run'; it defines decode, other"),
        ("run = 3\n", "run", "defines no function 'run'; it defines none"),
        ("def run(q, k):\n    pass\n", "run", "has signature (q, k), wanted the positional arguments q_nope"),
        ("def run(:\n", "run", "cannot be imported: SyntaxError"),
        ("import no_such_module\n", "run", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\n", "run", "cannot be imported: ZeroDivisionError"),
        ("raise SystemExit(0)\n", "run", "cannot be imported: SystemExit"),
        ("\x00", "run", "cannot be imported"),
        ("raise KeyboardInterrupt\n", "run", "cannot be imported: KeyboardInterrupt"),
        ("import os; os._exit(0)\n", "run", "ended with status 0, so there is no report and nothing was judged"),
        ("import os; os.kill(os.getpid(), 9)\n", "run", "was ended by signal 9 (Killed), so there is no report"),
        ("import sys; sys.modules.clear()\n", "run", "defines no function 'run'"),
    ],
)
def test_a_kernel_file_that_cannot_be_judged(repro, tmp_path, source, function, message):
    (tmp_path / "mine.py").write_text(source)
    result = repro("--mode", "run-only", "--kernel", f"mine.py:{function}")
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "is not a folder; pass the root of a FlashInfer-Trace checkout"),
        ({}, "holds no workloads/**/"),
        ({"workloads/mla/NAME.jsonl": "{"}, "is not a workload record"),
        ({"workloads/mla/NAME.jsonl": "[1]\n"}, "is not a workload record"),
        ({"workloads/mla/NAME.jsonl": ""}, "has no workload 00cb2bc2"),
        ({"workloads/mla/NAME.jsonl": "version https://git-lfs.github.com/spec/v1\n"}, "is a Git LFS pointer"),
    ],
)
def test_a_broken_trace_folder(repro, tmp_path, content, message):
    for path, text in (content or {}).items():
        file = tmp_path / "trace" / path.replace("NAME", "mla_paged_decode_h16_ckv512_kpe64_ps1")
        file.parent.mkdir(parents=True)
        file.write_text(text)
    if content == {}:
        (tmp_path / "trace").mkdir()
    result = repro("--mode", "run-only", "--trace", tmp_path / "trace")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert message in re.sub(r"\s+", " ", result.stderr)


def test_a_broken_claims_file_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "expected_results.json").write_text("{")
    monkeypatch.setattr(main_module, "EXPECTED", tmp_path / "expected_results.json")
    result = CliRunner().invoke(main_module.main, ["--list"])
    assert (
        result.exit_code == 2
        and "is not JSON" in result.output
        and "git checkout expected_results.json" in result.output
    )


def test_out_that_cannot_be_written_is_found_before_anything_runs(repro, tmp_path):
    (tmp_path / "file").write_text("")
    result = repro("--mode", "fixed-team", "--out", tmp_path / "file" / "below")
    assert result.returncode == 2 and "give another folder with --out" in " ".join(result.stderr.split())
    assert (tmp_path / "file").read_text() == ""


def a_folder(path):
    path.mkdir()


def a_foreign_record(path):
    path.write_text('{"program": "another"}')


def a_list(path):
    path.write_text("[1, 2]")


def a_page(path):
    path.write_text("<title>evoteam</title>")


def a_read_only_file(path):
    path.write_text(record.generator(record.PROGRAM) if path.suffix == ".html" else '{"program": "evoteam"}')
    path.chmod(0o444)


def nested(path):
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    "name, make, message",
    [
        ("report.html", a_folder, "report.html is not a file"),
        ("report.json", a_folder, "report.json is not a file"),
        ("report.html", a_read_only_file, "report.html is read-only"),
        ("report.json", a_read_only_file, "report.json is read-only"),
        ("report.json", a_foreign_record, "report.json was not written by this command and would be replaced"),
        ("report.json", a_list, "report.json was not written by this command"),
        ("report.json", nested, "report.json was not written by this command"),
        ("report.html", a_page, "report.html was not written by this command"),
    ],
)
def test_a_target_that_may_not_be_replaced_is_found_before_anything_runs(tmp_path, monkeypatch, name, make, message):
    make(tmp_path / name)
    before = (tmp_path / name).read_bytes() if (tmp_path / name).is_file() else None
    monkeypatch.setattr(parts, "run", lambda *_: pytest.fail("measured"))
    result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--out", str(tmp_path)])
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert "give another folder with --out" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert before is None or (tmp_path / name).read_bytes() == before


def test_a_report_of_an_earlier_run_is_replaced(tmp_path):
    for seed in ("1", "2"):
        result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--seed", seed, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "report.json").read_text())["seed"] == 2


@pytest.mark.parametrize("lost, kept", [("report.json", "report.html"), ("report.html", "report.json")])
def test_one_file_that_cannot_be_written_loses_neither(tmp_path, monkeypatch, lost, kept):
    write, out = record.write, tmp_path / "out"

    def full_disk(path, text):
        if path == out / lost:
            raise record.RecordError(f"cannot write {path}: No space left on device")
        write(path, text)

    monkeypatch.setattr(record, "write", full_disk)
    monkeypatch.setattr(record.tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--out", str(out)])
    assert result.exit_code == 2 and "claims: 3 not-run" in result.output.splitlines()
    assert [path.name for path in out.iterdir()] == [kept]
    saved = re.search(r"No space left on device; it was saved as (\S+)", " ".join(result.output.split()))[1]
    assert Path(saved).name == lost and Path(saved).stat().st_size > 1000


def test_a_full_disk_everywhere_still_shows_the_verdicts(tmp_path, monkeypatch):
    def full_disk(path, text):
        raise record.RecordError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(record, "write", full_disk)
    result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--out", str(tmp_path)])
    assert result.exit_code == 2 and result.output.count("No space left on device, nor below") == 2
    assert "claims: 3 not-run" in result.output.splitlines()


def test_a_page_that_cannot_be_drawn_leaves_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr("evoteam.reporting.report.render", lambda *_: 1 / 0)
    result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--out", str(tmp_path)])
    assert isinstance(result.exception, ZeroDivisionError) and "claims: 3 not-run" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["summary"] == "claims: 3 not-run"


def test_a_broken_shipped_record_is_named_and_the_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "old.json").write_text("{")
    monkeypatch.setattr(record.shipped, "__defaults__", (tmp_path, None))
    monkeypatch.setattr(Session, "gpu", lambda self: None)
    monkeypatch.setattr("evoteam.reporting.mla._check", lambda session: None)
    result = CliRunner().invoke(main_module.main, ["--mode", "run-only", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0 and result.output.splitlines()[-1] == "claims: 1 hardware-unavailable"
    assert re.search(r"left out: \S+old.json is not JSON", " ".join(result.output.split()))


KERNEL = """
import os, sys
from kernels.mla_paged_decode_triton import mla_paged_decode_triton as decode
print("from the kernel")
os.write(1, b"from below\\n")
os.chdir("/")
"""


def test_what_a_kernel_prints_is_not_in_the_json(repro, tmp_path):
    (tmp_path / "mine.py").write_text(KERNEL)
    options = ("--mode", "run-only", "--kernel", tmp_path / "mine.py:decode", "--out", "there")
    result = repro(*options, "--json", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "there" / "report.json").read_text())  # not where the kernel went
    assert {row["reason"] for row in printed["selfcheck"]["interpreter"]} == {""}
    assert "from the kernel" in result.stderr and "from below" in result.stderr


def test_ctrl_c_while_a_kernel_is_loaded_is_130(tmp_path):
    (tmp_path / "mine.py").write_text("import time; print('loading', flush=True); time.sleep(60)\n")
    command = [sys.executable, ROOT / "repro.py", "--mode", "run-only", "--kernel", "mine.py:f"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stderr.readline() == "loading\n"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, out, err) == (130, "", "interrupted: no report was written\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--list",), ("--mode", "fixed-team"), ("--mode", "fixed-team", "--json")]
)
def test_a_full_standard_output_is_one_line_and_loses_nothing(tmp_path, arguments):
    command = [sys.executable, ROOT / "repro.py", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "Error: cannot write to standard output: No space left on device"
    assert "Traceback" not in done.stderr
    if "--mode" in arguments:
        assert (tmp_path / "repro-report" / "report.json").is_file()
        assert (tmp_path / "repro-report" / "report.html").is_file()


def test_a_path_that_is_no_text_is_kept_out_of_the_record(tmp_path):
    name = b"caf\xe9"
    command = [os.fsencode(sys.executable), os.fsencode(ROOT / "repro.py"), b"--mode", b"fixed-team", b"--out", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    stored = (os.fsencode(tmp_path) + b"/" + name + b"/report.json").decode("utf-8", "surrogateescape")
    assert json.loads(Path(stored).read_text(encoding="utf-8"))["command"][-1] == "caf\N{REPLACEMENT CHARACTER}"


def test_an_interrupted_run_is_no_verdict(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "run", interrupted)
    result = CliRunner().invoke(main_module.main, ["--mode", "fixed-team", "--out", str(tmp_path)])
    assert result.exit_code == 130 and list(tmp_path.iterdir()) == []


def test_a_pipe_closed_between_tables_still_leaves_the_report(tmp_path):
    command = f"{sys.executable} {ROOT / 'repro.py'} --mode run-only --out {tmp_path} | head -c 1"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, env=environment)
    assert (tmp_path / "report.json").is_file() and (tmp_path / "report.html").is_file()
    assert "Error" not in done.stderr and "Traceback" not in done.stderr


def test_a_closed_pipe_still_leaves_the_report(tmp_path):
    command = f"{sys.executable} {ROOT / 'repro.py'} --mode fixed-team --out {tmp_path} | head -c 1"
    subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert (tmp_path / "report.json").is_file() and (tmp_path / "report.html").is_file()


def test_nothing_is_written_outside_the_named_folder(repro, tmp_path):
    result = repro("--mode", "fixed-team", "--out", tmp_path / "there")
    assert result.returncode == 0
    assert f"{tmp_path}/there/report.json" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_last_line_is_greppable_and_a_pipe_gets_no_control_codes(repro, tmp_path):
    result = repro("--mode", "fixed-team", "--out", tmp_path)
    assert re.fullmatch(r"claims: \d+ [a-z-]+(, \d+ [a-z-]+)*", result.stdout.splitlines()[-1])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout + result.stderr)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_quiet_prints_one_line_a_claim(repro, tmp_path):
    result = repro("--mode", "fixed-team", "--quiet", "--out", tmp_path)
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("claims: ") and result.stderr == ""


def test_json_is_the_report_and_nothing_else(repro, tmp_path):
    result = repro("--mode", "same-budget", "--json", "--seed", "7", "--out", tmp_path)
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "report.json").read_text())
    assert printed["seed"] == 7 and printed["modes"] == ["same-budget"]
    assert {claim["id"] for claim in printed["claims"]} >= {"same-budget-evolving", "same-budget-single"}


@pytest.mark.parametrize("mode", ["run-only", "same-budget", "kda-b200"])
def test_every_kind_of_mode_ends_by_the_exit_rule(repro, tmp_path, mode):
    result = repro("--mode", mode, "--strict", "--json", "--workloads", "0", "--out", tmp_path)
    verdicts = {claim["verdict"] for claim in json.loads(result.stdout)["claims"]}
    unjudged = verdicts - {"reproduced", "not-reproduced", "shown"}
    assert result.returncode == (1 if "not-reproduced" in verdicts else 3 if unjudged else 0)


def readme_line(marker):
    text = (ROOT / "README.md").read_text()
    return re.search(rf"<!-- {marker} -->\n```\n(.+)\n```", text)[1]


def test_ci_runs_the_readmes_test_line():
    extract = next(line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("line="))
    found = subprocess.run(["bash", "-c", f'{extract}; printf %s "$line"'], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == readme_line("test line") == 'pip install -e ".[test]" && python -m pytest'


def test_the_run_line_is_one_command():
    assert readme_line("run line") == "pip install -e . && python repro.py"


def test_a_wrong_kernel_reproduces_nothing_even_without_a_gpu(repro, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from kernels.mla_paged_decode_triton import mla_paged_decode_triton\n"
        "def wrong(*arguments):\n"
        "    out, lse = mla_paged_decode_triton(*arguments)\n"
        "    return out * 1.05, lse\n"
    )
    done = repro("--mode", "run-only", "--kernel", "mine.py:wrong", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"wrong on 4 of 6 small\s+inputs in the interpreter; one-token", done.stdout)
    assert done.stdout.splitlines()[-1] == "claims: 1 not-reproduced"

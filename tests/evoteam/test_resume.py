"""Interruptions: kill -9 anywhere, torn and foreign lines, a second writer, a full disk."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evoteam.llm import ScriptedModel
from evoteam.memory import JOURNAL, FolderError, SharedFolder
from evoteam.team import single_agent
from tests.evoteam.test_search import FINISH, evolving_script, revise
from tests.evoteam.toy import end_state, events, run, settings, write

ROOT = Path(__file__).parents[2]
KILLS = 20


def test_killed_twenty_times_a_run_reaches_the_same_end_and_pays_nothing_twice(tmp_path):
    script, log = tmp_path / "script.json", tmp_path / "asked"
    script.write_text(json.dumps(evolving_script([revise()]).answers))
    run(tmp_path / "whole", ScriptedModel.load(script), arm="evolving")
    rng, killed = random.Random(), 0
    while True:
        steps = rng.randint(1, 9) if killed < KILLS else 1_000_000
        command = [
            sys.executable,
            "-m",
            "tests.evoteam.killed_run",
            tmp_path / "r",
            script,
            log,
            steps,
            rng.randrange(10**9),
        ]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode != -signal.SIGKILL:
            break
        killed += 1
    assert done.returncode == 0, done.stderr
    assert killed == KILLS
    assert end_state(tmp_path / "r") == end_state(tmp_path / "whole")
    replies = [event["key"] for event in events(tmp_path / "r", "reply")]
    asked = log.read_text().split()
    assert len(set(replies)) == len(replies)
    for key in replies:  # asked again only when the answer was lost before it was written down
        assert asked.count(key) <= 1 + killed
    assert len(asked) <= len(replies) + 1 + killed


def finished(tmp_path):
    run(tmp_path / "r", ScriptedModel({"engineer": [[write(1.0), FINISH]]}))
    return tmp_path / "r"


def test_a_torn_last_line_is_ended_skipped_and_reported(tmp_path):
    path = finished(tmp_path)
    whole = (path / JOURNAL).read_bytes()
    (path / JOURNAL).write_bytes(whole[: whole.rstrip().rfind(b"\n") + 30])  # the last event cut in the middle
    assert SharedFolder.read(path).torn == 1
    folder = run(path, ScriptedModel({"engineer": [[write(1.0), FINISH]]}), resume=True)
    assert folder.torn == 1 and folder.state.end["reason"] == "answers"
    assert events(path, "resume")[0]["torn"] == 1
    assert [event["seq"] for event in events(path)] == list(range(len(events(path))))


def test_foreign_lines_and_newer_events_are_passed_over_and_unknown_fields_kept(tmp_path):
    path = finished(tmp_path)
    lines = (path / JOURNAL).read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"from_the_future": [1]})
    lines[3:3] = ["not json", "[1, 2]", json.dumps({"seq": 2, "t": "x", "kind": "telepathy", "thought": 1})]
    (path / JOURNAL).write_text("\n".join(lines) + "\n")
    folder = SharedFolder.read(path)
    assert folder.torn == 2 and folder.state.best.score == 1.0
    assert "from_the_future" in (path / JOURNAL).read_text()


def test_a_newer_schema_is_refused_by_name(tmp_path):
    path = finished(tmp_path)
    (path / JOURNAL).write_text((path / JOURNAL).read_text().replace('"schema":1', '"schema":99', 1))
    with pytest.raises(FolderError, match="newer version .schema 99, this one reads 1"):
        SharedFolder.read(path)


SECOND_WRITER = """
import sys
from pathlib import Path
from evoteam.memory import SharedFolder
SharedFolder.open(Path(sys.argv[1]))
"""


def test_a_second_writer_is_refused_while_readers_are_not(tmp_path):
    with SharedFolder.open(tmp_path / "r", settings()):
        command = [sys.executable, "-c", SECOND_WRITER, tmp_path / "r"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1 and "another process is writing" in second.stderr
        assert SharedFolder.read(tmp_path / "r").state.config["arm"] == "single"
    with SharedFolder.open(tmp_path / "r"):
        pass


def test_a_new_run_in_a_used_folder_and_a_resume_of_nothing_are_refused(tmp_path):
    path = finished(tmp_path)
    with pytest.raises(FolderError, match="already holds a run; continue it with --resume"):
        SharedFolder.open(path, settings())
    with pytest.raises(FolderError, match="holds no run to resume"):
        SharedFolder.open(tmp_path / "nothing")


FILL = """
import resource, signal, sys
from pathlib import Path
from evoteam.llm import ScriptedModel
from evoteam.memory import FolderError
from tests.evoteam.toy import FINISH, run, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, resource.RLIM_INFINITY))
try:
    run(Path(sys.argv[1]), ScriptedModel({"engineer": [[write(1.0 + i), FINISH] for i in range(5)]}))
except FolderError as error:
    print(error)
"""


def test_a_write_that_does_not_fit_leaves_a_whole_journal_and_the_run_goes_on_later(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FILL, tmp_path / "r"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "cannot write" in done.stdout and "make room and continue with --resume" in done.stdout, done.stderr
    assert (tmp_path / "r" / JOURNAL).read_bytes().endswith(b"}\n")
    model = ScriptedModel({"engineer": [[write(1.0 + i), FINISH] for i in range(5)]})
    run(tmp_path / "r", model, resume=True)
    run(tmp_path / "whole", model)
    assert end_state(tmp_path / "r") == end_state(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk takes root")
def test_on_a_full_disk_nothing_is_paid_for(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]).returncode:
        pytest.skip("no right to mount here")
    try:
        with pytest.raises(FolderError, match="MB are free under .*, wanted 16"):
            run(small / "r", ScriptedModel({"engineer": [[FINISH]]}))
        assert not events(small / "r", "call", "reply")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_source_changed_on_disk_is_noticed(tmp_path):
    path = finished(tmp_path)
    (path / "attempts" / "a0001" / "kernel.py").write_text("SPEED = 99\n")
    with pytest.raises(FolderError, match="is not what was evaluated"):
        SharedFolder.read(path).source("a0001")


def test_ten_thousand_attempts_open_in_two_seconds(tmp_path):
    path = finished(tmp_path)
    kinds = ("turn", "call", "reply", "attempt", "verdict", "tool", "turn_end")
    cycle = [next(event for event in events(path) if event["kind"] == kind) for kind in kinds]
    with open(path / JOURNAL, "w", encoding="utf-8") as file:
        start = [{"seq": 0, "t": "t", "kind": "run", "schema": 1, "config": settings()}]
        start.append(
            {"seq": 1, "t": "t", "kind": "team", "team": single_agent().model_dump(mode="json"), "diagnosis": ""}
        )
        for event in start:
            file.write(json.dumps(event) + "\n")
        for number in range(10_000):
            for event in cycle:
                event = event | {"seq": 2 + number * len(cycle)}
                event |= {"id": f"a{number:05d}"} if event["kind"] == "attempt" else {}
                event |= {"attempt": f"a{number:05d}"} if event["kind"] == "verdict" else {}
                file.write(json.dumps(event) + "\n")
    started = time.process_time()  # other work on the machine is not the folder's
    folder = SharedFolder.read(path)
    seconds = time.process_time() - started
    assert len(folder.state.judged) == 10_000
    assert seconds < 2, f"{seconds:.2f} s"

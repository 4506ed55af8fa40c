"""The tools of a role: what they refuse, what they leave behind, and who may read what."""

import json

import pytest

from evoteam.llm import ScriptedModel
from evoteam.memory import SharedFolder
from evoteam.signals import read_signals
from evoteam.source import EditError, apply_edit, program_sha256
from evoteam.state import Call, Talk
from evoteam.supervisor import SupervisorTools
from evoteam.team import founding_team
from evoteam.tools import Refused, RoleTools
from tests.evoteam.toy import FINISH, TASK, ToyJudge, candidate, events, run, settings, use, write


@pytest.fixture
def folder(tmp_path):
    """An evolving run after one round: a0001 right, a0002 wrong, both by the writer, and a note of each role."""
    claimed = ["split-kv", "tensor-cores", "magic"]
    writer = [write(1.5), write(2.0, "split", wrong=True, techniques=claimed), use("note", text="mine"), FINISH]
    critic = [use("note", text="look at a0002", evidence=["a0002"]), FINISH]
    model = ScriptedModel({"writer": [writer], "critic": [critic]})
    run(tmp_path / "r", model, arm="evolving")
    with SharedFolder.open(tmp_path / "r") as shared:
        yield shared


def toolbox(folder, role, snapshot=None):
    talk = Talk("turn0009", role, "t0001", 0, folder.state.seq if snapshot is None else snapshot)
    return RoleTools(folder, talk, founding_team(), ToyJudge(), TASK)


def call(name, **arguments):
    return Call("turn0009.01.0", "id", name, arguments, "")


def refusal(box, made):
    with pytest.raises(Refused) as caught:
        box.run(made)
    return str(caught.value)


def test_techniques_count_only_where_the_source_confirms_them(folder):
    attempt = folder.state.attempts["a0002"]
    assert attempt.techniques == ("split-kv",) and attempt.unconfirmed == ("tensor-cores",)


def test_verdicts_show_the_feedback_workloads_only(folder):
    text = next(event["text"] for event in events(folder.path, "tool") if event["key"].endswith(".0"))
    assert text.startswith(
        "a0001: score 1.500; 1.350 over all workloads\n- workload 0: 1.50x; candidate 6.7 us, baseline 10.0 us"
    )
    assert "workload 2" not in text
    failed = events(folder.path, "tool")[1]["text"]
    assert failed.startswith("a0002 failed in phase check: wrong-answer\nworst: index 1, max_abs 0.5\nout is wrong")


@pytest.mark.parametrize(
    ("role", "path", "shared"),
    [
        ("critic", "attempts/a0001/kernel.py", True),
        ("critic", "attempts/a0002/kernel.py", True),
        ("writer", "notes/critic/n0002.md", True),
        ("critic", "notes/writer/n0001.md", True),
        ("writer", "attempts/a0001/verdict.json", False),
        ("writer", "attempts/a0009/kernel.py", False),
        ("writer", "events.jsonl", False),
        ("writer", "../r/attempts/a0001/kernel.py", False),
        ("writer", "attempts/../attempts/a0001/kernel.py", False),
        ("writer", "/etc/passwd", False),
        ("writer", "attempts/a0001/kernel.py\0", False),
        ("writer", "notes/critic/../../events.jsonl", False),
        ("writer", "notes/writer/n0002.md", False),
    ],
)
def test_a_role_reads_what_is_shared_with_it_and_nothing_else(folder, role, path, shared):
    box = toolbox(folder, role)
    if shared:
        assert box.run(call("read", path=path)).text
    else:
        assert refusal(box, call("read", path=path))


def test_what_is_not_shared_is_refused_by_name(folder):
    team = founding_team().model_dump()
    team["sharing"] = {"writer": [], "critic": ["failures"]}
    folder.append(
        "decision",
        round=1,
        by="supervisor",
        rules=[],
        phase="speed",
        tokens=1,
        action="revise",
        diagnosis="d",
        evidence=[],
        team=team | {"id": "t0002"},
    )
    assert "a0001 is not shared with you; your sections are failures" in refusal(
        toolbox(folder, "critic"), call("read", path="attempts/a0001/kernel.py")
    )
    assert toolbox(folder, "critic").run(call("read", path="attempts/a0002/kernel.py")).text
    assert "notes of critic are not shared" in refusal(
        toolbox(folder, "writer"), call("read", path="notes/critic/n0002.md")
    )


def test_what_came_after_the_snapshot_is_seen_by_its_own_role_only(folder):
    early = folder.state.attempts["a0001"].seq
    assert "no attempt a0002 that you can see" in refusal(
        toolbox(folder, "critic", early), call("read", path="attempts/a0002/kernel.py")
    )
    assert toolbox(folder, "writer", early).run(call("read", path="attempts/a0002/kernel.py")).text


def test_a_link_that_leads_out_of_the_folder_is_not_followed(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    (folder.path / "attempts" / "a0001" / "log.txt").symlink_to(secret)
    assert "leads out of the shared folder" in refusal(
        toolbox(folder, "writer"), call("read", path="attempts/a0001/log.txt")
    )


def test_long_files_come_in_pages(folder):
    (folder.path / "attempts" / "a0001" / "log.txt").write_text("x" * 30_000)
    first = toolbox(folder, "writer").run(call("read", path="attempts/a0001/log.txt")).text
    assert first.endswith("[18000 characters follow; read on with offset 12000]")
    assert toolbox(folder, "writer").run(call("read", path="attempts/a0001/log.txt", offset=24_000)).text == "x" * 6_000


def test_an_edit_makes_a_new_attempt_from_its_base(folder):
    edits = [{"search": "WRONG = 1\n", "replace": ""}, {"search": "2.0", "replace": "2.5"}]
    folder.state.talk = None
    box = toolbox(folder, "writer")
    folder.state.talk = box.talk
    text = box.run(call("edit_kernel", base="a0002", edits=edits, idea="repair")).text
    assert "a0003: score 2.500, the best before was 1.500: a new best" in text
    assert folder.state.best.base == "a0002" and folder.source("a0003") == candidate(2.5, "split")


def test_an_edit_that_fits_nowhere_is_told_the_nearest_lines():
    source = "def f(x):\n    total = x + 1\n    return total\n"
    with pytest.raises(EditError, match="the search text is not in the source") as caught:
        apply_edit(source, "    totl = x + 1\n", "")
    assert "   2      total = x + 1" in str(caught.value)
    with pytest.raises(EditError, match="stands 2 times"):
        apply_edit(source, "total", "")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fly", {}, "there is no tool 'fly' here; the tools are write_kernel, edit_kernel, read, note, finish"),
        ("write_kernel", {}, "- source: Field required"),
        ("write_kernel", {"source": 7, "idea": "x"}, "- source: Input should be a valid string (got 7)"),
        ("write_kernel", {"source": "x", "idea": "x", "speed": 9}, "- speed: Extra inputs are not permitted"),
        (
            "write_kernel",
            {"source": "x = '\ud800'", "idea": "x"},
            "- source: Input should be a valid string, unable to parse",
        ),
        (
            "edit_kernel",
            {"base": "a0099", "edits": [{"search": "a", "replace": "b"}], "idea": "x"},
            "no attempt 'a0099' that you can see",
        ),
        ("edit_kernel", {"base": "a0001", "edits": [], "idea": "x"}, "- edits: List should have at least 1 item"),
        (
            "edit_kernel",
            {"base": "a0001", "edits": [{"search": "zz", "replace": ""}], "idea": "x"},
            "edit 1: the search text is not",
        ),
        ("note", {"text": "x", "evidence": ["a0044"]}, "unknown: a0044"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(folder, name, arguments, message):
    assert message in refusal(toolbox(folder, "writer"), call(name, **arguments))


def test_a_role_has_only_the_tools_it_was_given(folder):
    assert "there is no tool 'write_kernel' here; the tools are read, note, finish" in refusal(
        toolbox(folder, "critic"), call("write_kernel")
    )


def test_comments_docstrings_and_layout_do_not_make_a_new_program():
    same = ['def f():\n    """doc"""\n    return  1 # one\n', "def f():\n    return 1\n"]
    assert program_sha256(same[0]) == program_sha256(same[1]) != program_sha256("def f():\n    return 2\n")
    assert program_sha256("not python (") != program_sha256("not python [")


def test_the_supervisor_is_shown_everything_and_told_how_to_decide(folder):
    box = SupervisorTools(
        folder, Talk("turn0009", "supervisor", "t0001", -1, folder.state.seq), read_signals(folder.state)
    )
    assert box.run(call("read", path="notes/writer/n0001.md")).text == "mine\n"
    team = box.specs()[-1]["input_schema"]["properties"]["team"]
    assert "mandate" not in team["properties"]["roles"]["items"]["required"] and "id" not in team["properties"]


def test_every_tool_text_belongs_to_a_tool_and_every_argument_is_described(folder):
    box = toolbox(folder, "writer")
    for spec in box.specs():
        assert spec["description"] and all(
            "description" in node for node in spec["input_schema"]["properties"].values()
        ), spec["name"]
    assert len(json.dumps(box.specs())) < 4_000


def test_a_note_is_a_file_and_an_event(folder):
    assert (folder.path / "notes" / "critic" / "n0002.md").read_text() == "look at a0002\n"
    assert [(note["role"], note["evidence"]) for note in events(folder.path, "note")] == [
        ("writer", []),
        ("critic", ["a0002"]),
    ]


def test_a_judge_that_fails_by_itself_is_no_failed_idea(tmp_path):
    from evoteam.judging.evaluator import EvaluationError
    from evoteam.judging.verdict import Verdict

    class Broken(ToyJudge):
        def evaluate(self, source, attempt_dir, *, best):
            good = super().evaluate(source, attempt_dir, best=best)
            return Verdict(
                "toy", good.source_sha256, "0", "1", "time", failure="evaluator", message="no confinement works here"
            )

    model = ScriptedModel({"engineer": [[write(1.0), FINISH]]})
    with pytest.raises(EvaluationError, match="a0001: no confinement works here"):
        run(tmp_path / "r", model, judge=Broken())
    state = run(tmp_path / "r", model, resume=True).state
    assert [attempt.score for attempt in state.judged] == [1.0] and settings()["arm"] == "single"

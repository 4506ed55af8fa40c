"""The mailbox: a page that needs nothing beside it, an answer that needs no escaping, and verdicts from elsewhere."""

import json
import os
import threading
import time

import pytest

from evoteam import mailbox
from evoteam.budget import Usage
from evoteam.llm import Request, ScriptedModel
from evoteam.mailbox import END, MailboxJudge, MailboxModel, read_answer, render, waiting
from evoteam.memory import SharedFolder
from tests.evoteam.toy import FINISH, ToyJudge, candidate, end_state, events, run, settings, use, write

TOOLS = [
    {
        "name": "write_kernel",
        "description": "Submit.",
        "input_schema": {"type": "object", "properties": {"source": {"type": "string"}}},
    }
]
REQUEST = Request("turn0001.02", "writer", 1, "You write.", [{"role": "user", "content": "Go."}], TOOLS, 900, "")
ANSWER = f"""---
model: a careful reader
---
I try this.

### call write_kernel

```json
{{"idea": "faster", "techniques": ["split-kv"]}}
```

#### source
````python
DOC = '''
```
inner fence
```
'''
````

### call finish
```json
{{}}
```

{END}
"""


def test_an_answer_is_read_as_it_was_meant():
    reply = read_answer(ANSWER, REQUEST)
    assert reply.model == "a careful reader" and reply.stop_reason == "tool_use" and not reply.faults
    text, call, finish = reply.content
    assert text == {"type": "text", "text": "I try this."}
    assert call["input"] == {
        "idea": "faster",
        "techniques": ["split-kv"],
        "source": "DOC = '''\n```\ninner fence\n```\n'''\n",
    }
    assert finish["name"] == "finish" and finish["input"] == {}


def test_line_ends_of_any_desk_and_characters_that_look_like_line_ends_survive():
    page = ANSWER.replace("inner fence", "a\x0c\u2028b").replace("\n", "\r\n")
    assert "a\x0c\u2028b\n" in read_answer(page, REQUEST).content[1]["input"]["source"]


def test_edits_are_written_one_block_after_the_other():
    page = '### call edit_kernel\n```json\n{"base": "a0001", "idea": "i"}\n```\n'
    for number in (1, 2):
        page += f"#### edits.search\n```\nold {number}\n```\n#### edits.replace\n```\nnew {number}\nline\n```\n"
    (call,) = read_answer(page + END, REQUEST).content
    assert call["input"]["edits"] == [{"search": f"old {n}\n", "replace": f"new {n}\nline\n"} for n in (1, 2)]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("### call note\n```json\n{not json\n```", "is not valid JSON"),
        ("### call note\n```json\n[1]\n```", "the arguments are list, wanted a JSON object"),
        ("### call note\n#### text\n```\nnever closed", "is never closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_so(page, fault):
    reply = read_answer(f"{page}\n{END}", REQUEST)
    assert fault in reply.faults[reply.content[-1]["id"]]


def test_usage_is_taken_from_the_answer_or_counted_and_marked():
    assert read_answer(ANSWER, REQUEST).usage.estimated
    stated = ANSWER.replace(
        "model: a careful reader", "model: m\ninput_tokens: 10\ncache_read_tokens: 5\noutput_tokens: 7"
    )
    assert read_answer(stated, REQUEST).usage == Usage(10, 0, 5, 7)
    assert read_answer(f"hello\n{END}", REQUEST).model == "unstated"


def test_a_page_holds_everything_and_its_own_calls_read_back():
    call = use("edit_kernel", base="a0001", idea="i", edits=[{"search": "a ```` b\n", "replace": "c\nd\n"}])
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Thus."}, call | {"id": "x"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": "no such line", "is_error": True}],
        },
    ]
    page = render(
        Request("turn0001.03", "writer", 2, "You write.", messages, TOOLS, 900, ""), "turn0001.03-writer.answer.md"
    )
    for part in (
        "You write.",
        "Go.",
        "The tool refused:\n\nno such line",
        "### write_kernel",
        '"source": {"type": "string"}',
        END,
    ):
        assert part in page
    assert "`turn0001.03-writer.answer.md`" in page and "under 900 tokens" in page and "$" not in page
    shown = page[page.index("Thus.") : page.index("The tool refused")]
    assert read_answer(shown + END, REQUEST).content[1]["input"] == call["input"]


def answering(folder, answers, stop):
    """Another desk: answers requests in order, each written in two halves."""
    while not stop.is_set():
        for question in waiting(folder):
            if not answers:
                return
            target = question.with_name(question.name.replace(".request.", ".answer."))
            page = answers.pop(0)
            target.write_text(page[: len(page) // 2])
            time.sleep(0.05)
            target.write_text(page)
        time.sleep(0.01)


def page(*calls):
    parts = [f"### call {call['name']}\n```json\n{json.dumps(call['input'])}\n```\n" for call in calls]
    return "---\nmodel: tester\n---\n" + "\n".join(parts) + END + "\n"


def desk(path, answers):
    stop = threading.Event()
    thread = threading.Thread(target=answering, args=(path / "mailbox", answers, stop), daemon=True)
    thread.start()
    return stop, thread


def test_a_run_is_played_from_another_desk(tmp_path):
    path, said = tmp_path / "r", []
    answers = [page(write(1.5)), page(write(2.5), use("note", text="done", evidence=["a0002"])), page(FINISH)]
    stop, thread = desk(path, answers)
    model = MailboxModel(path / "mailbox", say=said.append, poll_s=0.01)
    state = run(path, model, tokens=10_000).state  # two evaluations
    stop.set()
    thread.join()
    assert state.best.score == 2.5 and state.models == {"tester": 3}
    assert state.ledger.estimated_calls == state.ledger.total.calls == 3 and state.ledger.total.usage.cache_read > 0
    assert "turn0001.01-engineer.answer.md (the request is" in said[0]


def test_an_answer_that_came_while_the_run_was_down_is_picked_up_and_not_asked_for_again(tmp_path):
    path = tmp_path / "r"

    class Gone(Exception):
        pass

    def leave(line):
        raise Gone

    with pytest.raises(Gone):
        run(path, MailboxModel(path / "mailbox", say=leave))
    (question,) = waiting(path / "mailbox")
    before = question.read_text()
    question.with_name(question.name.replace("request", "answer")).write_text(page(write(3.0), FINISH))
    with pytest.raises(Gone):
        run(path, MailboxModel(path / "mailbox", say=leave), resume=True)
    assert question.read_text() == before and SharedFolder.read(path).state.best.score == 3.0
    assert len(events(path, "call")) == 2 and not any(event.get("lost") for event in events(path, "resume"))


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(mailbox, "SETTLED_S", 0.3)


def asked(folder, said):
    """Another desk's view of one request: its answer file, and the thread that waits for it."""
    model, got = MailboxModel(folder, say=said.append, poll_s=0.01), []
    thread = threading.Thread(target=lambda: got.append(model.ask(REQUEST)), daemon=True)
    thread.start()
    until(lambda: said)
    return folder / "turn0001.02-writer.answer.md", thread, got


def until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_an_answer_without_its_last_line_is_named_once_for_every_version_of_it(tmp_path, hasty):
    said = []
    answer, thread, got = asked(tmp_path / "m", said)
    answer.write_text("a first attempt")
    until(lambda: len(said) == 2)
    time.sleep(1)
    assert said[1:] == [f"{answer} has no line {END} at its end, the sign that it is finished; still waiting"]
    for number in range(20):  # still being written: nothing to say
        answer.write_text("more and more" * number)
        time.sleep(0.05)
    assert len(said) == 2
    until(lambda: len(said) == 3)
    answer.write_text(page(FINISH))
    thread.join(20)
    assert got[0].content[-1]["name"] == "finish" and len(said) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "cannot be read: it is a folder, wanted a regular file"),
        (os.mkfifo, "cannot be read: it is a pipe, wanted a regular file"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "has more than 16 MiB"),
    ],
)
def test_what_is_no_answer_file_is_named_and_waited_out(tmp_path, hasty, make, words):
    said = []
    answer, thread, got = asked(tmp_path / "m", said)
    make(answer)
    until(lambda: len(said) == 2)
    assert said[1].startswith(f"{answer} {words}") and not got
    assert waiting(tmp_path / "m")
    answer.rename(tmp_path / "away")
    answer.write_text(page(FINISH))
    thread.join(20)
    assert got[0].content[-1]["name"] == "finish" and len(said) == 2


def judged_elsewhere(path, stop, spoil):
    """The other machine: judges what waits; the first verdict of every attempt is spoiled."""
    seen = set()
    while not stop.is_set():
        for source in path.glob("attempts/*/kernel.py"):
            target = source.with_name("verdict.json")
            if not target.exists():
                record = ToyJudge().evaluate(source, source.parent, best=0.0).to_json()
                if source not in seen:
                    record |= spoil
                    seen.add(source)
                temporary = target.with_name("copying")
                temporary.write_text(json.dumps(record))
                os.replace(temporary, target)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"source_sha256": "f" * 64}, "source_sha256 is ffff"),
        ({"task_sha256": "f" * 64}, "task_sha256 is ffff"),
        ({"evaluator_sha256": "f" * 64}, "evaluator_sha256 is ffff"),
        ({"task": "another"}, "task is another, wanted toy"),
        ({"full_score": None}, "does not cover all workloads; evaluate with --full"),
        ({"gpu_seconds": "two"}, "gpu_seconds is a field of the wrong type: 'two', not a number"),
    ],
)
def test_verdicts_come_from_another_machine_and_wrong_ones_are_refused(tmp_path, hasty, spoil, reason):
    path, said, stop = tmp_path / "r", [], threading.Event()
    other = threading.Thread(target=judged_elsewhere, args=(path, stop, spoil), daemon=True)
    other.start()
    judge = MailboxJudge("toy", {"task_sha256": "0" * 64, "evaluator_sha256": "1" * 64}, say=said.append, poll_s=0.01)
    model = ScriptedModel({"engineer": [[write(2.0), FINISH]]})
    run(path, model, judge=judge)
    stop.set()
    other.join()
    assert reason in next(line for line in said if line.startswith("refused"))
    assert len(list(path.glob("attempts/*/verdict.refused-1.json"))) == 1
    run(tmp_path / "here", model)
    assert end_state(path) == end_state(tmp_path / "here")


def test_a_verdict_that_is_still_being_copied_is_waited_for(tmp_path):
    attempt = tmp_path / "a0001"
    attempt.mkdir()
    (attempt / "kernel.py").write_text(candidate(2.0))
    whole = json.dumps(ToyJudge().evaluate(attempt / "kernel.py", attempt, best=0.0).to_json())
    for delay, part in ((0.1, whole[:50]), (0.3, whole)):
        threading.Timer(delay, (attempt / "verdict.json").write_text, [part]).start()
    said = []
    judge = MailboxJudge("toy", {"task_sha256": "0" * 64, "evaluator_sha256": "1" * 64}, say=said.append, poll_s=0.01)
    assert judge.evaluate(attempt / "kernel.py", attempt, best=0.0).score == 2.0
    assert not list(attempt.glob("verdict.refused*"))
    assert said == [
        f"waiting for {attempt}/verdict.json; make it with: python -m evoteam evaluate {attempt} --task toy --full"
    ]


def test_a_verdict_that_is_no_file_is_set_aside(tmp_path, hasty):
    attempt, said = tmp_path / "a0001", []
    (attempt / "verdict.json").mkdir(parents=True)
    (attempt / "kernel.py").write_text(candidate(2.0))
    whole = json.dumps(ToyJudge().evaluate(attempt / "kernel.py", attempt, best=0.0).to_json())
    judge = MailboxJudge("toy", {"task_sha256": "0" * 64, "evaluator_sha256": "1" * 64}, say=said.append, poll_s=0.01)
    threading.Timer(1.0, (attempt / "verdict.json").write_text, [whole]).start()
    assert judge.evaluate(attempt / "kernel.py", attempt, best=0.0).score == 2.0
    assert "it is a folder, wanted a regular file; it is kept as verdict.refused-1.json, still waiting" in said[0]


def test_the_configuration_says_where_verdicts_come_from():
    assert settings(evaluate_by="mailbox")["evaluate_by"] == "mailbox"

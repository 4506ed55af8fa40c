"""What a session cannot do to the run or through the model's server, with a small stand-in for a command line."""

import os
import time

import pytest

from evoteam.sessions import live, workplace
from evoteam.sessions.agents import TABLE
from evoteam.sessions.reach import LEFT_OUT, PICTURE_TOKENS, kept, prompt_characters
from tests.evoteam.test_session_door import session
from tests.evoteam.test_sessions import living
from tests.evoteam.toy import ToyJudge, events

MESSAGES, RESPONSES = TABLE["apis"]["messages"], TABLE["apis"]["responses"]


def test_addresses_prices_and_unknown_fields_stay_behind(tmp_path):
    code = """
    address = {"type": "document", "source": {"type": "url", "url": "https://elsewhere.example/?d=secret"}}
    held = {"type": "text", "text": "kept", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [address, held]}
    ask([address, held, result], speed="fast", service_tier="priority", container="c", temperature=0.5)
    sys.exit()
    """
    _, _, server = session(tmp_path, code, tokens=12_000)
    body = server.requests[1]
    assert not {"speed", "service_tier", "container"} & body.keys() and body["temperature"] == 0.5
    left = {"type": "text", "text": LEFT_OUT}
    held = {"type": "text", "text": "kept", "cache_control": {"type": "ephemeral"}}
    assert body["messages"][0]["content"][:2] == [left, held]
    assert body["messages"][0]["content"][2]["content"] == [left, held]
    assert "elsewhere" not in str(server.requests)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "input_image", "image_url": "https://elsewhere.example/x.png"},
        {"type": "input_file", "file_url": "https://elsewhere.example/x.pdf"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "item_reference", "id": "msg_1"},
    ],
)
def test_the_other_api_keeps_to_the_same_rule(block):
    inline = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = {"model": "m", "input": [{"role": "user", "content": [block, inline]}], "previous_response_id": "r"}
    assert kept(body | {"background": True}, RESPONSES) == {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": LEFT_OUT}, inline]}],
    }


def test_a_picture_is_not_counted_as_text():
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 3_000_000}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}]}
    assert kept(body, MESSAGES) == body
    assert PICTURE_TOKENS < prompt_characters(body) < 10 * PICTURE_TOKENS


def test_a_prompt_that_cannot_be_paid_ends_its_turn_and_not_the_run(tmp_path):
    folder, _, _ = session(tmp_path, 'ask("x" * 400_000); sys.exit()', tokens=8_000)
    reasons = [turn.reason for turn in folder.state.turns]
    assert len(reasons) > 2 and set(reasons[:-1]) == {"prompt"} and reasons[-1] == "budget"


def test_connections_beyond_a_few_are_closed(tmp_path):
    code = """
    import glob, socket, time
    words = open("/proc/1/cmdline", "rb").read() + open(f"/proc/{os.getppid()}/cmdline", "rb").read()
    path = next(word for word in words.split(b"\\0") if word.endswith(b"/door")).decode()
    opened = []
    for _ in range(200):
        one = socket.socket(socket.AF_UNIX)
        one.connect(path)
        one.settimeout(0.05)
        opened.append(one)
    time.sleep(1)
    def closed(one):
        try:
            return one.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True
    print("held", sum(not closed(one) for one in opened))
    for one in opened:
        one.close()
    time.sleep(1)
    open("k.py", "w").write("SPEED = 2\\n")
    run("evaluate", "k.py", "--idea", "x")
    sys.exit()
    """
    judge = ToyJudge()
    _, printed, _ = session(tmp_path, code, judge=judge, tokens=8_000)
    held = int(printed.partition("held ")[2].split()[0])
    assert 0 < held <= 32 and judge.asked


def test_what_a_session_asks_in_a_turn_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "ASKED_CHARACTERS", 5_000)
    code = 'open("k.py", "w").write("x = 1" + " " * 2_000)\nwhile True: run("evaluate", "k.py", "--idea", "i")'
    folder, _, _ = session(tmp_path, code, tokens=8_000)
    assert folder.state.turns[0].reason == "calls"
    assert len([event for event in events(folder.path, "asked") if event["key"].startswith("turn0001")]) == 3


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("PROCESSES", "[subprocess.Popen(['sleep', '@']) for _ in range(30)]"),
        ("MEMORY_BYTES", "held = b'x' * (600 << 20)"),
        ("WORKSPACE_BYTES", "open('big', 'wb').write(b'x' * (30 << 20))"),
    ],
)
def test_a_session_that_takes_too_much_is_ended(tmp_path, monkeypatch, limit, code):
    monkeypatch.setattr(
        workplace, limit, {"PROCESSES": 20, "MEMORY_BYTES": 400 << 20, "WORKSPACE_BYTES": 20 << 20}[limit]
    )
    mark = f"8640{os.getpid()}.5"
    start = time.monotonic()
    folder, _, _ = session(tmp_path, code.replace("@", mark) + "\nimport time; time.sleep(600)", tokens=8_000)
    reason = {"PROCESSES": "processes", "MEMORY_BYTES": "memory", "WORKSPACE_BYTES": "disk"}[limit]
    assert folder.state.turns[0].reason == reason and time.monotonic() - start < 60
    assert not living(mark)

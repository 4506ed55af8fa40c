"""The real `anthropic` SDK over HTTP against a local Messages server, in fair and in bad weather."""

import subprocess
import sys
from pathlib import Path

import pytest

from evoteam.anthropic_model import AnthropicModel
from evoteam.budget import Usage, rates
from evoteam.llm import ProviderError, Request
from evoteam.memory import SharedFolder
from tests.evoteam.messages_server import MessagesServer, serve
from tests.evoteam.toy import FINISH, candidate, events, run, write

ROOT = Path(__file__).parents[2]
KEY = "sk-ant-planted-7f3e9c"
TOOL = {"name": "finish", "description": "end", "input_schema": {"type": "object", "properties": {}}}
REQUEST = Request(
    "turn0001.01",
    "engineer",
    0,
    "be brief",
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [TOOL],
    4_000,
    "",
)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)


def with_id(block, number=0):
    return {"id": f"toolu_{number}"} | block


def ask(behaviors, *, stream=True, request=REQUEST, tries=4):
    """(reply or ProviderError, server, seconds slept)."""
    server, slept = MessagesServer(behaviors), []
    with serve(server) as url:
        model = AnthropicModel("claude-sonnet-5-5", base_url=url, stream=stream, tries=tries, sleep=slept.append)
        try:
            return model.ask(request), server, slept
        except ProviderError as error:
            return error, server, slept


@pytest.mark.parametrize("stream", [True, False])
def test_text_and_tool_calls_come_whole_with_the_usage_the_server_counted(stream):
    thought = {"type": "thinking", "thinking": "hm " * 30, "signature": "c2lnbmF0dXJl" * 9}
    blocks = [
        thought,
        {"type": "redacted_thinking", "data": "eA=="},
        {"type": "text", "text": "wait " * 30},
        with_id(write(1.5, "split")),
    ]
    reply, server, _ = ask([("answer", blocks)], stream=stream)
    assert reply.content == blocks and reply.stop_reason == "tool_use" and reply.faults == {}
    billed = server.billed[0]
    assert reply.usage == Usage(
        7, billed["cache_creation_input_tokens"], billed["cache_read_input_tokens"], billed["output_tokens"]
    )
    sent = server.requests[0]
    assert sent["stream"] if stream else "stream" not in sent
    assert (
        sent["system"][0]["cache_control"]
        == sent["messages"][-1]["content"][-1]["cache_control"]
        == {"type": "ephemeral"}
    )
    assert not {"temperature", "tool_choice", "thinking", "output_config"} & sent.keys()


def test_effort_is_sent_where_it_was_asked_for():
    request = Request("k", "r", 0, "s", REQUEST.messages, [TOOL], 100, "high")
    assert ask([], request=request)[1].requests[0]["output_config"] == {"effort": "high"}


@pytest.mark.parametrize("code", [408, 409, 429, 500, 503, 529])
def test_what_can_pass_is_retried_and_not_charged(code):
    reply, server, slept = ask([("status", (code, {})), ("status", (code, {})), ("answer", [with_id(FINISH)])])
    assert reply.retries == 2 and len(server.requests) == 3
    assert reply.usage.output == server.billed[0]["output_tokens"] and not reply.usage.estimated
    assert slept == [0.5, 1.0]


def test_retry_after_is_obeyed_within_reason_only():
    assert ask([("status", (429, {"retry-after": "3"}))])[2] == [3.0]
    error, server, slept = ask([("status", (429, {"retry-after": "86400"}))])
    assert isinstance(error, ProviderError) and slept == [] and len(server.requests) == 1


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413])
def test_what_cannot_pass_ends_at_once_with_the_servers_words(code):
    error, server, _ = ask([("status", (code, {}))])
    assert f"HTTP {code}: refused with {code}" in str(error) and len(server.requests) == 1
    assert error.usage == Usage()


@pytest.mark.parametrize("weather", ["cut", "reset", "error"])
def test_an_answer_that_breaks_off_is_charged_and_asked_again(weather):
    blocks = [with_id(write(1.0, "x" * 2_000))]
    reply, server, _ = ask([(weather, blocks), ("answer", [with_id(FINISH)])])
    assert reply.content == [with_id(FINISH)] and reply.retries == 1
    whole = server.billed[-1]
    assert reply.usage.estimated and reply.usage.cache_write > whole["cache_creation_input_tokens"]
    assert reply.usage.output >= whole["output_tokens"] + (400 if weather == "cut" else 0)


def test_a_socket_reset_before_the_answer_is_retried_and_its_prompt_charged():
    reply, server, _ = ask([("reset", None), ("answer", [with_id(FINISH)])])
    assert reply.retries == 1 and reply.usage.estimated
    assert reply.usage.cache_write == server.billed[0]["cache_creation_input_tokens"] + REQUEST.prompt_tokens


def test_no_server_at_all_is_not_charged():
    model = AnthropicModel("claude-sonnet-5-5", base_url="http://127.0.0.1:9", tries=2, sleep=lambda s: None)
    with pytest.raises(ProviderError, match="no answer after 2 tries") as caught:
        model.ask(REQUEST)
    assert caught.value.usage == Usage()


@pytest.mark.parametrize("raw", ['{"source": "x", ', "", "null", "[1]", "7", '"text"', "{" * 5_000, '{"a": 1}}'])
def test_malformed_tool_input_is_reported_and_never_run_as_an_empty_one(raw):
    block = with_id({"type": "tool_use", "name": "write_kernel", "raw": raw})
    reply, *_ = ask([("answer", [block])])
    assert reply.content[0]["input"] == {}
    if raw:
        assert reply.faults["toolu_0"]


@pytest.mark.parametrize("given", [None, [1], 7, "text"])
def test_malformed_tool_input_of_a_server_that_does_not_stream(given):
    import json

    block = with_id({"type": "tool_use", "name": "write_kernel", "raw": json.dumps(given)})
    reply, *_ = ask([("answer", [block])], stream=False)
    assert reply.content[0]["input"] == {} and "wanted a JSON object" in reply.faults["toolu_0"]


def test_thinking_goes_back_unmodified_and_the_history_only_grows(tmp_path):
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    server = MessagesServer([("answer", [thought, with_id(write(1.0))])])
    with serve(server) as url:
        run(tmp_path / "r", AnthropicModel("claude-sonnet-5-5", base_url=url), tokens=30_000)
    first, second = server.requests[:2]
    assert second["messages"][1]["content"] == [thought, with_id(write(1.0))]
    assert second["messages"][2]["content"][0]["tool_use_id"] == "toolu_0"
    assert second["messages"][0]["content"][0]["text"] == first["messages"][0]["content"][0]["text"]


def test_an_answer_cut_by_its_length_does_not_run_its_last_call(tmp_path):
    server = MessagesServer([("stop", ([with_id(write(1.0)), with_id(write(9.0), 1)], "max_tokens"))])
    with serve(server) as url:
        folder = run(tmp_path / "r", AnthropicModel("claude-sonnet-5-5", base_url=url), tokens=60_000)
    assert [attempt.score for attempt in folder.state.judged] == [1.0]
    assert "your answer was cut" in events(folder.path, "tool")[1]["text"]


def test_an_evolving_run_over_http_with_the_ledger_equal_to_the_bill(tmp_path):
    team = {
        "rationale": "one role",
        "roles": [{"name": "fixer", "mandate": "Repair split-kv.", "tools": ["edit_kernel"], "share": 1.0}],
        "order": [["fixer"]],
        "sharing": {"fixer": ["failures"]},
    }
    split = {"techniques": ["split-kv"], "wrong": True}
    edit = {
        "type": "tool_use",
        "name": "edit_kernel",
        "input": {"base": "a0002", "idea": "repair", "edits": [{"search": "WRONG = 1\n", "replace": ""}]},
    }
    decide = {"type": "tool_use", "name": "decide", "input": {"action": "revise", "diagnosis": "retreat", "team": team}}
    turns = [[write(1.0), write(4.0, "split", **split), write(4.1, "split", **split)], [FINISH], [FINISH],
             [write(1.001), write(1.002), FINISH], [FINISH], [decide], [edit]]  # fmt: skip
    server = MessagesServer([("answer", [with_id(block, i) for i, block in enumerate(turn)]) for turn in turns])
    with serve(server) as url:
        model = AnthropicModel("claude-sonnet-5-5", base_url=url)
        folder = run(tmp_path / "r", model, arm="evolving", tokens=150_000)
    state = folder.state
    assert state.best.score == 4.0 and state.best.role == "fixer" and len(state.tenures) == 2
    price = rates("claude-sonnet-5-5")
    bill = [
        Usage(7, b["cache_creation_input_tokens"], b["cache_read_input_tokens"], b["output_tokens"])
        for b in server.billed
    ]
    assert state.ledger.total.tokens == pytest.approx(sum(price.tokens(usage) for usage in bill))
    assert state.ledger.total.dollars == pytest.approx(sum(price.dollars(usage) for usage in bill))
    assert state.ledger.total.calls == len(server.requests) and state.end["reason"] in ("budget", "evaluations")
    leaks = [path for path in folder.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == [] and any(KEY in value for headers in server.headers for value in headers.values())


def test_a_provider_that_stays_away_leaves_a_run_to_resume_and_no_failed_idea(tmp_path):
    path = tmp_path / "r"
    server = MessagesServer([("answer", [with_id(write(1.0))])] + [("status", (529, {}))] * 2)
    with serve(server) as url:
        model = AnthropicModel("claude-sonnet-5-5", base_url=url, tries=2, sleep=lambda s: None)
        with pytest.raises(ProviderError, match="HTTP 529"):
            run(path, model, tokens=30_000)
        state = SharedFolder.read(path).state
        assert state.end is None and len(state.judged) == 1 and len(state.providers) == 1
        asked = len(server.requests)
        state = run(path, model, resume=True).state
    assert state.end and [attempt.id for attempt in state.judged] == ["a0001"]
    assert server.requests[asked]["messages"] == server.requests[asked - 1]["messages"]


KILLED = """
import os, signal, sys
from pathlib import Path
from evoteam.anthropic_model import AnthropicModel
from evoteam.memory import SharedFolder
from tests.evoteam.toy import run
os.environ["ANTHROPIC_API_KEY"] = "x"
model = AnthropicModel("claude-sonnet-5-5", base_url=sys.argv[2])
ask, left = model.ask, 3
def mortal(request):
    global left
    left -= 1
    reply = ask(request)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return reply
model.ask = mortal
run(Path(sys.argv[1]), model, tokens=200_000)
"""


def test_an_answer_lost_by_kill_9_is_charged_as_reserved_and_no_other_is_asked_again(tmp_path):
    path = tmp_path / "r"
    answers = [("answer", [with_id(write(1.0 + i))]) for i in range(6)]
    server = MessagesServer(answers)
    with serve(server) as url:
        killed = subprocess.run([sys.executable, "-c", KILLED, path, url], cwd=ROOT, capture_output=True, timeout=120)
        assert killed.returncode == -9, killed.stderr
        before = SharedFolder.read(path).state
        assert before.ledger.total.calls == 2 and before.open_call["key"] == "turn0001.03"
        folder = run(path, AnthropicModel("claude-sonnet-5-5", base_url=url), resume=True)
    lost = events(path, "resume")[0]
    assert lost["lost"] == "turn0001.03" and lost["usage"]["output"] == before.open_call["reserved"]["output"] > 0
    assert len(server.requests) == len(events(path, "reply")) + 1
    assert folder.state.ledger.total.calls == len(server.requests)


def test_without_key_and_server_one_line_says_what_to_do(monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(ProviderError, match="ANTHROPIC_API_KEY is not set: export it, or use --model mailbox"):
        AnthropicModel("claude-sonnet-5-5")


def test_a_candidate_that_was_written_over_http_is_byte_for_byte_the_models(tmp_path):
    text = candidate(2.0) + '# é 漢 "quoted" \\ back\t\n'
    block = with_id({"type": "tool_use", "name": "write_kernel", "input": {"source": text, "idea": "i"}})
    with serve(MessagesServer([("answer", [block])])) as url:
        folder = run(tmp_path / "r", AnthropicModel("claude-sonnet-5-5", base_url=url), tokens=30_000)
    assert (folder.path / "attempts" / "a0001" / "kernel.py").read_bytes() == text.encode()

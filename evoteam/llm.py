"""What the loop asks of a language model, and the two models that need none: scripted and replayed."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from evoteam.budget import CHARS_PER_TOKEN, Usage, tokens_of
from evoteam.journal import read_events
from evoteam.judging.files import read_regular

MAX_DEPTH = 60
SCRIPT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `key` names it for good (a resumed run asks again under the same key); `number` counts the answers
    this role had before; `seen_tokens` is the part of the prompt that the previous call of the turn already held."""

    key: str
    role: str
    number: int
    system: str
    messages: list[dict]
    tools: list[dict]
    max_tokens: int
    effort: str
    seen_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return tokens_of(self.system) + round(_characters([self.messages, self.tools]) / CHARS_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: content blocks in the form of the Messages API. `faults`: tool-use id -> why its input is unusable."""

    content: list[dict]
    stop_reason: str
    usage: Usage
    model: str
    faults: dict[str, str] = field(default_factory=dict)
    retries: int = 0


class ProviderError(RuntimeError):
    """No answer could be had. `usage` was charged, or may have been."""

    def __init__(self, message: str, usage: Usage = Usage()):
        super().__init__(message)
        self.usage = usage


class RecordingEnds(RuntimeError):
    """A script or recording holds no further answer for this role."""

    def __init__(self, role: str, given: int):
        super().__init__(f"there are {given} answers of the role {role!r} and one more was asked for")


class BudgetSpent(Exception):
    """The next call cannot be paid."""


class Model(Protocol):
    """`repeatable`: asking again under the same key costs nothing more, so a lost answer need not be charged.

    metered: calls are made only while the budget can pay them. A recording knows by itself which one could not be paid.
    """

    name: str
    repeatable: bool
    metered: bool

    def ask(self, request: Request) -> Reply: ...


def call_key(turn: str, number: int) -> str:
    """Key of the `number`-th call of a turn, from 1."""
    return f"{turn}.{number:02d}"


def tidy(blocks: Any, key: str) -> tuple[list[dict], dict[str, str]]:
    """Content blocks fit to be sent back, whatever the model produced, and the faults of their tool inputs.

    A tool input that is no object is replaced by {} and reported, never run as {}.
    """
    content, faults = [], {}
    for index, given in enumerate(blocks if isinstance(blocks, list) else [blocks]):
        block = _block(given)
        if block["type"] == "text" and not (isinstance(block.get("text"), str) and block["text"].strip()):
            continue
        if block["type"] == "tool_use":
            known = [earlier.get("id") for earlier in content]
            block, fault = _tidy_use(block, f"{key}-{index}".replace(".", "-"), known)
            if fault:
                faults[block["id"]] = fault
        content.append(_plain(block))
    return content or [{"type": "text", "text": "(empty answer)"}], faults


def _block(given: Any) -> dict:
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        return {"type": "text", "text": given if isinstance(given, str) else "(no content block)"}
    if not _deep(given):
        return given
    return (
        given | {"input": None}
        if given["type"] == "tool_use"
        else {"type": "text", "text": "(a block nested too deeply)"}
    )


def _deep(value: Any) -> bool:
    """Nested beyond what any answer needs, and what JSON writers can bear."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True


def _plain(value: Any) -> Any:
    """The value without what JSON can carry and files and requests cannot: halves of characters, endless integers."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{value:#x}"[:80]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _tidy_use(block: dict, fallback: str, ids: list) -> tuple[dict, str]:
    given, fault = block.get("input"), block.get("fault", "")
    known = block.get("id")
    name = block.get("name")
    if not isinstance(given, dict):
        fault = fault or f"the arguments are {type(given).__name__}, wanted a JSON object"
        given = {}
    block = {
        "type": "tool_use",
        "id": known if isinstance(known, str) and known and known not in ids else fallback,
        "name": name if isinstance(name, str) and name else "unnamed",
        "input": given,
    }
    return block, fault


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(name) + _characters(item) for name, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else len(str(value))


def estimated_usage(request: Request, answer: str) -> Usage:
    """Usage counted from characters. What the turn's previous call already held counts as read from a cache."""
    prompt = request.prompt_tokens
    seen = min(request.seen_tokens, prompt)
    return Usage(cache_write=prompt - seen, cache_read=seen, output=tokens_of(answer), estimated=True)


class ScriptedModel:
    """Answers from a list per role: {"writer": [[block, ...], ...], "supervisor": [...]}. For tests and dry runs."""

    name, repeatable, metered = "scripted", True, True

    def __init__(self, answers: dict[str, list[Any]]):
        self.answers = answers

    @classmethod
    def load(cls, path: Path) -> "ScriptedModel":
        try:
            answers = json.loads(read_regular(path, SCRIPT_BYTES).decode())
        except OSError as error:
            raise ProviderError(f"cannot read the script {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ProviderError(f"cannot read the script {path}: it is not JSON ({error})") from None
        wanted = "wanted an object that holds a list of answers for each role"
        if not isinstance(answers, dict):
            raise ProviderError(f"the script {path} is {type(answers).__name__}, {wanted}")
        for role, script in answers.items():
            if not isinstance(script, list):
                raise ProviderError(f"the script {path} has {type(script).__name__} for {role[:40]!r}, {wanted}")
        return cls(answers)

    def ask(self, request: Request) -> Reply:
        script = self.answers.get(request.role, [])
        if request.number >= len(script):
            raise RecordingEnds(request.role, len(script))
        content, faults = tidy(script[request.number], request.key)
        stop = "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"
        return Reply(content, stop, estimated_usage(request, json.dumps(content)), self.name, faults)


class ReplayModel:
    """The answers of a recorded run, in order, per role, with the usage that was recorded."""

    repeatable, metered = True, False

    def __init__(self, journal: Path):
        self.replies: dict[str, list[dict]] = defaultdict(list)
        self.unpaid: set[str] = set()
        self.name, role, calls, lost, session = "", "", 0, Usage(), False
        for event in read_events(journal):
            if event["kind"] == "run":
                self.name = event["config"]["model"]
            elif event["kind"] == "turn":
                role, calls, session = event["role"], 0, "agent" in event
            elif session:
                continue
            elif event["kind"] == "turn_end" and event["reason"] == "budget":
                self.unpaid.add(call_key(event["turn"], calls + 1))
            elif event["kind"] in ("provider", "resume"):
                lost += Usage.of(event.get("usage") or {})
            elif event["kind"] == "reply":
                self.replies[role].append(event | {"usage": (Usage.of(event["usage"]) + lost).record()})
                calls, lost = calls + 1, Usage()

    def ask(self, request: Request) -> Reply:
        if request.key in self.unpaid:
            raise BudgetSpent
        recorded = self.replies[request.role]
        if request.number >= len(recorded):
            raise RecordingEnds(request.role, len(recorded))
        event = recorded[request.number]
        return Reply(
            event["content"],
            event["stop_reason"],
            Usage.of(event["usage"]),
            event["model"],
            event.get("faults", {}),
            event["retries"],
        )

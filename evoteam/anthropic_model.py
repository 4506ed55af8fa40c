"""A model behind the Messages API, through the `anthropic` SDK: Anthropic's own, or any compatible server."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from evoteam.budget import Usage, tokens_of
from evoteam.llm import ProviderError, Reply, Request, estimated_usage, tidy

TRIES = 6
DEADLINE_S = 900.0  # for one answer, retries and waits included
LONGEST_WAIT_S = 60.0  # a server may ask for hours
RETRIED = (408, 409, 429)


class _Cut(Exception):
    """The answer broke off; `usage` is what it may have cost."""

    def __init__(self, reason: str, usage: Usage):
        super().__init__(reason)
        self.usage = usage


class AnthropicModel:
    """`base_url` (or ANTHROPIC_BASE_URL) names another server. The key comes from ANTHROPIC_API_KEY alone.

    stream: read answers as they are written; False for a server that cannot.
    """

    repeatable, metered = False, True

    def __init__(
        self, name: str, *, base_url: str | None = None, stream: bool = True, tries: int = TRIES,
        deadline_s: float = DEADLINE_S, sleep: Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        import anthropic

        base_url = base_url or os.environ.get("ANTHROPIC_BASE_URL")
        key = os.environ.get("ANTHROPIC_API_KEY") or ("none" if base_url else None)
        if key is None:
            raise ProviderError("ANTHROPIC_API_KEY is not set: export it, or use --model mailbox, which needs no key")
        self.name, self.stream, self.tries, self.deadline_s, self.sleep = name, stream, tries, deadline_s, sleep
        self.client = anthropic.Anthropic(api_key=key, base_url=base_url, max_retries=0, timeout=deadline_s)

    def ask(self, request: Request) -> Reply:
        """The answer, after retries of what can pass. ProviderError carries what failed tries may have cost."""
        import anthropic

        lost, started, reason = Usage(), time.monotonic(), ""
        for attempt in range(self.tries):
            try:
                reply = self._once(request)
                return replace(reply, usage=reply.usage + lost, retries=attempt)
            except _Cut as cut:
                lost, reason, wait = lost + cut.usage, f"the answer broke off ({cut})", 0.5 * 2**attempt
            except anthropic.APIStatusError as error:
                reason = f"HTTP {error.status_code}: {_told(error)}"
                if not _retryable(error):
                    raise ProviderError(f"the provider refused: {reason}", lost) from None
                wait = _wait(error.response.headers, attempt)
            except anthropic.APIConnectionError as error:
                if isinstance(error, anthropic.APITimeoutError) or "Connect" not in type(error.__cause__).__name__:
                    lost += Usage(cache_write=request.prompt_tokens, estimated=True)
                reason, wait = f"{type(error).__name__}: {error.__cause__ or error}", 0.5 * 2**attempt
            left = self.deadline_s - (time.monotonic() - started)
            if attempt + 1 == self.tries or wait > left:
                break
            self.sleep(min(wait, LONGEST_WAIT_S))
        raise ProviderError(f"no answer after {attempt + 1} tries; last: {reason}", lost)

    def _once(self, request: Request) -> Reply:
        arguments: dict[str, Any] = {
            "model": self.name,
            "max_tokens": request.max_tokens,
            "system": [{"type": "text", "text": request.system, "cache_control": {"type": "ephemeral"}}],
            "messages": _cached(request.messages),
            "tools": request.tools,
        }
        if request.effort:
            arguments["output_config"] = {"effort": request.effort}
        if self.stream:
            message = self._streamed(arguments, request)
        else:
            message = self.client.messages.create(**arguments).to_dict(warnings=False)
        if message.get("stop_reason") is None:
            text = json.dumps(message.get("content"))
            raise _Cut("no stop reason", _usage(message.get("usage"), request, text, whole=False))
        content, faults = tidy(message.get("content"), request.key)
        usage = _usage(message.get("usage"), request, json.dumps(content), whole=True)
        return Reply(content, message["stop_reason"], usage, message.get("model") or self.name, faults)

    def _streamed(self, arguments: dict, request: Request) -> dict:
        import anthropic
        import httpx2

        message: dict[str, Any] = {}
        blocks: dict[int, dict] = {}
        inputs: dict[int, str] = {}
        try:
            with self.client.messages.create(**arguments, stream=True) as events:
                _collect((event.to_dict(warnings=False) for event in events), message, blocks, inputs)
        except (httpx2.HTTPError, ValueError, KeyError, AttributeError) as error:
            self._cut(error, message, blocks, inputs, request)
        except anthropic.APIStatusError as error:
            if error.status_code != 200:  # an error inside a stream comes under the stream's own status
                raise
            self._cut(error, message, blocks, inputs, request)
        for index, text in inputs.items():
            try:
                blocks[index]["input"] = json.loads(text)
            except (ValueError, RecursionError) as error:
                blocks[index] |= {"input": {}, "fault": f"the arguments are not valid JSON ({error}): {text[:200]}"}
        return message | {"content": [blocks[index] for index in sorted(blocks)]}

    def _cut(self, error: Exception, message: dict, blocks: dict, inputs: dict, request: Request) -> None:
        text = json.dumps(list(blocks.values())) + "".join(inputs.values())
        usage = _usage(message.get("usage"), request, text, whole=False)
        raise _Cut(f"{type(error).__name__}: {error}", usage) from None


def _collect(events: Iterable[dict], message: dict, blocks: dict[int, dict], inputs: dict[int, str]) -> None:
    """Put the events of a stream together. Tool inputs stay text: a partial parse would hide a cut or broken one."""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message |= event["message"]
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            for name in ("text", "thinking", "signature"):
                if delta["type"] == f"{name}_delta":
                    block[name] = block.get(name, "") + delta[name]
        elif kind == "message_delta":
            message["stop_reason"] = event["delta"].get("stop_reason")
            counts = {name: count for name, count in (event.get("usage") or {}).items() if count is not None}
            message["usage"] = (message.get("usage") or {}) | counts


def _cached(messages: list[dict]) -> list[dict]:
    """The messages with a cache mark on the last block, so that the next call of the turn reads this prompt back."""
    last = messages[-1]
    content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else list(last["content"])
    content[-1] = content[-1] | {"cache_control": {"type": "ephemeral"}}
    return [*messages[:-1], last | {"content": content}]


def _usage(counts: dict | None, request: Request, answer: str, *, whole: bool) -> Usage:
    """Usage as the server counted it; estimated where it did not, or where the answer was cut."""
    if not counts or not counts.get("output_tokens") and not counts.get("input_tokens"):
        return estimated_usage(request, answer)
    output = counts.get("output_tokens") or 0
    return Usage(
        counts.get("input_tokens") or 0,
        counts.get("cache_creation_input_tokens") or 0,
        counts.get("cache_read_input_tokens") or 0,
        output if whole else max(output, tokens_of(answer)),
        estimated=not whole,
    )


def _retryable(error: Any) -> bool:
    if (told := error.response.headers.get("x-should-retry")) in ("true", "false"):
        return told == "true"
    if "Limit" in type(error).__name__ and "RateLimit" not in type(error).__name__:
        return False
    return error.status_code in RETRIED or error.status_code >= 500


def _wait(headers: Any, attempt: int) -> float:
    try:
        return float(headers.get("retry-after") or "")
    except ValueError:
        return min(0.5 * 2**attempt, LONGEST_WAIT_S)


def _told(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    inner = body.get("error")
    return str(inner.get("message") if isinstance(inner, dict) else error.message)[:500]

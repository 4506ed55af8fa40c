"""The one way out of a session: to its model, and to the run.

An HTTP server on a socket of its own. A call of the model waits until the run has reserved what it may cost, is sent on
with the run's key, which the session never sees, and is charged with what the server counted. A request to the run
waits for its answer. Both go through `inbox`, so that the run deals with one after the other and alone writes.
"""

import json
import os
import secrets
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import SimpleQueue
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import httpx2

from evoteam.budget import CHARS_PER_TOKEN, Usage, tokens_of
from evoteam.sessions.reach import kept, prompt_characters

ANSWER_S = 900.0
IDLE_S = 60.0  # a connection that sends nothing for so long is closed
CONNECTIONS = 32
REQUEST_BYTES = 512 << 10  # of a request to the run
CALL_BYTES = 32 << 20
PASSED_BACK = ("content-type", "retry-after", "request-id", "x-request-id", "x-should-retry")
OWN = ("host", "connection", "content-length", "accept-encoding", "authorization", "x-api-key", "transfer-encoding")


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call that wants to be made. The run puts the output tokens it may have into `grant`, 0 for none."""

    prompt_tokens: int
    wanted: int | None
    grant: SimpleQueue = field(default_factory=SimpleQueue)
    outcome: SimpleQueue = field(default_factory=SimpleQueue)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call. `error`: "" if there is a whole answer."""

    usage: Usage
    model: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to the run, answered with (text, refused)."""

    name: Any
    input: Any
    answer: SimpleQueue = field(default_factory=SimpleQueue)


class Door(ThreadingMixIn, UnixStreamServer):
    """`api`: a row of `apis` in agents.json. A call of another model than `model` is refused: it would be mispriced."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: Path, api: dict, upstream: str, key: str, model: str):
        self.api, self.upstream, self.key, self.model = api, upstream, key, model
        self.secret = secrets.token_hex(16)
        self.inbox: SimpleQueue = SimpleQueue()
        self.client = httpx2.Client(timeout=ANSWER_S)
        self.free = threading.Semaphore(CONNECTIONS)
        super().__init__(str(path), _Handler)
        os.chmod(path, 0o600)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection beyond CONNECTIONS is closed: a session must not use up the run's files and threads."""
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A session that hangs up is no fault of the run."""

    def url(self, path: str, query: str) -> str:
        return f"{self.upstream}{path}" + (f"?{query}" if query else "")

    def clean(self, text: str) -> str:
        return text.replace(self.key, "(key)") if self.key else text


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: Door

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._refuse(404, "nothing is served here")

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        prefix = f"/{self.server.secret}"
        path = path.removeprefix(prefix) if path.startswith(prefix) else ""
        raw = self._body(REQUEST_BYTES if path == "/run" else CALL_BYTES)
        if raw is None:
            return
        if path == "/run":
            self._ask_the_run(raw)
        elif path == self.server.api["path"]:
            self._call(raw, path, query)
        elif path in self.server.api["free"]:
            self._pass_on(raw, path, query)
        else:
            self._refuse(404, "nothing is served here")

    def _body(self, limit: int) -> bytes | None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > limit:
            self._refuse(413, f"a body of {length or 'unstated'} bytes, at most {limit} are taken")
            return None
        return self.rfile.read(int(length))

    def _ask_the_run(self, raw: bytes) -> None:
        try:
            given = json.loads(raw)
            question = Question(given["name"], given["input"])
        except (ValueError, LookupError, TypeError, RecursionError):
            self._refuse(400, "wanted an object with name and input")
            return
        self.server.inbox.put(question)
        text, refused = question.answer.get()
        self._send(200, json.dumps({"text": text, "refused": refused}).encode())

    def _body_of(self, raw: bytes) -> dict | None:
        """A call as it may be sent on, without what reaches past the walls; None where it was refused."""
        door = self.server
        try:
            body = json.loads(raw)
            model = body["model"]
        except (ValueError, LookupError, TypeError, RecursionError):
            self._refuse(400, "wanted a JSON object with a model")
            return None
        if model != door.model:
            self._refuse(400, f"this run is answered by {door.model}, not by {model}")
            return None
        return kept(body, door.api)

    def _pass_on(self, raw: bytes, path: str, query: str) -> None:
        if (body := self._body_of(raw)) is not None:
            self._forward(json.dumps(body).encode(), path, query, _Answer(self.server.api))

    def _call(self, raw: bytes, path: str, query: str) -> None:
        door, limit = self.server, self.server.api["limit"]
        body = self._body_of(raw)
        if body is None:
            return
        wanted = body.get(limit)
        prompt = round(prompt_characters(body) / CHARS_PER_TOKEN)
        call = ModelCall(prompt, wanted if isinstance(wanted, int) and wanted > 0 else None)
        door.inbox.put(call)
        allowed = call.grant.get()
        if not allowed:
            self._refuse(400, "the next call cannot be paid: this turn is over")
            return
        answer = _Answer(door.api)
        error = "the session hung up"
        try:
            error = self._forward(json.dumps(body | {limit: allowed}).encode(), path, query, answer)
        except OSError:
            error = "" if answer.whole else error
        finally:
            call.outcome.put(answer.outcome(error, call.prompt_tokens, door.model))

    def _forward(self, body: bytes, path: str, query: str, answer: "_Answer") -> str:
        """Send a call on and its answer back; what went wrong, "" if nothing did."""
        door = self.server
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
        headers["accept-encoding"] = "identity"
        if door.key:
            headers[door.api["key_header"]] = door.api["key_prefix"] + door.key
        try:
            with door.client.stream("POST", door.url(path, query), content=body, headers=headers) as response:
                self.send_response(response.status_code)
                for name in PASSED_BACK:
                    if name in response.headers:
                        self.send_header(name, response.headers[name])
                self.send_header("connection", "close")
                self.end_headers()
                for part in response.iter_bytes():
                    answer.feed(part)
                    self.wfile.write(part)
                    self.wfile.flush()
                answer.end()
                self.close_connection = True
                if response.status_code >= 400:
                    return door.clean(f"HTTP {response.status_code}: {answer.rest[:300].decode(errors='replace')}")
                return answer.error or ("" if answer.whole else "the answer broke off")
        except httpx2.TransportError as error:
            if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
                self._refuse(502, f"the model's server cannot be reached: {error}")
            self.close_connection = True
            return door.clean(f"{type(error).__name__}: {error}")

    def _refuse(self, status: int, message: str) -> None:
        error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        self._send(status, json.dumps(error).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)


class _Answer:
    """Reads a passing answer for what the server counted, in a stream or in one piece."""

    def __init__(self, api: dict):
        self.api = api
        self.counts: dict[str, Any] = {}
        self.model, self.error, self.rest = "", "", b""
        self.whole, self.said, self.stream = False, 0, False

    def feed(self, part: bytes) -> None:
        self.rest += part
        self.stream |= self.rest.startswith((b"event:", b"data:", b":"))
        if self.stream:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:])

    def end(self) -> None:
        if not self.stream and self._event(self.rest):
            self.whole = True

    def _event(self, data: bytes) -> bool:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(event, dict):
            return False
        for holder in (event, event.get("message"), event.get("response")):
            if isinstance(holder, dict):
                counts = holder.get("usage") if isinstance(holder.get("usage"), dict) else {}
                self.counts |= {name: count for name, count in counts.items() if count is not None}
                self.model = holder["model"] if isinstance(holder.get("model"), str) else self.model
        delta = event.get("delta")
        texts = delta.values() if isinstance(delta, dict) else [delta]
        self.said += sum(len(text) for text in texts if isinstance(text, str))
        self.whole |= event.get("type") in self.api["last"]
        if event.get("type") in ("error", "response.failed"):
            self.error = f"the server reported: {json.dumps(event)[:300]}"
        return True

    def outcome(self, error: str, prompt_tokens: int, model: str) -> Outcome:
        """The charge: as counted; where the answer broke off, at least what was seen of it; nothing if refused."""
        counts = {kind: self._count(path) for kind, path in self.api["usage"].items()}
        if not any(counts.values()):
            usage = Usage() if error.startswith("HTTP ") or "Connect" in error.partition(":")[0] else Usage(
                cache_write=prompt_tokens, output=tokens_of("x" * self.said), estimated=True
            )  # fmt: skip
            return Outcome(usage, self.model or model, error)
        if self.api["input_holds_cached"]:
            counts["input"] -= min(counts["input"], counts.get("cache_read", 0))
        if not self.whole:
            counts["output"] = max(counts["output"], round(self.said / CHARS_PER_TOKEN))
        return Outcome(Usage(**counts, estimated=not self.whole), self.model or model, error)

    def _count(self, path: str) -> int:
        value: Any = self.counts
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, int) and value > 0 else 0

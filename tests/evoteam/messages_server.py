"""A small server that speaks the Messages API: it streams, calls tools, fails on demand, and counts what it bills."""

import json
import os
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MessagesServer:
    """Answers `behaviors` one after the other: (name, value) with name one of

    answer   value: content blocks; a tool_use block with "raw" sends that text as its input
    status   value: (code, headers)
    cut      value: content blocks, of which the stream ends in the middle
    reset    the socket is reset before an answer, or in the middle of `value` if that is blocks
    error    an error event inside the stream
    stop     value: (content blocks, stop_reason)
    When they are used up, `last` is answered for ever.
    """

    def __init__(self, behaviors, last=({"type": "tool_use", "id": "t", "name": "finish", "input": {}},)):
        self.behaviors, self.last = list(behaviors), list(last)
        self.requests, self.headers, self.billed = [], [], []
        self.lock = threading.Lock()

    def next(self, body, headers):
        with self.lock:
            self.requests.append(body)
            self.headers.append(dict(headers))
            return self.behaviors.pop(0) if self.behaviors else ("answer", self.last)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, value = self.server.messages.next(body, self.headers)
        if name == "status":
            self.refuse(*value)
        elif name == "reset" and value is None:
            self.reset()
        elif body.get("stream"):
            self.stream(body, name, value)
        else:
            blocks, stop = value if name == "stop" else (value, None)
            self.send_json(200, self.message(body, blocks, stop))

    def usage(self, body, blocks):
        prompt = len(json.dumps([body["system"], body["messages"], body.get("tools")])) // 4
        seen = sum(len(json.dumps(message)) for message in body["messages"][:-1]) // 4
        output = len(json.dumps(blocks)) // 4
        return {
            "input_tokens": 7,
            "cache_creation_input_tokens": prompt - seen,
            "cache_read_input_tokens": seen,
            "output_tokens": output,
        }

    def message(self, body, blocks, stop):
        usage = self.usage(body, blocks)
        self.server.messages.billed.append(usage)
        stop = stop or ("tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn")
        content = [
            {k: v for k, v in b.items() if k != "raw"} | ({"input": json.loads(b["raw"])} if "raw" in b else {})
            for b in blocks
        ]
        return {"id": "msg", "type": "message", "role": "assistant", "model": body["model"], "content": content,
                "stop_reason": stop, "stop_sequence": None, "usage": usage}  # fmt: skip

    def refuse(self, code, headers):
        error = {"type": "error", "error": {"type": "overloaded_error", "message": f"refused with {code}"}}
        self.send_json(code, error, headers)

    def send_json(self, code, record, headers=()):
        data = json.dumps(record).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("connection", "close")
        for key, text in dict(headers).items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(data)

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def stream(self, body, name, value):
        blocks, stop = value if name == "stop" else (value or [], None)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        events = list(self.events(body, blocks, stop))
        if name in ("cut", "reset"):
            events = events[: len(events) - 3]
        if name == "error":
            events = [
                *events[:1],
                ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "too busy"}}),
            ]
        for kind, data in events:
            self.wfile.write(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()
        if name in ("answer", "stop", "cut"):
            self.server.messages.billed.append(self.usage(body, blocks))
        if name == "reset":
            self.reset()

    def events(self, body, blocks, stop):
        message = self.message_start(body)
        usage = self.usage(body, blocks)
        message["usage"] = usage | {"output_tokens": 1}
        yield "message_start", {"type": "message_start", "message": message}
        for index, block in enumerate(blocks):
            empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
            start = {k: v for k, v in block.items() if k != "raw"} | empty.get(block["type"], {})
            yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": start}
            yield from self.deltas(index, block)
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        stop = stop or ("tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn")
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": None},
            "usage": {"output_tokens": usage["output_tokens"]},
        }
        yield "message_delta", end
        yield "message_stop", {"type": "message_stop"}

    def message_start(self, body):
        return {
            "id": "msg",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def deltas(self, index, block):
        pieces = {
            "text": [("text_delta", "text", block.get("text"))],
            "thinking": [
                ("thinking_delta", "thinking", block.get("thinking")),
                ("signature_delta", "signature", block.get("signature")),
            ],
            "tool_use": [("input_json_delta", "partial_json", block.get("raw", json.dumps(block.get("input"))))],
        }
        for kind, field, text in pieces.get(block["type"], []):
            for start in range(0, len(text), 40):
                delta = {"type": kind, field: text[start : start + 40]}
                yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}


@contextmanager
def serve(messages):
    """Base URL of a running server for `messages`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.messages, server.daemon_threads = messages, True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

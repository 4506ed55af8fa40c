"""The Responses API as far as a coding agent needs it: streamed answers, with usage that is counted and kept."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ResponsesServer:
    """Answers `commands` one after the other as calls of the shell, then says "done" for ever."""

    def __init__(self, commands):
        self.commands, self.requests, self.headers, self.billed = list(commands), [], [], []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        known = self.server.known
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known.requests.append(body)
        known.headers.append(dict(self.headers))
        number = len(known.requests)
        if known.commands:
            arguments = json.dumps({"cmd": known.commands.pop(0), "yield_time_ms": 30_000})
            item = {"type": "function_call", "id": f"f{number}", "call_id": f"c{number}", "name": "exec_command"}
            item["arguments"] = arguments
        else:
            said = [{"type": "output_text", "text": "done"}]
            item = {"type": "message", "id": f"m{number}", "role": "assistant", "content": said}
        usage = {"input_tokens": 5_000 + number, "input_tokens_details": {"cached_tokens": 4_000}, "output_tokens": 90}
        known.billed.append(usage)
        response = {"id": f"r{number}", "model": body["model"], "usage": usage}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in (
            {"type": "response.created", "response": {"id": f"r{number}"}},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": response},
        ):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        self.close_connection = True


@contextmanager
def serve(known):
    """Base URL of a running server for `known`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.known, server.daemon_threads = known, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

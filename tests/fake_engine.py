"""A fake serving engine: a real process with a real socket that sleeps instead of working. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STARTED = time.monotonic()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--model-name", help="the name served instead of --model")
    parser.add_argument("--start-delay", type=float, default=0, metavar="S", help="/health answers 503 until then")
    parser.add_argument("--one-token-delay", type=float, default=0, metavar="S", help="generation is 503 until then")
    parser.add_argument("--never-ready", action="store_true", help="/health answers 503 for ever")
    parser.add_argument("--die-after", type=float, metavar="S")
    parser.add_argument("--die-text", default="RuntimeError: the fake engine was told to die")
    parser.add_argument("--tpot-ms", type=float, default=0)
    parser.add_argument("--ttft-ms", type=float, default=0)
    parser.add_argument("--no-usage", action="store_true", help="streams tell no token counts, plain answers do")
    parser.add_argument("--context", type=int, default=10**9, help="an answer ends there without a word")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--spawn-child", action="store_true", help="a child in its own session, and an orphan")
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # each token leaves when it is made
    asked: argparse.Namespace

    def do_GET(self) -> None:
        if self.path == "/health":
            ready = not self.asked.never_ready and time.monotonic() - STARTED >= self.asked.start_delay
            self.answer(200 if ready else 503, {"ready": ready})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": self.served(), "object": "model"}]})
        else:
            self.answer(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer(404, {"error": {"message": f"no {self.path}"}})
        elif body.get("model") != self.served():
            self.answer(404, {"error": {"message": f"the model {body.get('model')!r} does not exist"}})
        elif time.monotonic() - STARTED < max(self.asked.start_delay, self.asked.one_token_delay):
            self.answer(503, {"error": {"message": "loading"}})
        else:
            self.generate(body)

    def served(self) -> str:
        return str(self.asked.model_name or self.asked.model)

    def generate(self, body: dict[str, Any]) -> None:
        prompt = len(str(body["prompt"]).split())
        tokens, due = min(int(body.get("max_tokens", 16)), self.asked.context - prompt), time.monotonic() + self.asked.ttft_ms / 1000
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        if not body.get("stream", True):
            return self.answer(200, {"choices": [{"text": " w" * tokens, "finish_reason": "length"}], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(tokens):
            time.sleep(max(0.0, due - time.monotonic()))
            due += self.asked.tpot_ms / 1000
            self.event([{"index": 0, "text": f" w{i}", "finish_reason": None}])
        self.event([{"index": 0, "text": "", "finish_reason": "length"}], **({} if self.asked.no_usage else {"usage": usage}))
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, choices: list[dict[str, Any]], **more: Any) -> None:
        event = {"id": "cmpl-0", "object": "text_completion", "model": self.served(), "choices": choices, **more}
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self, status: int, plain: dict[str, Any]) -> None:
        data = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would drown the log."""


class Engine(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def spawn() -> None:
    """Two sleepers that a plain killpg would miss; their pids go to the log."""
    sleeper = "import subprocess; print('child pid', subprocess.Popen(['sleep', '31337'], start_new_session=True).pid)"
    exec(sleeper, {})
    subprocess.run([sys.executable, "-S", "-c", sleeper], check=True)


def die(text: str) -> None:
    print(text, flush=True)
    os._exit(1)


def main() -> None:
    asked = options()
    Handler.asked = asked
    if asked.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked.die_after is not None:
        timer = threading.Timer(max(0.0, asked.die_after - (time.monotonic() - STARTED)), die, [asked.die_text])
        timer.daemon = True
        timer.start()
    if asked.spawn_child:
        spawn()
    print(f"fake engine: pid {os.getpid()}, {asked.host}:{asked.port}", flush=True)
    Engine.address_family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET
    with Engine((asked.host, asked.port), Handler) as engine:
        engine.serve_forever()


if __name__ == "__main__":
    main()

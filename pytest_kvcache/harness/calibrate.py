"""What the load generator itself can do on this machine: a replay inside its own process, before a session.

Streams of one event a write, as servers send them, go over the loopback into the real `Wire` and `Digest`. Only the client's
side is timed; it is the processor time that a planned rate will need.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

from ..core.load import Load, Target
from ..core.record import OK
from .digest import Digest
from .wire import Wire

STREAMS, TOKENS = 32, 32
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(event) + 8, event)


def _events(tokens: int) -> list[bytes]:
    """One answer, write by write: the head with the first token, the other tokens, the end."""

    def event(**more: Any) -> bytes:
        return _chunk(json.dumps({"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1, "model": "replay", **more}).encode())

    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}
    token, usage = event(choices=[choice]), {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": tokens + 16}
    last = event(choices=[{**choice, "text": "", "finish_reason": "length"}]) + event(choices=[], usage=usage)
    return [_HEAD + token, *[token] * (tokens - 1), last + _chunk(b"[DONE]") + b"0\r\n\r\n"]


class _Costs:
    """Processor time of this thread, summed over the timed steps."""

    def __init__(self) -> None:
        self.ns = 0

    def __enter__(self) -> None:
        self._began = time.thread_time_ns()

    def __exit__(self, *exc: object) -> None:
        self.ns += time.thread_time_ns() - self._began


def replay(streams: int = STREAMS, tokens: int = TOKENS) -> dict[str, float]:
    """`event_us` and `request_us`: processor time of the client for each token event and each request, decoding included."""
    load = Load(bodies=(b"{}",) * streams, osl=(tokens,) * streams, concurrency=streams)
    answer = _events(tokens)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=streams + 1))
        digest = Digest(load, range(streams))
        wire = Wire(Target(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", endpoint="/v1/completions"), load, digest)
        stack.callback(wire.close)
        wire.connect()
        listener.accept()[0].close()  # the look for an address that answers
        peers = [stack.enter_context(listener.accept()[0]) for _ in range(streams)]
        requests, events, decoding = _Costs(), _Costs(), _Costs()
        with requests:
            wire.begin(time.perf_counter_ns())
            wire.start_slots()
        for peer in peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.recv(65536)
        for i, data in enumerate(answer):
            for peer in peers:
                peer.sendall(data)
            with requests if i in (0, len(answer) - 1) else events:
                wire.turns(streams)
        with decoding:
            wire.digest_all()
    if any(row[Digest.OUTCOME] != OK for row in digest.rows):
        raise RuntimeError(f"the client cannot read its own replay: {digest.rows[0]}")
    each = decoding.ns / (streams * tokens)  # decoding is by the event; the rest of a request is in its first and last turn
    return {
        "event_us": round((events.ns / (streams * (tokens - 1)) + each) / 1e3, 3),
        "request_us": round(requests.ns / streams / 1e3, 3),
    }

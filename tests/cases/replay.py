"""A server that plays the writes of cases over real sockets, each at its absolute moment, and notes how late it was."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType

from .sse_case import Play

HELD_S = 30.0


class Replay:
    """For the length of a `with`. The first part of a request's path names the play; any number run at once."""

    def __init__(self, plays: dict[str, Play]) -> None:
        self.plays = plays
        self.asked_ns: dict[str, int] = {}
        self.late_ns: dict[str, int] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{name}"

    def __enter__(self) -> Replay:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, what: object, *args: object) -> None:
        thread = threading.Thread(target=what, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.settimeout(HELD_S)
            name = _request(peer)
            if name:
                self._play(peer, name, self.plays[name])

    def _play(self, peer: socket.socket, name: str, play: Play) -> None:
        began = time.perf_counter_ns()
        self.asked_ns[name], self.late_ns[name] = began, 0
        peer.sendall(play.head)
        for at_ms, data in play.writes:
            due = began + round(at_ms * 1e6)
            _until(due)
            peer.sendall(data)
            self.late_ns[name] = max(self.late_ns[name], time.perf_counter_ns() - due)
        if play.how in ("close", "reset"):
            _until(began + round((play.end_ms or 0) * 1e6))
            if play.how == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        peer.settimeout(0.2)  # held open until the client goes away
        while not self._over.is_set():
            with suppress(TimeoutError):
                if not peer.recv(65536):
                    return


def _request(peer: socket.socket) -> str | None:
    """Read a whole request; the name in its path, or None when the client went away."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = peer.recv(65536)
        if not more:
            return None
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    left = int(fields.get(b"content-length", b"0")) - len(rest)
    while left > 0:
        left -= len(peer.recv(left))
    return head.split(b" ", 2)[1].split(b"/")[1].decode()


def _until(ns: int) -> None:
    while (left := ns - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)

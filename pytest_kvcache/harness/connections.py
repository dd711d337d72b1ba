"""Connections of a load: where they go, how they are opened without waiting, and which are free."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..core.load import Target
from .incoming import Incoming
from .tls import Tls, tls_context

now = time.perf_counter_ns
S = 10**9
SO_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)
CONNECT_TIMEOUT = 30 * S
MAX_IDLE = S  # servers close idle connections after 5 s, some after 2: an older one is not trusted with a request
CONNECTING, SHAKING, IDLE, BUSY, CLOSED = range(5)


class Conn:
    """A connection and, while it is BUSY, the request `i` on it, due at `due`, and the answer so far. Times in ns."""

    __slots__ = (
        "answer",
        "connect",
        "done_at",
        "due",
        "fd",
        "freed",
        "heard",
        "i",
        "moved",
        "opened",
        "out",
        "sent",
        "sock",
        "state",
        "tls",
    )

    def __init__(self, sock: Any, i: int, due: int) -> None:
        self.sock, self.fd, self.state, self.i, self.due = sock, sock.fileno(), CONNECTING, i, due
        self.opened = self.heard = self.moved = now()  # anything came; an event came
        self.connect = self.sent = self.done_at = 0
        self.freed = 0  # when the stream that uses it now had its last answer
        self.out: memoryview | None = None
        self.answer = Incoming()
        self.tls: Tls | None = None


class Endpoint:
    """Host, port, TLS and the head of every request of a target."""

    def __init__(self, target: Target) -> None:
        url = urlsplit(target.base_url)
        self.tls = tls_context(target) if url.scheme == "https" else None
        self.host, self.port = url.hostname or "", url.port or (443 if self.tls else 80)
        self._head = _request_head(target, url.netloc.rpartition("@")[2], url.path)
        self._address: Any = None
        self.problem = "no such address"
        self.kernel_stamps = True

    def find(self) -> None:
        """Take the first address of the host that answers; where none does, connecting will say so again."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as e:
            self.problem = e.strerror or str(e)
            return
        for family, kind, proto, _, address in found:
            self._address = self._address or (family, kind, proto, address)
            with suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.settimeout(CONNECT_TIMEOUT / S)
                probe.connect(address)
                self._address = (family, kind, proto, address)
                return

    def request(self, body: bytes) -> bytes:
        """One POST as it goes over the wire."""
        return b"%s%d\r\n\r\n%s" % (self._head, len(body), body)

    def dial(self) -> tuple[Any, str]:
        """A socket that has begun to connect, and why it cannot, if that is known already."""
        if self._address is None:
            return socket.socket(), self.problem
        family, kind, proto, address = self._address
        sock: Any = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.kernel_stamps:
            try:
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            except OSError:
                self.kernel_stamps = False
        code = sock.connect_ex(address)
        return sock, "" if code in (0, errno.EINPROGRESS) else os.strerror(code)


class Connections:
    """All connections of a load, under one epoll."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.epoll = endpoint, select.epoll()
        self.by_fd: dict[int, Conn] = {}
        self.idle: list[Conn] = []
        self.opening = 0
        _raise_file_limit()

    def open(self, i: int, due: int) -> tuple[Conn, str]:
        """Begin a connection, for request `i` or (-1) to have one ready; why it has failed, if it has."""
        sock, problem = self.endpoint.dial()
        conn = Conn(sock, i, due)
        self.by_fd[conn.fd] = conn
        self.opening += 1
        self.epoll.register(conn.fd, select.EPOLLIN | select.EPOLLOUT)
        return conn, problem

    def step(self, conn: Conn, mask: int) -> str:
        """Go on with opening; why it has failed, if it has. Open, the connection is IDLE."""
        if conn.state == CONNECTING:
            if problem := conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return os.strerror(problem)
            if not mask & select.EPOLLOUT:
                return ""
            conn.state = SHAKING if self.endpoint.tls else IDLE
            if self.endpoint.tls:
                conn.tls = Tls(self.endpoint.tls, self.endpoint.host)
        if conn.tls and conn.state == SHAKING:
            try:
                shaken = conn.tls.shake(conn.sock)
            except OSError as e:
                return str(e)
            if not shaken:
                self.epoll.modify(conn.fd, select.EPOLLIN)
                return ""
            conn.state = IDLE
        self.epoll.modify(conn.fd, select.EPOLLIN)
        self.opening -= 1
        conn.heard = now()
        conn.connect = conn.heard - conn.opened
        return ""

    def take(self, at: int) -> Conn | None:
        """A free connection that was used or opened a moment ago; older ones are closed."""
        while self.idle:
            conn = self.idle.pop()
            if conn.state == IDLE and at - conn.heard < MAX_IDLE:
                conn.connect = 0
                return conn
            self.close(conn)
        return None

    def ready(self, at: int) -> int:
        """Connections that are free and will be for a while yet, or are about to be."""
        return self.opening + sum(at - conn.heard < MAX_IDLE // 2 for conn in self.idle)

    def close(self, conn: Conn) -> None:
        if self.by_fd.pop(conn.fd, None) is not None:
            self.opening -= conn.state < IDLE
            self.epoll.unregister(conn.fd)
            conn.state = CLOSED
            conn.sock.close()

    def close_all(self) -> None:
        for conn in list(self.by_fd.values()):
            self.close(conn)
        self.epoll.close()


def headers_of(target: Target) -> dict[str, str]:
    """What every request to a target says of itself, but for its host and length."""
    return {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity", **target.headers}


def _request_head(target: Target, netloc: str, path: str) -> bytes:
    headers = {"Host": netloc} | headers_of(target)
    lines = [f"POST {path.rstrip('/')}{target.endpoint} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "Content-Length: "]
    return "\r\n".join(lines).encode("latin-1")


def _raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

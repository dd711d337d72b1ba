"""How a server is asked something outside of any load: one question, and its whole answer within one limit of time and of size."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..core.load import Target
from .tls import tls_context

MOST_BYTES = 2**24
DONE = (b"data: [DONE]", b"data:[DONE]")
BROKEN = (OSError, http.client.HTTPException)


class _Until(io.RawIOBase):
    """What comes on a socket until a moment; TimeoutError then, however often a little of it comes."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._raw, self._end = sock, sock.makefile("rb", buffering=0), end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(into)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _within_its_time(kind: type[http.client.HTTPConnection]) -> Callable[..., Any]:
    """Connections of that kind whose time-out is one for everything that they read: urllib's own begins anew with every byte."""

    response: Any = http.client.HTTPResponse

    def made(host: str, *, timeout: float, **more: Any) -> Any:
        connection: Any = kind(host, timeout=timeout, **more)
        end = time.monotonic() + timeout
        connection.response_class = lambda sock, *args, **how: response(_Until(sock, end), *args, **how)
        return connection

    return made


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_within_its_time(http.client.HTTPConnection), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: Any) -> None:
        super().__init__()
        self._own = context

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_within_its_time(http.client.HTTPSConnection), req, context=self._own)


class _AsItIs(urllib.request.HTTPErrorProcessor):
    """An answer of any status is one. Nothing is followed: another address is another server, and a key is for one."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


def opener(target: Target | None) -> urllib.request.OpenerDirector:
    """The way to a server: direct where it is ours, else as `target` says. OSError for certificates that cannot be read."""
    proxies = {"http": target.proxy, "https": target.proxy} if target and target.proxy else {}
    handlers: list[Any] = [urllib.request.ProxyHandler(proxies), _Http(), _AsItIs()]
    if target and target.base_url.startswith("https"):
        handlers.append(_Https(tls_context(target)))
    return urllib.request.build_opener(*handlers)


def ask(
    way: urllib.request.OpenerDirector, url: str, *, limit_s: float, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> tuple[int, str]:
    """Status and text of one answer, of a stream as far as its `[DONE]`. OSError where there is none, TimeoutError where it is not whole
    within the limit, ValueError for what is no address."""
    request = urllib.request.Request(url, body, dict(headers or {}))
    try:
        with way.open(request, timeout=limit_s) as answer:
            return int(answer.status), _text(answer)
    except OSError as e:
        reason = r if isinstance(r := getattr(e, "reason", None), OSError) else e
        if isinstance(reason, TimeoutError):
            raise TimeoutError(f"no whole answer within {limit_s:g} s") from e
        if reason is e:
            raise
        raise reason from e
    except http.client.HTTPException as e:
        raise OSError(repr(e)) from e


def _text(answer: Any) -> str:
    found = b""
    with suppress(*(() if answer.status == 200 else BROKEN)):  # where it is no success, its status says enough
        found = _whole(answer)
    return found.decode(errors="replace")


def _whole(answer: Any) -> bytes:
    lines: list[bytes] = []
    left = MOST_BYTES
    while line := answer.readline(left + 1):
        lines.append(line)
        left -= len(line)
        if left < 0:
            raise OSError(f"its answer is larger than {MOST_BYTES / 2**20:g} MiB")
        if line.strip() in DONE:
            return b"".join(lines)
    if answer.length:
        raise OSError(f"its answer ended {answer.length} bytes early")
    return b"".join(lines)

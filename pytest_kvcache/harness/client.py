"""A streaming client for OpenAI-compatible completions: stamps bytes when they arrive, decodes after the answer.

The event-stream parser is a pure function over bytes (WHATWG HTML, server-sent events): LF, CR and CRLF end a line, one
space after the colon is dropped, comments are skipped, `data` lines of one event are joined by LF.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.record import OK, RequestRecord
from ..core.workload import Request

if TYPE_CHECKING:
    import aiohttp

BODY_KEPT = 400  # characters of a failure's answer kept as its reason
IDLE_TIMEOUT_S = 120.0


class EventParser:
    """Bytes in any pieces to the `data` payloads of complete events; memory is one unfinished event."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads of the events that `chunk` completes."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        self._after_cr = chunk.endswith(b"\r")
        done: list[bytes] = []
        *lines, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._line += line
            self._end_of_line(bytes(self._line), done)
            self._line.clear()
        self._line += rest
        return done

    def _end_of_line(self, line: bytes, done: list[bytes]) -> None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                done.append(b"\n".join(self._data))
            self._data = []
        elif line.startswith(b"data"):
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))


class BadStream(Exception):
    """A stream that is no answer; `outcome` is the class of failure."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


def _as(kind: type[Any], value: Any) -> Any:
    """The value when it is of that kind, else an empty one: a server may send anything."""
    return value if isinstance(value, kind) else kind()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def decode(events: list[tuple[float, bytes]], asked: Request) -> dict[str, Any]:
    """What the timed payloads of one answer say, as fields of a RequestRecord; BadStream when it is no whole answer.

    A token event is one with non-empty text and a choice. Token counts are the server's own (`usage`).
    """
    times: list[float] = []
    usage: dict[str, Any] = {}
    finish, done = None, False
    for at, payload in events:
        if payload == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            raise BadStream("bad_json", payload[:BODY_KEPT].decode(errors="replace")) from None
        if not isinstance(event, dict):
            raise BadStream("bad_json", f"an event is no object: {payload[:BODY_KEPT].decode(errors='replace')}")
        if event.get("error"):
            raise BadStream("stream_error", str(event["error"])[:BODY_KEPT])
        usage = _as(dict, event.get("usage")) or usage
        for choice in _as(list, event.get("choices")):
            finish = _as(dict, choice).get("finish_reason") or finish
            if _as(dict, choice).get("text"):
                times.append(at)
    return _answer(times, usage, finish, done, asked)


def _answer(times: list[float], usage: dict[str, Any], finish: str | None, done: bool, asked: Request) -> dict[str, Any]:
    """The record fields of a stream that was read to its end; each way of being no whole answer has its class."""
    if finish in ("abort", "error"):
        raise BadStream("aborted", f"finish_reason {finish}")
    if finish is None and not done:
        raise BadStream("truncated_stream", f"ended after {len(times)} token events without finish_reason or [DONE]")
    if not times:
        raise BadStream("empty_output", "no token event in the whole answer")
    n = _count(usage.get("completion_tokens"))
    if n is not None and n < asked.osl:
        raise BadStream("short_output", f"{n} output tokens of {asked.osl} asked for")
    first, last = times[0], times[-1]
    return {"first_s": first, "last_s": last, "events": len(times), "output_tokens": n, "input_tokens": _count(usage.get("prompt_tokens"))}


Body = Callable[[str, str, int], dict[str, Any]]


class Client:
    """One keep-alive connection pool to one server. Times are seconds since the client was made."""

    def __init__(self, base_url: str, endpoint: str, model: str, body: Body) -> None:
        self.url, self.model, self.body = base_url + endpoint, model, body
        self.zero = time.perf_counter()

    async def __aenter__(self) -> Client:
        import aiohttp

        # No limit on connections: a client's own queue must not look like the server's. No proxy from the environment:
        # the server is on this machine.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=IDLE_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(self._stamp_sent)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, trace_configs=[trace], read_bufsize=2**20
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    def now(self) -> float:
        return time.perf_counter() - self.zero

    async def _stamp_sent(self, session: object, context: Any, params: object) -> None:
        # The moment of sending on an open connection: connecting, if it was needed, is over.
        context.trace_request_ctx["sent"] = self.now()

    async def ask(self, request: Request) -> RequestRecord:
        """Send one request and read its answer to the end; never raises for a server's fault."""
        import aiohttp

        stamp: dict[str, float] = {"sent": self.now()}
        events: list[tuple[float, bytes]] = []
        found: dict[str, Any]
        try:
            body = self.body(self.model, request.prompt, request.osl)
            async with self._session.post(self.url, json=body, trace_request_ctx=stamp) as answer:
                await self._read(answer, events)
            found = decode(events, request)
        except BadStream as e:
            found = {"outcome": e.outcome, "error": str(e)}
        except TimeoutError:
            found = {"outcome": "stall_timeout", "error": f"nothing for {IDLE_TIMEOUT_S:.0f} s after {len(events)} events"}
        except (aiohttp.ClientError, OSError) as e:
            found = {"outcome": "connection_reset", "error": f"{type(e).__name__}: {e}"[:BODY_KEPT]}
        return RequestRecord(**{"index": request.index, "sent_s": stamp["sent"], "end_s": self.now(), "outcome": OK, **found})

    async def _read(self, answer: aiohttp.ClientResponse, events: list[tuple[float, bytes]]) -> None:
        if answer.status != 200:
            raise BadStream("http_status", f"HTTP {answer.status}: {(await answer.text())[:BODY_KEPT]}")
        if "text/event-stream" not in answer.headers.get("content-type", ""):
            raise BadStream("not_event_stream", (await answer.text())[:BODY_KEPT])
        parser = EventParser()
        async for chunk in answer.content.iter_any():
            at = self.now()
            events.extend((at, payload) for payload in parser.feed(chunk))

"""The plain way: aiohttp, for targets behind an HTTP proxy. Same interface as `wire.Wire`, stamps when the reader hands over.

Pacing is the event loop's own (a millisecond); what it lags is recorded and judged like any other lag.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from array import array
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.load import Load, Target
from ..core.masking import masked
from ..core.sse import DONE_SPAN, ends_with_done
from .connections import CONNECT_TIMEOUT, S, headers_of, now
from .incoming import Done
from .tls import tls_context
from .wire import HEARTBEAT, LAG_STEPS

if TYPE_CHECKING:
    import aiohttp


class Proxied:
    """Drives one load against one target through aiohttp."""

    kernel = False

    def __init__(self, target: Target, load: Load, digest: Callable[[Done], None], *, asleep: int | None = None) -> None:
        self.target, self.load, self.digest, self.asleep = target, load, digest, asleep
        self.finished: deque[Done] = deque()
        self.read_lag, self.slot_gaps, self.send_lag, self.loop_lag = [0] * LAG_STEPS, array("q"), array("q"), array("q")
        self.loaded = self.clock_steps = 0
        self.stalled = False  # what has not been sent by then is not sent

    def connect(self) -> None:
        """Nothing is opened ahead: what connecting takes is in `connect_s` of the requests that needed it."""
        try:
            import uvloop
        except ImportError:
            self._runner: Callable[[Any], None] = asyncio.run
        else:
            self._runner = uvloop.run

    def run(self, start: int) -> None:
        """The load, from `start` (ns) until every request has ended."""
        self._runner(self._run(start))
        self.loaded = now()

    def digest_all(self) -> None:
        while self.finished:
            self.digest(self.finished.popleft())

    async def _run(self, start: int) -> None:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, ssl=tls_context(self.target) if self.target.base_url.startswith("https") else True)
        self.limit_s = max(self.load.idle_timeout_s, self.load.first_timeout_s)
        # `connect` is all of it, the proxy's answer to CONNECT and the TLS behind it too.
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT / S, sock_read=self.limit_s)
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_connected)
        trace.on_request_headers_sent.append(_sent)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, trace_configs=[trace], read_bufsize=2**20, auto_decompress=False
        ) as session:
            await _until(start)
            beat = asyncio.ensure_future(self._beat())
            if self.asleep is not None:
                asyncio.get_running_loop().add_reader(self.asleep, lambda: sys.exit("the load generator is no longer wanted"))
            if self.load.due_s is None:
                queue = iter(range(len(self.load.bodies)))
                await asyncio.gather(*(self._stream(session, queue) for _ in range(self.load.concurrency or 1)))
            else:
                await asyncio.gather(*(self._due(session, i, start + int(s * S)) for i, s in enumerate(self.load.due_s)))
            beat.cancel()

    async def _beat(self) -> None:
        due = now()
        while True:
            due += HEARTBEAT
            await _until(due)
            self.loop_lag.append(now() - due)

    async def _stream(self, session: aiohttp.ClientSession, queue: Any) -> None:
        ended = 0
        for i in queue:
            if self.stalled:
                return
            done = await self._ask(session, i, 0)
            if ended:
                self.slot_gaps.append(done.sent - ended)
            ended = done.ended

    async def _due(self, session: aiohttp.ClientSession, i: int, due: int) -> None:
        await _until(due)
        if self.stalled:
            return
        self.send_lag.append((await self._ask(session, i, due)).sent - due)

    async def _ask(self, session: aiohttp.ClientSession, i: int, due: int) -> Done:
        """One request to its end; never raises for a fault of the server or the proxy."""
        import aiohttp

        stamp: dict[str, int] = {"asked": now(), "sent": now(), "connected": 0}
        reads: list[bytes] = []
        stamps: list[int] = []
        url = self.target.base_url.rstrip("/") + self.target.endpoint
        try:
            async with session.post(
                url,
                data=self.load.bodies[i],
                headers=headers_of(self.target),
                proxy=self.target.proxy,
                trace_request_ctx=stamp,
                allow_redirects=False,
            ) as answer:
                reads.append(_head(answer))
                stamps.append(now())
                end = await self._read(answer, reads, stamps)
        except aiohttp.ConnectionTimeoutError:
            self.stalled = True
            end = f"connection_reset: no connection through the proxy within {CONNECT_TIMEOUT / S:g} s"
        except TimeoutError:
            self.stalled = True
            end = f"stall: nothing for {self.limit_s:g} s after {sum(map(len, reads))} bytes"
        except (aiohttp.ClientError, OSError, ssl.SSLError) as e:
            end = f"connection_reset: {type(e).__name__}: {masked(str(e))}"  # it quotes the proxy's address
        connect = max(0, stamp["connected"] - stamp["asked"])
        done = Done(i, due, stamp["sent"], connect, stamps[-1] if stamps else now(), end, reads, stamps)
        self.finished.append(done)
        return done

    async def _read(self, answer: aiohttp.ClientResponse, reads: list[bytes], stamps: list[int]) -> str:
        """The body, as far as its `[DONE]`; how it ended. Comments may keep a stream alive, but not for ever."""
        moved, limit_s = stamps[-1], self.load.progress_timeout_s
        async for data in answer.content.iter_any():
            reads.append(data)
            stamps.append(now())
            if ends_with_done(b"".join(reads[-4:])[-DONE_SPAN:]):
                break
            if b"data:" in data:
                moved = stamps[-1]
            elif stamps[-1] - moved > limit_s * S:
                self.stalled = True
                return f"stall: nothing for {limit_s:g} s after {sum(map(len, reads))} bytes"
        return "close"


async def _until(ns: int) -> None:
    while (left := ns - now()) > 0:
        await asyncio.sleep(left / S)


async def _connected(session: Any, context: Any, params: Any) -> None:
    context.trace_request_ctx["connected"] = now()


async def _sent(session: Any, context: Any, params: Any) -> None:
    context.trace_request_ctx["sent"] = now()


def _head(answer: aiohttp.ClientResponse) -> bytes:
    """The head as if it had come in one read of an answer that ends with its connection: framing is aiohttp's."""
    kept = ("content-type", "content-encoding")
    lines = [f"HTTP/1.1 {answer.status} -", *(f"{k}: {answer.headers[k]}" for k in kept if k in answer.headers), "connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

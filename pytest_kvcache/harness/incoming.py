"""One answer on its way in: keeps its bytes with their stamps, and sees its end without reading what it says."""

from __future__ import annotations

import re
from itertools import accumulate

from ..core.http1 import BadHttp, ChunkScanner, Head, split_head
from ..core.sse import DONE_SPAN, ends_with_done

MAX_ANSWER, MAX_REFUSAL = 256 * 2**20, 2**20
STEP = b'"choices"'
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_CRLF2, _LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"


class Incoming:
    """An answer so far. `reads` and `stamps` go together. `done` is set once `[DONE]` came though the body is still open; `steps`
    counts what may be token events, which a comment that keeps the connection alive is not."""

    __slots__ = ("_fed", "_framed", "_scanner", "_skip", "_until", "done", "head", "reads", "size", "stamps", "steps")

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.stamps: list[int] = []
        self.size = 0
        self.head: Head | None = None
        self.done = self._framed = False
        self.steps = 0
        self._until: int | None = None  # size at which a body of known length is complete
        self._scanner: ChunkScanner | None = None
        self._fed = self._skip = 0

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the body has ended, and with it what came."""
        return self._framed and self.head is not None and self.head.keep_alive

    @property
    def complete(self) -> bool:
        """Whether it has said why it ended, and its usage: nothing more need come."""
        tail = b"".join(self.reads[-8:])[-8192:]
        return b'"completion_tokens"' in tail and _FINISH.search(tail) is not None

    def take(self, data: bytes, stamp: int) -> str | None:
        """Keep a read; how the answer ended (see `Done`) if this read ended it."""
        if self.stamps and stamp < self.stamps[-1]:
            stamp = self.stamps[-1]
        self.steps += data.count(STEP)
        self.reads.append(data)
        self.stamps.append(stamp)
        self.size += len(data)
        head = self.head
        try:
            if head is None:
                return self._take_head()
            # Most reads of a stream can be told from its end by a look at their last bytes.
            if not head.chunked or len(data) < DONE_SPAN or data[-4:] == _CRLF2 or b"[DONE]" in data[-DONE_SPAN:]:
                return self._end()
        except BadHttp as e:
            return f"not_event_stream: {e}"
        return self._too_much(head)

    def _take_head(self) -> str | None:
        split = split_head(b"".join(self.reads))
        if split is None:
            return None
        self.head, at = split
        self._until = None if self.head.length is None else self.head.length + at
        self._scanner, self._skip = ChunkScanner(), at
        return self._end()

    def _end(self) -> str | None:
        head, scanner = self.head, self._scanner
        assert head is not None
        assert scanner is not None
        tail = self._tail()
        done = ends_with_done(tail)
        if head.chunked and done:
            if tail.endswith(_LAST_CHUNK):
                self._framed = True
                return "complete"
        elif head.chunked:
            complete = scanner.feed(b"".join(self.reads[self._fed :])[self._skip :])
            self._fed, self._skip = len(self.reads), 0
            if complete:
                self._framed = True
                return "complete"
        elif self._until is not None:
            self._framed = self.size == self._until
            return "complete" if self.size >= self._until else self._too_much(head)
        if done:
            self.done = True
            if not (head.chunked and head.keep_alive):
                return "complete"
        return self._too_much(head)

    def _tail(self) -> bytes:
        """At least the last DONE_SPAN bytes, if there are as many."""
        tail = self.reads[-1]
        for data in self.reads[-2::-1]:
            if len(tail) >= DONE_SPAN:
                break
            tail = data + tail
        return tail[-DONE_SPAN:]

    def _too_much(self, head: Head) -> str | None:
        if self.size > (MAX_ANSWER if head.status == 200 else MAX_REFUSAL):
            return f"stream_error: the answer did not end within {self.size >> 20} MiB"
        return None


class Done:
    """One request that has ended, undecoded. Times in ns of CLOCK_MONOTONIC; `due` 0 in a closed loop.

    `end` is `complete`, `close`, `reset`, `stall: words` or `class: words`.
    """

    __slots__ = ("connect", "due", "end", "ended", "i", "reads", "sent", "stamps")

    def __init__(self, i: int, due: int, sent: int, connect: int, ended: int, end: str, reads: list[bytes], stamps: list[int]) -> None:
        self.i, self.due, self.sent, self.connect, self.ended, self.end = i, due, sent, connect, ended, end
        self.reads, self.stamps = reads, stamps

    def raw(self) -> tuple[bytes, list[int]]:
        """The bytes of the answer and the offset after each read."""
        return b"".join(self.reads), list(accumulate(map(len, self.reads)))

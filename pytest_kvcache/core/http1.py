"""HTTP/1.1 answers as bytes (RFC 9112): the head, chunked framing, and which read brought which byte. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add

from .sse import Events, parse, parse_pieces

MAX_HEAD = 65536
_STATUS = re.compile(r"[0-9]{3}\Z")
_LENGTH = re.compile(r"[0-9]{1,18}\Z")
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}\Z")


class BadHttp(Exception):
    """What came is not HTTP/1.1; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers (names in lower case) and how the body ends: chunked, by length, or at the close."""

    status: int
    headers: dict[str, str]
    chunked: bool
    length: int | None
    keep_alive: bool


def split_head(raw: bytes) -> tuple[Head, int] | None:
    """The head of the final answer and the offset of its body; None while it is incomplete. BadHttp when it is none.

    Interim answers (1xx) are skipped.
    """
    start = 0
    while True:
        end = raw.find(b"\r\n\r\n", start)
        if end < 0:
            if len(raw) - start > MAX_HEAD or not b"HTTP/1.".startswith(raw[start : start + 7]):
                raise BadHttp(f"the answer is not HTTP/1.1: {raw[start : start + 80]!r}")
            return None
        head = _head(raw[start:end])
        if head.status >= 200 or head.status == 101:
            return head, end + 4
        start = end + 4


@lru_cache(maxsize=64)  # servers repeat their heads byte for byte; only the date moves
def _head(raw: bytes) -> Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2 or not _STATUS.match(words[1]):
        raise BadHttp(f"the answer is not HTTP/1.1: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    status = int(words[1])
    chunked = headers.get("transfer-encoding", "").lower().endswith("chunked")
    length = headers.get("content-length", "")
    connection = headers.get("connection", "").lower()
    keep = "keep-alive" in connection if words[0] == "HTTP/1.0" else "close" not in connection
    bare = status in (204, 304)
    counted = 0 if bare else int(length) if _LENGTH.match(length) and not chunked else None
    return Head(status=status, headers=headers, chunked=chunked and not bare, length=counted, keep_alive=keep)


@dataclass
class ChunkScanner:
    """Finds the end of a chunked body as its bytes come. Linear; keeps at most one unfinished line."""

    done: bool = False
    _left: int = 0  # payload bytes, and the line end after them, still to come
    _line: bytes = b""
    _trailer: bool = False

    def feed(self, data: bytes) -> bool:
        """Whether the body is complete after `data`; BadHttp when its framing is broken."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                continue
            end = data.find(b"\n", at)
            self._line += data[at:] if end < 0 else data[at:end]
            if len(self._line) > MAX_HEAD:
                raise BadHttp("a chunk's size line does not end")
            if end < 0:
                break
            self._end_of_line(self._line.rstrip(b"\r"))
            self._line, at = b"", end + 1
        return self.done

    def _end_of_line(self, line: bytes) -> None:
        if self._trailer:
            self.done = not line
        elif size := chunk_size(line):
            self._left = size + 2
        else:
            self._trailer = True


def chunk_size(line: bytes) -> int:
    """The size that a chunk's first line states, without its extensions."""
    digits = line.partition(b";")[0].strip()
    if not _SIZE.match(digits):
        raise BadHttp(f"not the size of a chunk: {line[:40]!r}")
    return int(digits, 16)


@dataclass(frozen=True, slots=True)
class Body:
    """A body out of its framing, in pieces: piece i of it ends at `ends[i]`, and at `raw_ends[i]` on the wire.

    `plain` says that no piece holds a CR.
    """

    pieces: Sequence[bytes]
    ends: Sequence[int]
    raw_ends: Sequence[int]
    plain: bool = False

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def events(self) -> Events:
        return parse_pieces(self.pieces, self.ends) if self.plain else parse(self.data)

    def arrivals(self, offsets: Sequence[int], read_ends: Sequence[int], stamps: Sequence[int]) -> list[int]:
        """The stamp of the read that brought the byte before each offset (ascending) of the body."""
        found, piece, read = [], 0, 0
        ends, raw_ends = self.ends, self.raw_ends
        for offset in offsets:
            while ends[piece] < offset:
                piece += 1
            raw = raw_ends[piece] - ends[piece] + offset
            while read_ends[read] < raw:
                read += 1
            found.append(stamps[read])
        return found


def body_of(raw: bytes, at: int, head: Head) -> Body:
    """The body that begins at `at`, as far as it came. BadHttp when its framing is broken."""
    if not head.chunked:
        end = len(raw) if head.length is None else min(len(raw), at + head.length)
        return Body([raw[at:end]], [end - at], [end])
    return _split(raw, at) or _walk(raw, at)


def _split(raw: bytes, at: int) -> Body | None:
    """The usual case at the speed of `bytes.split`: a complete body without a CR in any piece. Else None."""
    words = raw[at:].split(b"\r")  # size, LF + piece, LF + size, …, LF + 0, LF, LF
    if len(words) < 3 or len(words) % 2 == 0:
        return None
    pieces = [w[1:] for w in words[1:-3:2]]
    sizes = words[2:-2:2]
    sizes.insert(0, b"\n" + words[0])
    lengths = list(map(len, pieces))
    try:
        stated = {size: chunk_size(size) for size in set(sizes[: len(pieces)])}
    except BadHttp:
        return None
    if sizes.pop() != b"\n0" or words[-2:] != [b"\n", b"\n"] or list(map(stated.__getitem__, sizes)) != lengths:
        return None
    if not all(lengths) or not all(w.startswith(b"\n") for w in words[1::2]):
        return None
    # In front of each piece stand its size and a line end, after it another line end: len(size) + 3 with the LF in `size`.
    framed = map(add, map((3).__add__, map(len, sizes)), lengths)
    return Body(pieces, list(accumulate(lengths)), list(accumulate(framed, initial=at - 2))[1:], plain=True)


def _walk(raw: bytes, at: int) -> Body:
    pieces, ends, raw_ends, total = [], [], [], 0
    while (line := raw.find(b"\n", at)) >= 0:
        size = chunk_size(raw[at:line].rstrip(b"\r"))
        piece = raw[line + 1 : line + 1 + size]
        if not piece:
            break
        pieces.append(piece)
        total += len(piece)
        ends.append(total)
        raw_ends.append(line + 1 + len(piece))
        at = line + 1 + size + 2
    return Body(pieces, ends, raw_ends)

"""Event streams as bytes: the grammar of server-sent events (WHATWG HTML, section 9.2.6), a pure function.

LF, CR and CRLF end a line and nothing else does; one space after the colon is dropped; lines that begin with a colon are
comments; `data` lines of one event are joined by LF; a byte order mark may stand before the first line. Only complete
events count: one that no blank line ends is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

BOM = b"\xef\xbb\xbf"
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")
# The last event of a stream as it looks on the wire, whatever frames it: no JSON string holds a raw line end.
_DONE = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\](?:\r\n\r|\n\n|\r\r)")
DONE_SPAN = 64  # bytes in which the last event fits, with the framing around it


@dataclass(frozen=True, slots=True)
class Events:
    """Complete events in order: their data, the offset in the body after the byte that completed each, and the names of
    those that carry one (`event:`) by position."""

    data: Sequence[bytes]
    ends: Sequence[int]
    names: dict[int, bytes] = field(default_factory=dict)


def parse(body: bytes) -> Events:
    """The complete events of a body. Linear in its length; never raises."""
    if b"\r" not in body:
        lines = body.split(b"\n")
        if not any(lines[1::2]) and not body.startswith(BOM):  # the usual case: one line an event
            events = lines[:-2:2]
            data = [line[6:] for line in events if line.startswith(b"data: ")]
            if len(data) == len(events):
                return Events(data, list(accumulate(map((2).__add__, map(len, events)))))
        return _blocks(body, b"\n", 0)
    if body.count(b"\r\n") == body.count(b"\r") == body.count(b"\n"):
        # An event is complete at the CR of its blank line: a CR alone ends a line too.
        return _blocks(body, b"\r\n", 1)
    return _lines(body)


def parse_pieces(pieces: Sequence[bytes], ends: Sequence[int]) -> Events:
    """The events of a body without any CR, in pieces that end at `ends`: fast where each piece is one event."""
    data = [p[6:-2] for p in pieces if p.startswith(b"data: ") and p.endswith(b"\n\n") and p.find(b"\n") == len(p) - 2]
    return Events(data, ends) if len(data) == len(pieces) else parse(b"".join(pieces))


def ends_with_done(tail: bytes) -> bool:
    """Whether the last DONE_SPAN bytes of a stream, framing and all, hold its `[DONE]`."""
    return _DONE.search(tail) is not None


def _blocks(body: bytes, eol: bytes, late: int) -> Events:
    """A body with one kind of line end, split at its blank lines."""
    parts = body.split(eol + eol)
    parts.pop()  # what follows the last blank line is no event yet
    first = len(BOM) if parts and parts[0].startswith(BOM) else 0
    if first:
        parts[0] = parts[0][first:]
    ends = list(accumulate(map((2 * len(eol)).__add__, map(len, parts)), initial=first - late))[1:]
    return _events(zip((p.split(eol) for p in parts), ends, strict=True))


def _lines(body: bytes) -> Events:
    """A body with mixed line ends, line by line."""

    def blocks() -> Iterator[tuple[list[bytes], int]]:
        block: list[bytes] = []
        for match in _LINE.finditer(body, len(BOM) if body.startswith(BOM) else 0):
            if match[1]:
                block.append(match[1])
            else:
                yield block, match.start(2) + 1
                block = []

    return _events(blocks())


def _events(blocks: Iterable[tuple[list[bytes], int]]) -> Events:
    """Lines between two blank ones, and where that block was complete, to the events they are."""
    found: list[bytes] = []
    ends: list[int] = []
    names: dict[int, bytes] = {}
    for lines, end in blocks:
        data, name = [], b""
        for line in lines:
            key, _, value = line.partition(b":")
            if key == b"data":
                data.append(value.removeprefix(b" "))
            elif key == b"event":
                name = value.removeprefix(b" ")
        if data:
            if name:
                names[len(found)] = name
            found.append(b"\n".join(data))
            ends.append(end)
    return Events(found, ends, names)

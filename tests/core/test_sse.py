"""Event streams: the grammar, every fast path against a reference that goes byte by byte, memory in proportion."""

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_kvcache.core.sse import DONE_SPAN, ends_with_done, parse, parse_pieces

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(("body", "data"), [
    (b"", []), (b"data: a\n\n", [b"a"]), (b"data:a\n\n", [b"a"]), (b"data:  a\n\n", [b" a"]), (b"data: a \n\n", [b"a "]),
    (b"data: a\r\n\r\ndata: b\r\r", [b"a", b"b"]), (b"data: a\n\r\ndata: b\r\n\n", [b"a", b"b"]), (b"data: a\r\n\r", [b"a"]),
    (BOM + b"data: a\n\n", [b"a"]), (BOM + b"data: a\r\n\r\n", [b"a"]), (BOM + b"data: a\r\r", [b"a"]), (BOM + BOM + b"data: a\n\n", []),
    (b"data: a\n\n" + BOM + b"data: b\n\n", [b"a"]), (BOM[:2] + b"data: a\n\n", []),
    (b": keep-alive\n\n: x\n\ndata: a\n\n", [b"a"]), (b":\n\n", []), (b":data: a\n\n", []),
    (b"data: a\ndata: b\n\n", [b"a\nb"]), (b"data: a\r\ndata:\r\ndata: b\r\n\r\n", [b"a\n\nb"]), (b"data\n\n", [b""]), (b"data:\n\n", [b""]),
    (b"data: a", []), (b"data: a\n", []), (b"data: a\r\n", []), (b"data: a\n\ndata: b\n", [b"a"]),
    (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]), (b"event: e\ndata: a\nid: 3\nretry: 5\n\n", [b"a"]), (b"event: e\n\n", []),
    (b" data: a\n\n", []), (b"Data: a\n\n", []), (b"data : a\n\n", []), (b"datax: a\n\n", []), (b"data: a: b\n\n", [b"a: b"]),
    ("data: \u2028x\u2029y\x85z\v\f\x1c\n\n".encode(), ["\u2028x\u2029y\x85z\v\f\x1c".encode()]), (b"data: \0\n\n", [b"\0"]),
])  # fmt: skip
def test_the_grammar(body, data):
    assert list(parse(body).data) == data == [event[0] for event in reference(body)]


def test_events_may_have_names_which_only_last_for_one():
    assert parse(b"event: error\ndata: a\n\ndata: b\n\nevent:ping\ndata\n\nevent:\ndata: c\n\n").names == {0: b"error", 2: b"ping"}
    assert parse(b"event: a\nevent: b\ndata: x\n\nevent: c\n\ndata: y\n\n").names == {0: b"b"}, (
        "the last name counts, and only where data is"
    )


def reference(body: bytes) -> list[tuple[bytes, int, bytes]]:
    """(data, offset after the byte that completed it, name) of each event, one byte at a time."""
    found, lines, line, skip = [], [], b"", False
    start = 3 if body[:3] == BOM else 0
    for at in range(start, len(body)):
        byte = body[at : at + 1]
        if skip and byte == b"\n":
            skip = False
            continue
        skip = byte == b"\r"
        if byte not in (b"\r", b"\n"):
            line += byte
        elif line:
            lines.append(line)
            line = b""
        else:
            found += reference_event(lines, at + 1)
            lines = []
    return found


def reference_event(lines, end):
    fields = [(name, value[1:] if value[:1] == b" " else value) for name, _, value in (line.partition(b":") for line in lines)]
    data = [value for name, value in fields if name == b"data"]
    names = [value for name, value in fields if name == b"event"]
    return [(b"\n".join(data), end, names[-1] if names else b"")] if data else []


def seen(events) -> list[tuple[bytes, int, bytes]]:
    return [(data, end, events.names.get(i, b"")) for i, (data, end) in enumerate(zip(events.data, events.ends, strict=True))]


WORDS = [
    b"data: a",
    b"data:b",
    b"data:  c",
    b"data",
    b"",
    b"",
    b"",
    b": ping",
    b"event: error",
    b"event:",
    b"id: 1",
    b"datax: y",
    "data: \u2028\x85é".encode(),
    BOM,
]
words = st.sampled_from(WORDS)
one_ending = st.builds(lambda lines, eol: eol.join([*lines, b""]), st.lists(words, max_size=14), st.sampled_from([b"\n", b"\r\n", b"\r"]))
any_ending = st.lists(st.tuples(words, st.sampled_from([b"\n", b"\r\n", b"\r", b""])).map(b"".join), max_size=14).map(b"".join)
usual = st.lists(st.builds(lambda text: b"data: " + text + b"\n\n", st.binary(max_size=6)), max_size=8).map(b"".join)
bodies = st.builds(
    lambda bom, body, cut: bom + body[: len(body) - cut], st.sampled_from([b"", b"", BOM]),
    st.one_of(one_ending, any_ending, usual, st.binary(max_size=60)), st.integers(0, 3),
)  # fmt: skip


@given(bodies)
@example(b"data: a\r\n\r\ndata: b\r\n\r")
@example(b"\n\r\n\r")
@example(BOM + b"\n\n")
def test_every_path_agrees_with_the_reference(body):
    assert seen(parse(body)) == reference(body)


@given(bodies, st.data())
def test_what_has_come_so_far_is_final(body, data):
    """The events of a prefix are the first ones of the whole: no later byte changes an event or when it was complete."""
    cut = data.draw(st.integers(0, len(body)))
    whole = seen(parse(body))
    assert seen(parse(body[:cut])) == [e for e in whole if e[1] <= cut]


@given(st.lists(st.one_of(usual, any_ending, st.binary(max_size=20)), max_size=6))
def test_pieces_give_the_events_of_the_whole(pieces):
    pieces = [p.replace(b"\r", b"") for p in pieces]
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert seen(parse_pieces(pieces, ends)) == reference(b"".join(pieces))


EVENTS = [b'data: {"a": 1}\n\n', b"data: b\n\n", b"data:c\n\n", b"data: d\n", b"\n", b": x\n\n", b"event: e\ndata: f\n\n"]


@given(st.lists(st.sampled_from(EVENTS), max_size=8))
def test_pieces_that_are_mostly_events_too(pieces):
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert seen(parse_pieces(pieces, ends)) == reference(b"".join(pieces))


@pytest.mark.parametrize(("tail", "done"), [
    (b"data: [DONE]\n\n", True), (b"data:[DONE]\n\n", True), (b"data: [DONE]\r\n\r\n", True), (b"data: [DONE]\r\n\r", True),
    (b"data: [DONE]\r\r", True), (b"}\n\ndata: [DONE]\n\n", True), (b"e\r\ndata: [DONE]\n\n\r\n", True),
    (b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", True), (b"data: [DONE]\n", False), (b"data: [DONE]\r\n", False), (b"data: [DONE]", False),
    (b'data: {"t": "data: [DONE]\\n\\n"}\n\n', False), (b"data: x data: [DONE]\n\n", False), (b"", False), (b": [DONE]\n\n", False),
])  # fmt: skip
def test_the_end_mark_is_seen_through_its_framing(tail, done):
    assert len(tail) <= DONE_SPAN
    assert ends_with_done(tail) is done


BAD = {
    "CR": b"\r", "LF": b"\n", "CRLF": b"\r\n", "no line end": b"x", "no blank line": b"data: x\n", "comments": b":\n", "empty events": b"data\n\n",
    "mixed": b"data: x\n\r", "names": b"event: x\n\n", "CR in LF": b"data: x\n\n\r", "colons": b":", "end marks": b"data: [DONE]",
}  # fmt: skip


@pytest.mark.parametrize("unit", BAD.values(), ids=BAD)
def test_memory_is_in_proportion_to_the_body(unit):
    half, whole = (peak(parse, unit * (size // len(unit))) for size in (2**18, 2**19))
    assert whole < 2.3 * half + 65536
    assert whole < 200 * 2**19, "a line of one byte costs an object, not more"


def peak(function, *arguments) -> int:
    """The most memory that a call takes, in bytes."""
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

"""HTTP/1.1 answers: heads good and bad, chunks of any size cut anywhere, and which read brought which byte."""

import bisect
import contextlib
import tracemalloc
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.http1 import MAX_HEAD, BadHttp, ChunkScanner, body_of, split_head

OK = b"HTTP/1.1 200 OK\r\n"


def head(*lines: bytes, first: bytes = OK):
    raw = first + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    found, at = split_head(raw + b"body")
    assert at == len(raw)
    return found


def test_a_head():
    found = head(b"Content-Type:  text/event-stream ", b"X-Empty:", b"No-Colon", b"Content-Length: 12")
    assert (found.status, found.length, found.chunked, found.keep_alive) == (200, 12, False, True)
    assert found.headers == {"content-type": "text/event-stream", "x-empty": "", "no-colon": "", "content-length": "12"}


@pytest.mark.parametrize(("lines", "first", "expected"), [
    ([], OK, (False, None, True)), ([b"Transfer-Encoding: chunked"], OK, (True, None, True)), ([b"transfer-encoding: Chunked"], OK, (True, None, True)),
    ([b"Transfer-Encoding: gzip, chunked"], OK, (True, None, True)), ([b"Transfer-Encoding: chunked", b"Content-Length: 5"], OK, (True, None, True)),
    ([b"Content-Length: 0"], OK, (False, 0, True)), ([b"Content-Length: -1"], OK, (False, None, True)), ([b"Content-Length: 1_0"], OK, (False, None, True)),
    ([b"Content-Length: \xb2"], OK, (False, None, True)), ([b"Content-Length: " + b"9" * 5000], OK, (False, None, True)),
    ([b"Connection: close"], OK, (False, None, False)), ([b"Connection: Close"], OK, (False, None, False)),
    ([], b"HTTP/1.0 200 OK\r\n", (False, None, False)), ([b"Connection: Keep-Alive"], b"HTTP/1.0 200 OK\r\n", (False, None, True)),
    ([b"Content-Length: 5"], b"HTTP/1.1 204 No Content\r\n", (False, 0, True)), ([b"Transfer-Encoding: chunked"], b"HTTP/1.1 304 Same\r\n", (False, 0, True)),
])  # fmt: skip
def test_how_the_body_ends(lines, first, expected):
    found = head(*lines, first=first)
    assert (found.chunked, found.length, found.keep_alive) == expected


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 503\r\n", b"HTTP/1.1 503 \r\n", b"HTTP/1.1 503 Service Un available\r\n", b"HTTP/1.1 503 \xe9\r\n"]
)
def test_the_reason_may_be_anything(first):
    assert head(first=first).status == 503


@pytest.mark.parametrize("first", [
    b"HTTP/2 200\r\n", b"HTTP/1.1\r\n", b"HTTP/1.1 OK\r\n", b"HTTP/1.1 -20\r\n", b"HTTP/1.1 \xb2\xb2\xb2\r\n", b"HTTP/1.1 20\r\n", b"HTTP/1.1 2000 OK\r\n",
    b"HTTP/1.1 " + b"9" * 5000 + b" OK\r\n", b"<html>\r\n", b"\r\n", b"HTTP/11 200 OK\r\n",
])  # fmt: skip
def test_what_is_no_head_is_said_with_its_words(first):
    with pytest.raises(BadHttp, match="not HTTP/1"):
        split_head(first + b"a: b\r\n\r\n")


def test_interim_answers_are_skipped():
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + b"a: b\r\n\r\n"
    found, at = split_head(raw + b"x")
    assert found.status == 200 and at == len(raw)
    assert split_head(raw[:-1]) is None
    assert split_head(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")[0].status == 101, "final: what follows is no HTTP"


def test_an_unfinished_head_is_waited_for_but_not_for_ever():
    raw = OK + b"content-type: text/event-stream\r\n\r\n"
    assert [split_head(raw[:n]) for n in range(len(raw))] == [None] * len(raw)
    with pytest.raises(BadHttp):
        split_head(OK + b"x: " + b"y" * MAX_HEAD)
    with pytest.raises(BadHttp):
        split_head(b"SSH-2.0")


@given(st.binary(max_size=80), st.sampled_from([b"", b"HTTP/1.1 ", OK, b"HTTP/1.1 100 x\r\n\r\n"]))
def test_no_bytes_raise_anything_but_bad_http(data, start):
    try:
        found = split_head(start + data + b"\r\n\r\n")
        assert found is None or 0 <= found[0].status <= 999
    except BadHttp:
        pass


# --- chunks ---

CHUNKED = head(b"Transfer-Encoding: chunked")
payloads = st.one_of(
    st.binary(max_size=20), st.text("ab\n", max_size=20).map(str.encode), st.just(b"data: x\n\n"), st.just(b"\r\n0\r\n\r\n")
)


@st.composite
def framings(draw):
    """(raw, payload, where each byte of the payload is in raw): chunks with odd but legal sizes, extensions and trailers."""
    raw, payload, where = b"", b"", []
    plain = draw(st.booleans())
    for data in draw(st.lists(payloads.filter(bool), max_size=6)):
        size = b"%x" % len(data)
        if not plain:
            size = draw(st.sampled_from([size, size.upper(), b"000" + size, size + b" ", size + b';a="b c"', size + b" ; x"]))
        raw += size + b"\r\n"
        where += range(len(raw), len(raw) + len(data))
        raw += data + b"\r\n"
        payload += data
    last, trailer = (
        (b"0", b"")
        if plain
        else draw(st.tuples(st.sampled_from([b"0", b"000", b"0;x=1"]), st.sampled_from([b"", b"X-A: b\r\n", b"a: b\r\nc:\r\n"])))
    )
    return raw + last + b"\r\n" + trailer + b"\r\n", payload, where


@given(framings(), st.sampled_from([b"", b"HTTP/1.1 200", b"5\r\nhello\r\n0\r\n\r\n"]))
def test_chunks_come_out_as_they_went_in(framing, junk):
    raw, payload, where = framing
    body = body_of(b"head" + raw + junk, 4, CHUNKED)
    assert body.data == payload and (list(body.ends) or [0])[-1] == len(payload)
    assert not body.plain or b"\r" not in payload
    arrived = body.arrivals(range(1, len(payload) + 1), range(1, 5 + len(raw) + len(junk)), range(5 + len(raw) + len(junk)))
    assert arrived == [4 + at for at in where], "every byte has the stamp of the read that brought it"


@given(framings(), st.data())
def test_every_byte_has_the_stamp_of_its_read(framing, data):
    raw, payload, where = framing
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(raw)), max_size=8)), len(raw)})
    offsets = sorted(data.draw(st.lists(st.integers(1, max(1, len(payload))), max_size=6))) if payload else []
    stamps = [1000 + i for i in range(len(cuts))]
    found = body_of(raw, 0, CHUNKED).arrivals(offsets, cuts, stamps)
    assert found == [stamps[bisect.bisect_right(cuts, where[offset - 1])] for offset in offsets]


@given(framings(), st.data())
def test_the_end_is_found_exactly_where_it_is(framing, data):
    raw, *_ = framing
    scanner = ChunkScanner()
    assert [scanner.feed(raw[i : i + 1]) for i in range(len(raw))] == [False] * (len(raw) - 1) + [True]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6))), len(raw)]
    scanner = ChunkScanner()
    assert [scanner.feed(raw[a:b]) for a, b in pairwise(cuts)][-1] is True
    assert scanner.feed(b"HTTP/1.1 junk") is True, "what follows is not its business"


@given(framings())
def test_a_part_of_the_bytes_is_a_part_of_the_body(framing):
    raw, payload, where = framing
    for cut in range(len(raw)):
        assert body_of(raw[:cut], 0, CHUNKED).data == payload[: bisect.bisect_left(where, cut)]


@given(framings(), st.data())
def test_broken_chunks_raise_nothing_but_bad_http(framing, data):
    raw = bytearray(framing[0])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for what in (lambda: body_of(bytes(raw), 0, CHUNKED), lambda: ChunkScanner().feed(bytes(raw))):
        with contextlib.suppress(BadHttp):
            what()


@given(st.binary(max_size=60))
def test_no_bytes_are_chunks_that_raise_anything_else(data):
    try:
        body = body_of(data, 0, CHUNKED)
        assert len(body.data) <= len(data)
        body.arrivals(body.events().ends, [len(data)], [1])
    except BadHttp:
        pass


@pytest.mark.parametrize("line", [b"x", b"-1", b"+5", b"0x5", b"1_0", b" ", b"", b"f" * 16, b"5 5", b";5"])
def test_a_size_is_plain_hex(line):
    for raw in (line + b"\r\nhello\r\n0\r\n\r\n", b"2\r\n{}\r\n" + line + b"\r\nhello\r\n0\r\n\r\n"):
        with pytest.raises(BadHttp, match="size of a chunk"):
            body_of(raw, 0, CHUNKED)
        with pytest.raises(BadHttp, match="size of a chunk"):
            ChunkScanner().feed(raw)


def test_a_size_line_without_end_is_given_up():
    scanner = ChunkScanner()
    with pytest.raises(BadHttp, match="does not end"):
        for _ in range(MAX_HEAD):
            scanner.feed(b"00")


@pytest.mark.parametrize(
    ("lines", "data"), [([], b"hello there"), ([b"Content-Length: 5"], b"hello"), ([b"Content-Length: 99"], b"hello there")]
)
def test_other_bodies(lines, data):
    body = body_of(b"head" + b"hello there", 4, head(*lines))
    assert body.data == data
    assert body.arrivals([1, len(data)], [5, 4 + len(data)], [7, 8]) == [7, 8]


@pytest.mark.parametrize("unit", [b"1\r\nx\r\n", b"1;a\r\nx\r\n", b"9\r\ndata: x\n\n\r\n", b"\r", b"0" * 64, b"2\r\n\r\n\r\n"])
def test_memory_is_in_proportion_to_the_body(unit):
    half, whole = (peak(unit * (size // len(unit))) for size in (2**17, 2**18))
    assert whole < 2.3 * half + 65536 and whole < 200 * 2**18


def peak(raw: bytes) -> int:
    tracemalloc.start()
    try:
        body = body_of(raw, 0, CHUNKED)
        body.arrivals(body.events().ends, list(accumulate([1] * len(raw))), range(len(raw)))
    except BadHttp:
        pass
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found

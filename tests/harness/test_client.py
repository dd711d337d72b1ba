"""The streaming client: the parser on any split of any bytes, every way of being no answer, real sockets."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.record import OK
from pytest_kvcache.core.workload import Request
from pytest_kvcache.harness import loadgen
from pytest_kvcache.harness.client import BadStream, Client, EventParser, decode

ASKED = Request(index=0, prompt=" a b", isl=2, osl=2)


def events_of(body: bytes, cuts=()) -> list[bytes]:
    parser, found, at = EventParser(), [], 0
    for cut in [*sorted(set(cuts)), len(body)]:
        found += parser.feed(body[at:cut])
        at = max(at, cut)
    return found


pieces = st.sampled_from(
    [
        b"data: a\n\n",
        b"data:b\r\n\r\n",
        b"data: c\r\r",
        b": ping\n\n",
        b"\n",
        b"\r",
        b"data: d\ndata: e\n\n",
        b"event: x\n",
        b"data",
        "data: \u2028\x85é\n\n".encode(),
        b"\xef\xbb\xbf",
        b"datax: y\n\n",
        b"data\n\n",
        b"id: 1\n",
    ]
)


@given(st.one_of(st.lists(pieces, max_size=12).map(b"".join), st.binary(max_size=200)), st.lists(st.integers(0, 300), max_size=20))
def test_any_split_gives_the_same_events(body, cuts):
    whole = events_of(body)
    assert events_of(body, [c for c in cuts if c <= len(body)]) == whole
    assert events_of(body, range(len(body))) == whole


@pytest.mark.parametrize(("body", "expected"), [
    (b"data: a\n\n", [b"a"]), (b"data:a\n\n", [b"a"]), (b"data:  a\n\n", [b" a"]), (b"data: a\r\n\r\ndata: b\r\r", [b"a", b"b"]),
    (b"\xef\xbb\xbfdata: a\n\n", [b"a"]), (b": keep-alive\n\n: x\n\ndata: a\n\n", [b"a"]), (b"data: a\ndata: b\n\n", [b"a\nb"]),
    (b"data: a", []), (b"data: a\n", []), ("data: \u2028x\u2029\n\n".encode(), ["\u2028x\u2029".encode()]), (b"event: e\ndata: a\nid: 3\n\n", [b"a"]),
    (b"data\n\n", [b""]),
])  # fmt: skip
def test_the_grammar_of_event_streams(body, expected):
    assert events_of(body) == expected


def chunk(text="", **more):
    return json.dumps({"choices": [{"text": text, "index": 0, "finish_reason": more.pop("finish", None)}], **more}).encode()


LAST = chunk(finish="length", usage={"prompt_tokens": 2, "completion_tokens": 2})


def test_a_whole_answer():
    found = decode([(1.0, chunk("a")), (2.0, chunk("b")), (3.0, LAST), (4.0, b"[DONE]")], ASKED)
    assert found == {"first_s": 1.0, "last_s": 2.0, "events": 2, "output_tokens": 2, "input_tokens": 2}


@pytest.mark.parametrize(("payloads", "outcome"), [
    ([b"{broken"], "bad_json"), ([b"[1]"], "bad_json"), ([chunk("a"), b'{"error": "out of memory"}'], "stream_error"),
    ([b'{"error": {"message": "x"}}'], "stream_error"), ([chunk("a")], "truncated_stream"), ([], "truncated_stream"),
    ([LAST], "empty_output"), ([b"[DONE]"], "empty_output"), ([chunk("a"), chunk(finish="abort")], "aborted"),
    ([chunk("a"), chunk(finish="length", usage={"completion_tokens": 1, "prompt_tokens": 2})], "short_output"),
])  # fmt: skip
def test_every_way_of_being_no_answer(payloads, outcome):
    with pytest.raises(BadStream) as caught:
        decode([(float(i), p) for i, p in enumerate(payloads)], ASKED)
    assert caught.value.outcome == outcome


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_payload_raises_anything_but_its_own_error(payloads):
    with contextlib.suppress(BadStream):
        decode([(0.0, p) for p in payloads], ASKED)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda c: st.lists(c, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "text", "usage", "error", "finish_reason", "completion_tokens"]), c, max_size=4),
        max_leaves=12,
    )
)
def test_no_json_raises_anything_but_its_own_error(value):
    with contextlib.suppress(BadStream):
        decode([(0.0, json.dumps(value).encode())], ASKED)


@contextlib.contextmanager
def raw_server(*answers):
    """One connection after another, each answered by its list of (seconds to wait, bytes); None resets the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for answer in answers:
            peer, _ = listener.accept()
            peer.recv(65536)
            for pause, data in answer:
                time.sleep(pause)
                if data is None:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    break
                peer.sendall(data)
            peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(5)
    listener.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def ask(url):
    async def go():
        async with Client(url, "/v1/completions", "m", lambda m, p, n: {"model": m, "prompt": p, "max_tokens": n}) as client:
            return await client.ask(ASKED)

    return asyncio.run(go())


def test_times_are_those_of_the_bytes():
    answer = [(0.0, HEAD), (0.15, event(chunk("a"))), (0.1, event(chunk("b"))), (0.2, event(LAST) + event(b"[DONE]"))]
    with raw_server(answer) as url:
        found = ask(url)
    assert found.outcome == OK
    assert found.first_s - found.sent_s == pytest.approx(0.15, abs=0.08)
    assert found.last_s - found.first_s == pytest.approx(0.1, abs=0.08)
    assert found.end_s - found.last_s >= 0.15, "the usage chunk and [DONE] are not tokens"


@pytest.mark.parametrize(("answer", "outcome", "words"), [
    ([(0, b"HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\noverload!")], "http_status", "HTTP 503: overload!"),
    ([(0, b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 7\r\n\r\n<p>hi<p")], "not_event_stream", "<p>hi"),
    ([(0, CHUNKED + framed(event(chunk("a")))), (0.05, None)], "connection_reset", ""),
    ([(0, b"")], "connection_reset", ""),
    ([(0, HEAD + event(chunk("a")))], "truncated_stream", "after 1 token events"),
    ([(0, HEAD + event(b"{oops"))], "bad_json", "{oops"),
])  # fmt: skip
def test_failures_keep_their_class_and_the_first_words(answer, outcome, words):
    with raw_server(answer) as url:
        found = ask(url)
    assert found.outcome == outcome
    assert words in found.error


def test_nobody_listening_is_a_failure_not_an_exception():
    with socket.create_server(("127.0.0.1", 0)) as s:
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    assert ask(url).outcome == "connection_reset"


def test_a_proxy_from_the_environment_is_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with raw_server([(0, HEAD + event(chunk("a")) + event(chunk("b")) + event(LAST))]) as url:
        assert ask(url).outcome == OK


class Recorder:
    """A client that answers by itself and notes how many requests were open at once."""

    def __init__(self):
        self.open = self.most = 0
        self.order = []

    async def ask(self, request):
        self.open += 1
        self.most = max(self.most, self.open)
        self.order.append(request.index)
        await asyncio.sleep(0.001 * (1 + request.index % 3))
        self.open -= 1
        return request


@given(st.integers(1, 8), st.integers(1, 30))
def test_a_closed_loop_keeps_its_concurrency_and_sends_everything_once(concurrency, n):
    client = Recorder()
    requests = [Request(index=i, prompt="", isl=1, osl=1) for i in range(n)]
    found = asyncio.run(loadgen.closed_loop(client, requests, concurrency))
    assert [r.index for r in found] == list(range(n))
    assert client.order == list(range(n)), "requests are sent in the order of the workload"
    assert client.most == min(concurrency, n)

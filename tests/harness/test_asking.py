"""One question outside of any load: its answer comes whole within one limit, however the server spends that."""

import time

import pytest

from pytest_kvcache.core.load import Target
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import asking, page
from pytest_kvcache.harness.counted import plain_counts

from .pages import raw

LIMIT_S, SOON_S = 0.3, 2.0  # a limit, and what is not much more than one
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED, LONG, CLOSING = (
    HEAD + line + b"\r\n\r\n" for line in (b"Transfer-Encoding: chunked", b"Content-Length: 99999", b"Connection: close")
)
DONE = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


def ask(url, **more):
    return asking.ask(asking.opener(more.pop("target", None)), url, limit_s=LIMIT_S, **more)


@pytest.mark.clock
@pytest.mark.parametrize("body", [None, b"{}"])
@pytest.mark.parametrize(("parts", "again"), [
    ((), (0.05,)), ((b"H",), (b"T", 0.05)), ((HEAD,), (b"X-A: b\r\n", 0.05)),
    ((CHUNKED,), (b"8\r\n: ping\n\n\r\n", 0.05)), ((LONG,), (b"# x\n", 0.05)), ((LONG,), (b"x", 0.05)), ((CLOSING,), (b": ping\n\n", 0.05)),
])  # fmt: skip
def test_a_server_that_sends_a_little_for_ever_is_waited_for_as_long_as_was_said(parts, again, body):
    with raw(*parts, again=again) as url:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^no whole answer within 0\.3 s$"):
            ask(url, body=body)
        assert time.monotonic() - began < SOON_S


@pytest.mark.clock
@pytest.mark.parametrize(("parts", "again"), [((), (0.05,)), ((HEAD,), (b"X-A: b\r\n", 0.05)), ((HEAD + b"\r\n",), (0.05,))])
def test_so_is_a_proxy_that_opens_no_tunnel_and_one_behind_which_nobody_speaks_tls(parts, again):
    with raw(*parts, again=again) as proxy:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no whole answer within"):
            ask("https://engine.test", target=Target(base_url="https://engine.test", endpoint="", proxy=proxy))
        assert time.monotonic() - began < SOON_S


@pytest.mark.clock
def test_those_who_ask_say_it_in_their_words(monkeypatch):
    monkeypatch.setattr(page, "TIMEOUT_S", LIMIT_S)
    with raw(CLOSING, again=(b"# x\n", 0.05)) as url:
        began = time.monotonic()
        assert page.fetch(f"{url}/metrics") == ("", "unreachable")
        with pytest.raises(UserError, match=r"by which tokens are counted .at most 0\.3 s., failed: no whole answer within 0\.3 s"):
            plain_counts(Target(base_url=url, endpoint="/v1/completions"), {}, LIMIT_S)
        assert time.monotonic() - began < SOON_S


@pytest.mark.clock
@pytest.mark.parametrize(
    "parts",
    [(CLOSING + DONE,), (CHUNKED + b"%x\r\n%s\r\n" % (len(DONE), DONE),), (LONG + DONE,), (CLOSING + DONE.replace(b"\n", b"\r\n"),)],
)
def test_a_stream_is_whole_with_its_end_mark_though_the_connection_stays_open(parts):
    with raw(*parts, again=(0.05,)) as url:
        began = time.monotonic()
        status, text = ask(url, body=b"{}")
        assert time.monotonic() - began < LIMIT_S
    assert status == 200 and "[DONE]" in text


@pytest.mark.parametrize(("parts", "words"), [
    ((LONG + b"{}",), "its answer ended 99997 bytes early"), ((CHUNKED + b"8\r\nab",), "IncompleteRead"), ((b"what?\r\n\r\n",), "BadStatusLine"),
    ((), "closed connection without response|reset by peer"), ((CLOSING + b"x" * 100,), "its answer is larger than"),
    ((CLOSING + b"a line\n" * 20,), "its answer is larger than"),
])  # fmt: skip
def test_what_is_no_whole_answer_is_none(monkeypatch, parts, words):
    monkeypatch.setattr(asking, "MOST_BYTES", 99)
    with raw(*parts) as url, pytest.raises(OSError, match=words):
        ask(url)


def test_a_status_that_is_no_success_is_an_answer_without_its_text_too_and_nothing_is_followed():
    with raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nbu") as url:
        assert ask(url) == (503, "")
    with raw(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 4\r\n\r\ngone") as url:
        assert ask(url) == (302, "gone")

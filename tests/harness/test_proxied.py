"""Loads through an HTTP proxy: what keeps a request from its answer has a limit there too."""

import time

import pytest

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.harness import proxied
from pytest_kvcache.harness.connections import S, now

from .pages import raw

pytestmark = pytest.mark.clock

HEAD = b"HTTP/1.1 200 OK\r\n"
TUNNEL, STREAM = HEAD + b"\r\n", HEAD + b"content-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN, DONE = b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"


@pytest.fixture
def ends(monkeypatch):
    """How the requests of a small load through a proxy end, and what that took."""
    monkeypatch.setattr(proxied, "CONNECT_TIMEOUT", int(0.3 * S))

    def one(scheme, proxy, **limits):
        found = []
        load = Load(bodies=(b"{}",) * 3, osl=(1,) * 3, concurrency=1, **{"first_timeout_s": 30, "idle_timeout_s": 30} | limits)
        driver = proxied.Proxied(
            Target(base_url=f"{scheme}://engine.test:8443", endpoint="/v1/completions", proxy=proxy), load, found.append
        )
        driver.connect()
        began = time.monotonic()
        driver.run(now())
        driver.digest_all()
        return [done.end for done in found], time.monotonic() - began

    return one


@pytest.mark.parametrize(("parts", "again"), [((), (0.05,)), ((HEAD,), (b"X-A: b\r\n", 0.05)), ((TUNNEL,), (0.05,))])
def test_a_proxy_that_opens_no_tunnel_or_one_to_nobody_is_given_up_once(ends, parts, again):
    with raw(*parts, again=again) as proxy:
        found, took_s = ends("https", proxy)
    assert found == ["connection_reset: no connection through the proxy within 0.3 s"], "what has not been sent by then is not sent"
    assert took_s < 3


@pytest.mark.parametrize(("parts", "again", "limit"), [
    ((), (0.05,), {"first_timeout_s": 0.4, "idle_timeout_s": 0.4}), ((STREAM,), (b": ping\n\n", 0.05), {"progress_timeout_s": 0.4}),
    ((STREAM + TOKEN,), (b": ping\n\n", 0.05), {"progress_timeout_s": 0.4}),
])  # fmt: skip
def test_an_answer_without_events_is_given_up_though_comments_keep_it_alive(ends, parts, again, limit):
    with raw(*parts, again=again) as proxy:
        found, took_s = ends("http", proxy, **limit)
    assert len(found) == 1 and found[0].startswith("stall: nothing for 0.4 s after ")
    assert took_s < 3


def test_events_are_progress(ends):
    with raw(STREAM, *(TOKEN, 0.1) * 8, DONE, again=(0.05,)) as proxy:
        found, _ = ends("http", proxy, progress_timeout_s=0.4)
    assert found == ["close"] * 3

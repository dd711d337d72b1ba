"""A server that runs already: when it counts as answering, and when as restarted."""

import sys
import threading
import time
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

from pytest_kvcache.core.address import Endpoint, parse, reached
from pytest_kvcache.core.spec import Gpu, Model, UserError
from pytest_kvcache.frameworks import load
from pytest_kvcache.harness import attached, restart

from .pages import Quiet, in_a_thread, raw

TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(attached.weights, "tokenizer_of", lambda *_: ({}, {}))
    monkeypatch.setattr(attached, "single_token_words", lambda _: ())
    monkeypatch.setattr(attached, "end_tokens", lambda _: ())
    monkeypatch.setattr(attached, "POLL_S", 0.02)
    monkeypatch.setattr(restart, "GONE_LOOK_S", 0.05)

    def one(url, command="", start_timeout_s=None):
        address = parse(url)
        found = attached.AttachedRunner(
            Endpoint(address=address, server=reached(address, {}), restart=command), load("openai"), Model(key="org/model"),
            Gpu(key="h100", label="H100"), sys.executable, say=lambda _: None, session_id="s", start_timeout_s=start_timeout_s,
        )  # fmt: skip
        found._served = "org/model"
        return found

    return one


@pytest.mark.clock
def test_it_answers_with_its_token_though_it_holds_the_connection_open(runner):
    with raw(HEAD + TOKEN + b"data: [DONE]\n\n", again=(0.05,)) as url:
        began = time.monotonic()
        runner(url)._fresh()
        assert time.monotonic() - began < 2


@pytest.mark.clock
@pytest.mark.parametrize("sent", [b": ping\n\n", TOKEN])
def test_one_that_never_comes_to_an_end_is_waited_for_as_long_as_is_said(runner, monkeypatch, sent):
    for name, limit_s in (("ANSWER_S", 0.3), ("WATCH_S", 0.1), ("PAGE_S", 0.1)):
        monkeypatch.setattr(attached, name, limit_s)
    with raw(HEAD, again=(sent, 0.05)) as url:
        began = time.monotonic()
        with pytest.raises(
            UserError, match=r"/v1/completions gave no whole answer within 0\.3 s; is the server busy, or still starting\?$"
        ):
            runner(url)._fresh()
        with pytest.raises(UserError, match=r"not ready within 0\.5 s after --kv-restart: http.* gave no whole answer within 0\.3 s"):
            runner(url, "true", 0.5)._fresh()
        assert time.monotonic() - began < 4


class Serving:
    """A server whose list of models answers with `status`; its completions always do. What it says of its start is `started`."""

    def __init__(self):
        self.status, self.started, self.models, self.server = 200, None, [], None

    @contextmanager
    def up(self, port=0):
        state = self

        class Handler(Quiet):
            def do_GET(self):
                if self.path == "/metrics":
                    page = f"process_start_time_seconds {state.started}\n".encode() if state.started else b""
                    return self.answer(200 if page else 404, page)
                state.models.append(state.status)
                return self.answer(state.status, b"{}")

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200, TOKEN)

            def answer(self, status, body):
                if status is None:
                    time.sleep(0.3)
                    status = 200
                super().answer(status, body)

        with in_a_thread(ThreadingHTTPServer(("127.0.0.1", port), Handler)) as url:
            yield url


@pytest.mark.parametrize("status", [500, 501, 503, 404, 200, None])
def test_a_fault_of_its_own_or_a_slow_answer_is_no_restart(runner, monkeypatch, status):
    monkeypatch.setattr(attached, "WATCH_S", 0.1)
    server = Serving()
    server.status = status
    with (
        server.up() as url,
        pytest.raises(UserError, match=r"nothing shows that the server was restarted: .* tells no start of its process; name"),
    ):
        runner(url, "sleep 0.3")._fresh()


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_that_says_meanwhile_that_nobody_is_there_shows_it(runner, status):
    server = Serving()

    def restarted():
        end = time.monotonic() + 10
        while len(server.models) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        server.status = status
        while status not in server.models and time.monotonic() < end:
            time.sleep(0.01)
        server.status = 200

    thread = threading.Thread(target=restarted)
    with server.up() as url:
        thread.start()
        runner(url, "sleep 1")._fresh()
        thread.join()


@pytest.mark.parametrize(("after", "words"), [(2.0, None), (1.0, "tells the same start of its process")])
def test_so_does_the_start_of_the_process_by_its_own_word(runner, monkeypatch, after, words):
    server = Serving()
    server.started = 1.0
    monkeypatch.setattr(attached.restart, "run", lambda *_: setattr(server, "started", after) or (0, ""))
    with server.up() as url:
        if not words:
            return runner(url, "x")._fresh()
        with pytest.raises(UserError, match=words):
            runner(url, "x")._fresh()


def test_a_server_that_had_ended_and_is_there_now_was_restarted(runner, monkeypatch):
    """Between two runs it died: the command has started it again."""
    server = Serving()
    with server.up() as url:
        pass
    up = []

    def start(*_):
        up.append(server.up(int(url.rpartition(":")[2])))
        up[0].__enter__()
        return 0, ""

    monkeypatch.setattr(attached.restart, "run", start)
    try:
        runner(url, "x")._fresh()
    finally:
        up[0].__exit__(None, None, None)

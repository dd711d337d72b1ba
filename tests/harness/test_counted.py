"""Token counts by a plain answer: what a server says, and what is said when it does not."""

import contextlib
import json
from http.server import HTTPServer

import pytest

from pytest_kvcache.core.load import Target
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.counted import plain_counts

from .pages import Quiet, in_a_thread

COUNTS = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@contextlib.contextmanager
def answering(status, data):
    """A server that gives one answer to whatever it is asked; its target and what it was asked."""
    asked = []

    class Handler(Quiet):
        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers.get("X-Own")))
            self.answer(status, data)

    with in_a_thread(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield Target(base_url=address, endpoint="/v1/completions", headers={"X-Own": "mine"}), asked


def test_the_same_request_without_a_stream_is_counted():
    with answering(200, json.dumps({"choices": [], "usage": COUNTS}).encode()) as (target, asked):
        assert plain_counts(target, {"prompt": "a", "stream": True}, 5) == (5, 3)
    assert asked == [("/v1/completions", {"prompt": "a", "stream": False}, "mine")]


@pytest.mark.parametrize(("status", "data"), [
    (200, b"{}"), (200, b"[]"), (200, b"no JSON"), (200, b""), (200, b'{"usage": null}'), (200, b'{"usage": {"prompt_tokens": 5}}'),
    (200, b'{"usage": {"prompt_tokens": "5", "completion_tokens": 3}}'), (200, b'{"usage": {"prompt_tokens": true, "completion_tokens": 3}}'),
    (400, b'{"error": {"message": "too long"}}'), (500, b"\xff\xfe"),
])  # fmt: skip
def test_an_answer_that_tells_no_counts_is_quoted(status, data):
    with answering(status, data) as (target, _), pytest.raises(UserError, match="tells no usage: ") as caught:
        plain_counts(target, {"stream": True}, 5)
    assert str(caught.value).endswith(data.decode(errors="replace") or "nothing")


def test_what_proved_who_we_are_is_not_quoted():
    with answering(401, b"no key like topsecret here") as (target, _), pytest.raises(UserError) as caught:
        plain_counts(target, {}, 5, ("topsecret",))
    assert "topsecret" not in str(caught.value)


def test_a_server_that_is_gone_is_named_so():
    with answering(200, b"") as (target, _):
        pass
    with pytest.raises(UserError, match=r"by which tokens are counted .at most 5 s., failed: "):
        plain_counts(target, {}, 5)

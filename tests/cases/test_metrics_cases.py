"""The cases about metrics pages: read from their text, over a socket, and in pairs."""

import os
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pytest_kvcache.core.readings import Readings
from pytest_kvcache.harness import page

from ..harness.pages import in_a_thread
from .catalogue import Close, cases, problems
from .metrics_case import TESTS, engine, figures, page_of, pair, read

PAGES, PAIRS = cases("metrics_page"), cases("metrics_pair")
CLOSE = Close(0.005)


@pytest.mark.parametrize("case", PAGES)
def test_case_page(case):
    assert not problems(case, figures(read(case)), TESTS, CLOSE)


@pytest.mark.parametrize("case", PAIRS)
def test_case_pair(case):
    assert not problems(case, pair(case), TESTS, CLOSE)


@contextmanager
def serving(case):
    """A server whose every answer is that of the case."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(case["http"]["status"])
            for name, value in {**case["http"].get("headers", {}), "content-length": str(len(page_of(case)))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page_of(case))

        def log_message(self, *args):
            pass

    with in_a_thread(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address


@pytest.mark.parametrize("case", PAGES)
def test_case_page_over_a_socket(case):
    with serving(case) as url:
        assert not problems(case, figures(page.read(url, engine(case))), TESTS, CLOSE)


@pytest.mark.skipif("KV_CASES_DIR" in os.environ, reason="the cases of another folder are run, not examined")
@pytest.mark.parametrize("case", PAGES + PAIRS)
def test_a_wrong_answer_is_told_from_a_right_one(case):
    """Every value that the case lists as a fault differs from the product's."""
    found = pair(case) if case["kind"] == "metrics_pair" else figures(read(case))
    for wrong in case.get("wrong_answers", ()):
        one = {"expected": {wrong["field"]: wrong["value"]}}
        assert problems(one, found, TESTS, CLOSE), wrong["cause"]


def test_a_figure_that_does_not_exist_is_none_and_never_0():
    found = figures(Readings(values={}, absent={"kv_usage": "its page has none"}))
    assert {v for k, v in found.items() if k not in ("kv_unavailable_reason", "warnings")} == {None}
    assert found["kv_unavailable_reason"] == "not_exported"
    assert figures(Readings(values={"prefix_queries": 0.0, "prefix_hits": 0.0}))["prefix_hit_rate"] is None


def test_an_error_needs_no_page():
    case = {"files": ["x.json"], "engine": "vllm", "http": {"status": 404}}
    assert figures(read(case))["kv_unavailable_reason"] == "http_404"
    with serving(case) as url:
        assert page.read(url, engine(case)) == read(case)


def test_a_field_or_an_engine_that_is_not_known_fails():
    found = figures(Readings(values={}))
    assert problems({"expected": {"swapped": 0}}, found, TESTS, CLOSE) == ["swapped: this runner does not know the field, it expects 0"]
    with pytest.raises(AssertionError, match="this runner does not know the engine lmdeploy"):
        read({"engine": "lmdeploy", "http": {"status": 200}})

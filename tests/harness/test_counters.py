"""A server's own counters: summed over labels, absent where they are not, and equal to what the client was told."""

import json

import pytest

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.harness import counters
from pytest_kvcache.harness.loadgen import run

from ..mockserver import MockServer

NAMES = {"output": "vllm:generation_tokens_total", "input": "vllm:prompt_tokens_total", "preemptions": "vllm:num_preemptions_total"}


def test_series_are_summed_over_their_labels_and_no_number_is_absent():
    page = (
        '# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 7\n'
        "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total NaN\n"
    )
    assert counters.parse(page, NAMES) == {"output": 12.0}


@pytest.mark.parametrize("page", ["", "<html>no such page</html>", "{}", "\x00\x01"])
def test_a_page_that_is_none_gives_nothing_or_is_refused(page):
    try:
        found = counters.parse(page, NAMES)
    except ValueError:
        found = {}
    assert found == {}


def test_no_page_and_no_names_give_nothing():
    assert counters.read("http://127.0.0.1:9/metrics", NAMES) == {}
    assert counters.read("http://127.0.0.1:9/metrics", {}) == {}
    assert counters.told({}, {"output": 1.0}) == {}


def test_the_mock_servers_counters_are_what_its_answers_add_up_to():
    body = json.dumps({"prompt": "a", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}).encode()
    with MockServer(mode="schedule", ttft=2, tpot=1) as server:
        before = counters.read(server.url + "/metrics", NAMES)
        seen = run(Target(base_url=server.url, endpoint="/v1/completions"), Load(bodies=(body,) * 6, osl=(8,) * 6, concurrency=3))
        after = counters.read(server.url + "/metrics", NAMES)
    found = counters.told(before, after)
    assert found["server_tokens"]["output"] == 48 == sum(r.output_tokens for r in seen.records)
    assert found["server_tokens"]["input"] == sum(r.input_tokens for r in seen.records)
    assert found["counters"] == [before, after]

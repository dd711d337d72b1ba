"""A server's metrics page: asked for, read in common words, and equal to what the client was told."""

import dataclasses
import json

import pytest

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.core.readings import READINGS, Readings, nothing
from pytest_kvcache.frameworks import load, names
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness import page
from pytest_kvcache.harness.loadgen import run

from ..mockserver import MockServer
from .pages import served

ENGINE = dataclasses.replace(VLLM, metrics="/metrics")
NOBODY = "http://127.0.0.1:9"
PAGES = {
    "/good/metrics": b'vllm:num_requests_running{engine="0"} 2\nvllm:generation_tokens_total 5\n', "/empty/metrics": b"",
    "/blank/metrics": b" \n", "/html/metrics": b"<html>no such page</html>", "/bytes/metrics": b"\xff\xfe\x00",
    "/none/metrics": b"vllm:generation_tokens_total NaN\n", "/half/metrics": b"",
}  # fmt: skip


@pytest.fixture(scope="module")
def url():
    with served(PAGES) as address:
        yield address


@pytest.mark.parametrize(("below", "found"), [
    ("/good", (PAGES["/good/metrics"].decode(), "")), ("/empty", ("", "")), ("/bytes", ("\ufffd\ufffd\0", "")), ("/none-such", ("", "http_404")),
    ("/busy", ("", "http_503")), ("/odd", ("", "unreachable")), ("/half", ("", "unreachable")),
])  # fmt: skip
def test_a_page_is_its_text_or_why_there_is_none(url, below, found):
    assert page.fetch(f"{url}{below}/metrics") == found


@pytest.mark.parametrize("address", [NOBODY, "not a URL", "http://127.0.0.1:99999999", "http://[", ""])
def test_an_address_where_nobody_is_or_can_be_is_unreachable(address):
    assert page.fetch(address) == ("", "unreachable")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_no_proxy_is_asked_for_a_server_of_this_machine(url, monkeypatch, name):
    monkeypatch.setenv(name, NOBODY)
    assert page.fetch(f"{url}/good/metrics")[1] == ""


def test_a_page_is_read_in_common_words(url):
    found = page.read(f"{url}/good", ENGINE)
    assert found.values == {"running": 2.0, "output": 5.0}
    assert found.absent["kv_usage"] == "not_exported"
    assert found.absent["kv_used_tokens"] == VLLM.unsupported["kv_used_tokens"]


@pytest.mark.parametrize(("below", "reason"), [
    ("/none-such", "http_404"), ("/busy", "http_503"), ("/odd", "unreachable"), ("/empty", "no_data"), ("/blank", "no_data"),
    ("/none", "no_data"), ("/html", "unreadable"), ("/bytes", "unreadable"),
])  # fmt: skip
def test_a_page_that_is_none_gives_the_reason_and_no_number(url, below, reason):
    found = page.read(f"{url}{below}", ENGINE)
    assert found.values == {} and set(found.absent) == set(READINGS) and found.absent["running"] == reason


def test_a_framework_without_a_page_is_not_asked():
    found = page.read("not a URL", TRANSFORMERS)
    assert found.values == {} and set(found.absent.values()) == {"transformers serve has no metrics page"}


def said(**values):
    return Readings(values=values)


@pytest.mark.parametrize(("before", "after", "found"), [
    (said(), said(), {}),
    (said(), said(output=1.0), {}),
    (said(output=1.0, running=3.0), said(output=4.0, preemptions=2.0, running=1.0),
     {"counters": [{"output": 1.0}, {"output": 4.0, "preemptions": 2.0}], "server_tokens": {"output": 3.0}, "cache": {"running": 1.0}}),
    (said(output=9.0, input=1.0), said(output=4.0, input=2.0),
     {"counters": [{"output": 9.0, "input": 1.0}, {"output": 4.0, "input": 2.0}], "server_tokens": {}}),
    (said(kv_usage=0.5), said(kv_usage=0.75), {"cache": {"kv_usage": 0.75}}),
])  # fmt: skip
def test_two_readings_are_told_as_their_counters_and_the_tokens_between_them(before, after, found):
    assert page.told(before, after) == found


COUNTED = said(output=9.0, input=1.0, preemptions=3.0)


@pytest.mark.parametrize(("before", "after", "lost"), [
    (COUNTED, nothing("unreachable"), "after the load: unreachable"), (COUNTED, nothing("http_503"), "after the load: http_503"),
    (COUNTED, nothing("no_data"), "after the load: no_data"), (COUNTED, Readings(values={"running": 1.0}, absent={"output": "not_exported"}), "after the load: not_exported"),
    (nothing("unreachable"), COUNTED, "before the load: unreachable"), (nothing("unreadable"), COUNTED, "before the load: unreadable"),
    (nothing("no_data"), COUNTED, None), (Readings(values={"running": 1.0}, absent={"output": "not_exported"}), COUNTED, None),
    (nothing("unreachable"), nothing("unreachable"), None), (said(running=1.0), nothing("unreachable"), None), (COUNTED, COUNTED, None),
])  # fmt: skip
def test_counters_that_one_reading_alone_has_are_lost_but_for_those_that_had_counted_nothing_yet(before, after, lost):
    assert page.told(before, after).get("counters_lost") == lost


def test_what_there_is_no_reading_of_is_told_with_the_reason():
    found = page.told(
        said(),
        Readings(values={}, absent={"running": "http_404", "waiting": "http_404", "output": "no_data"}, warnings=("per_process_series",)),
    )
    assert found == {"not_read": "running, waiting: http_404; output: no_data", "page_warnings": "per_process_series"}
    without = page.read("not a URL", TRANSFORMERS)
    assert page.told(without, without) == {"not_read": "all: transformers serve has no metrics page"}


@pytest.mark.parametrize("name", [n for n in names() if n != "openai"])
def test_every_adapter_says_of_every_reading_where_it_is_or_why_there_is_none(name):
    adapter = load(name)
    assert adapter.readings.keys() | adapter.unsupported.keys() == READINGS.keys()
    assert all(" " in why for why in adapter.unsupported.values()), "in a sentence"


def test_the_mock_servers_counters_are_what_its_answers_add_up_to():
    body = json.dumps({"prompt": "a", "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}).encode()
    with MockServer(mode="schedule", ttft=2, tpot=1) as server:
        before = page.read(server.url, ENGINE)
        seen = run(Target(base_url=server.url, endpoint="/v1/completions"), Load(bodies=(body,) * 6, osl=(8,) * 6, concurrency=3))
        after = page.read(server.url, ENGINE)
    found = page.told(before, after)
    assert found["server_tokens"]["output"] == 48 == sum(r.output_tokens for r in seen.records)
    assert found["server_tokens"]["input"] == sum(r.input_tokens for r in seen.records)
    assert [c["output"] for c in found["counters"]] == [before.values["output"], after.values["output"]]

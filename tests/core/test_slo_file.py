"""The file of service levels: as values, its mistakes in one line, its schema, and the ready-made ones."""

import copy
import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.lengths import Empirical, LogNormal, Uniform
from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop
from pytest_kvcache.core.slo_file import parse, read
from pytest_kvcache.core.slo_search import Search
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.files import schema_problem

CHAT = """
[[level]]
name = "chat"
isl = {median = 400, sigma = 0.8, high = 4096}
osl = {low = 50, high = 300}
rate = 4
limits = [
  {metric = "ttft_ms", percentile = 99, limit = 500},
  {metric = "tpot_ms", percentile = 95.0, limit = 50},
  {metric = "error_share", limit = 0.01},
  {metric = "goodput_share", limit = 0.95},
]

[[level]]
name = "most"
isl = {name = "seen", values = [700, 70]}
osl = 16
limits = [{metric = "e2e_ms", percentile = 50, limit = 2500.5}]
search = {low = 0.5, high = 64, start = 8, confirm = 2}
arrivals = "gamma"
burstiness = 0.5

[[level]]
name = "few-users"
isl = 512
osl = 64
concurrency = 8
requests = 48
limits = [{metric = "itl_ms", percentile = 90, limit = 40}]
"""
READY = sorted(
    (p.name.removesuffix(".toml"), p.read_text())
    for p in resources.files("pytest_kvcache").joinpath("slo").iterdir()
    if p.name.endswith(".toml")
)


def test_a_file_as_values():
    chat, most, few = read(CHAT, "slo.toml")
    assert (chat.isl, chat.osl) == (LogNormal(median=400, sigma=0.8, high=4096), Uniform(low=50, high=300))
    assert [str(limit) for limit in chat.limits] == [
        "P99 ttft_ms <= 500",
        "P95 tpot_ms <= 50",
        "error_share <= 0.01",
        "goodput_share >= 0.95",
    ]
    assert chat.scenario() == OpenLoop(isl=chat.isl, osl=chat.osl, rate=4, requests=662), "as many as a P99 needs"
    assert chat.per_request == {"ttft_ms": 500, "tpot_ms": 50}
    assert most.search == Search(low=0.5, high=64, start=8, confirm=2) and most.isl == Empirical(name="seen", values=(70, 700))
    assert most.scenario(2.0) == OpenLoop(isl=most.isl, osl=16, rate=2.0, arrivals="gamma", burstiness=0.5)
    assert most.scenario(2.0).n_requests == 60, "the scenario's own number, where it is enough"
    assert few.scenario() == ClosedLoop(isl=512, osl=64, concurrency=8, requests=48) and few.needed == 64
    assert not schema_problem(tomllib.loads(CHAT), "slo")


MISTAKES = [
    ("", "the file has no level: add level = a table [[level]] @ $"),
    ("level = 3", "3 is no list of levels @ $.level"),
    ("[level]\nname = 'x'", "{'name': 'x'} is no list of levels @ $.level"),
    ("levels = []", "the file has no key 'levels': did you mean 'level'? @ $"),
    ("[[level]]\nname = 'x'", "a level has no limits: add limits = [{metric = \"ttft_ms\", percentile = 99, limit = 500}] @ $.level[0]"),
    (CHAT.replace("percentile = 99", "percentil = 99"), "a limit has no key 'percentil': did you mean 'percentile'? @ $.level[0].limits[0]"),
    (CHAT.replace("rate = 4", "qps = 4"), "a level has no key 'qps': its keys are name, limits, isl, osl, rate, concurrency, search, arrivals, burstiness, requests @ $.level[0]"),
    (CHAT.replace("rate = 4", ""), "one load is needed: rate (requests a second), concurrency (clients), or search (bounds of a rate) @ $.level[0]"),
    (CHAT.replace("rate = 4", "rate = 4\nconcurrency = 2"), "one load is needed: rate (requests a second), concurrency (clients), or search (bounds of a rate) @ $.level[0]"),
    (CHAT.replace("rate = 4", "rate = '4'"), "'4' is no number @ $.level[0].rate"),
    (CHAT.replace("rate = 4", "rate = inf"), "inf is no finite number @ $.level[0].rate"),
    (CHAT.replace("rate = 4", "rate = -1"), "OpenLoop: rate=-1 must be requests a second above 0 @ $.level[0]"),
    (CHAT.replace("limit = 500", "limit = nan"), "nan is no finite number @ $.level[0].limits[0].limit"),
    (CHAT.replace("limit = 500", "limit = true"), "True is no number @ $.level[0].limits[0].limit"),
    (CHAT.replace("limit = 500", "limit = 0"), "ttft_ms: limit=0 must be milliseconds above 0 @ $.level[0].limits[0]"),
    (CHAT.replace("percentile = 99,", ""), "ttft_ms: percentile=None must lie above 0 and be 99.999 at most: write percentile = 99 @ $.level[0].limits[0]"),
    (CHAT.replace("percentile = 99,", "percentile = 100,"), "ttft_ms: percentile=100 must lie above 0 and be 99.999 at most: write percentile = 99 @ $.level[0].limits[0]"),
    (CHAT.replace('"error_share", ', '"error_share", percentile = 99, '), "error_share is one share of all requests and has no percentile: take that away @ $.level[0].limits[2]"),
    (CHAT.replace("limit = 0.95", "limit = 95"), "goodput_share: limit=95 must be a share of all requests (at least 95 %: limit = 0.95) @ $.level[0].limits[3]"),
    (CHAT.replace('"ttft_ms"', '"ttft"'), "metric 'ttft' is none of ttft_ms, tpot_ms, itl_ms, e2e_ms, error_share, goodput_share @ $.level[0].limits[0]"),
    (CHAT.replace("tpot_ms", "ttft_ms").replace("95.0", "99"), "two limits are of one kind, P99 ttft_ms <= 500 and P99 ttft_ms <= 50: keep one @ $.level[0]"),
    (CHAT.replace("median", "mean"), "a log-normal length has no key 'mean': did you mean 'median'? @ $.level[0].isl"),
    (CHAT.replace("isl = 512", "isl = 'short'"), "'short' is no length: write a whole number of tokens, or {low, high}, {median, sigma, high} or {name, values} @ $.level[2].isl"),
    (CHAT.replace("isl = 512", "isl = {}"), "a length ({low, high}, {median, sigma, high} or {name, values}) has no low: add low = 1 @ $.level[2].isl"),
    (CHAT.replace("isl = 512", "isl = 0"), "0 is no whole number of at least 1 @ $.level[2].isl"),
    (CHAT.replace("low = 50", "low = 500"), "Uniform: Uniform(low=500, high=300): tokens are whole numbers of at least 1, low before high @ $.level[0].osl"),
    (CHAT.replace("values = [700, 70]", "values = []"), "[] is no list of lengths @ $.level[1].isl.values"),
    (CHAT.replace("start = 8", "start = 80"), "search: start=80 must lie from low=0.5 to high=64 @ $.level[1].search"),
    (CHAT.replace("confirm", "confirmed"), "a search has no key 'confirmed': did you mean 'confirm'? @ $.level[1].search"),
    (CHAT.replace("burstiness = 0.5", "requests = 10"), "requests=10 state nothing of any rate, the limits need 11: raise requests @ $.level[1]"),
    (CHAT.replace("requests = 48", "requests = 4"), "ClosedLoop: requests=4 leaves some of 8 clients idle @ $.level[2]"),
    (CHAT.replace("concurrency = 8", "concurrency = 8\narrivals = 'gamma'"), "the clients of a concurrency do not arrive: take arrivals and burstiness away @ $.level[2]"),
    (CHAT.replace('"few-users"', '"few users"'), "name='few users' may hold letters, digits, '_', '.' and '-' only; it is part of every key @ $.level[2]"),
    (CHAT.replace('"most"', '"chat"'), "a second level is called 'chat': name it otherwise @ $.level[1].name"),
    (CHAT.replace("osl = 64", "osl = 1"), "an answer of one token has no itl_ms: raise osl or take that limit away @ $.level[2]"),
    (CHAT.replace("limits = [{metric = \"itl_ms\", percentile = 90, limit = 40}]", "limits = [{metric = 'goodput_share', limit = 0.9}]"),
     "goodput_share counts the requests within the latency limits and there is none: add one, or limit error_share @ $.level[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line_that_says_where_what_and_what_to_type(text, message):
    with pytest.raises(UserError) as e:
        read(text, "my/slo.toml")
    assert str(e.value) == f"my/slo.toml: {message}"


@pytest.mark.parametrize("text", ["level = [", "a = 1\na = 2", "x = " + "[" * 5000, "x = " + "9" * 5000, "\x00"], ids=range(5))
def test_what_is_no_toml_is_one_line_too(text):
    with pytest.raises(UserError, match=r"\As.toml: not valid TOML: .*; mend that line\Z"):
        read(text, "s.toml")


def test_a_bom_is_harmless_and_names_are_shown_as_they_are():
    assert read("\ufeff" + CHAT, "s")[0].name == "chat"
    with pytest.raises(UserError, match=r"has no key 'a\\nb': its keys are level @ \$\Z"):
        read('"a\\nb" = 1', "s")


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


PLACES = sorted(filter(None, places(tomllib.loads(CHAT))), key=str)
ODD = ["gone", "more", True, "", [], {}, -1, 0, 1, 10**13, 0.5, 1e6, "poisson", "ttft_ms", {"low": 1, "high": 2}]
# What compares values that stand apart, which a schema cannot; and 1.0, which it takes for a whole number.
COMPARED = (
    "low",
    "one kind",
    "the limits need",
    "idle",
    "arrivals",
    "second level",
    "one token",
    "gamma",
    "goodput_share counts",
    "whole number",
)


@given(st.sampled_from(PLACES), st.one_of(st.sampled_from(ODD), st.integers(), st.floats(-1e300, 1e300)))
def test_the_schema_accepts_what_is_read_and_what_only_it_accepts_compares_two_values(place, value):
    doc = holder = copy.deepcopy(tomllib.loads(CHAT))
    for key in place[:-1]:
        holder = holder[key]
    if value == "gone":
        del holder[place[-1]]
    elif value == "more" and isinstance(holder[place[-1]], dict):
        holder[place[-1]]["more"] = 1
    else:
        holder[place[-1]] = value
    said = ""
    try:
        parse(doc, "s")
    except UserError as e:
        said = str(e)
    problem = schema_problem(doc, "slo")
    assert (said and " @ $" in said and len(said.splitlines()) == 1) or not problem, problem
    assert problem or not said or any(words in said for words in COMPARED), said


# -- ready-made files ---------------------------------------------------------------------------------------------------

MLPERF = {  # TTFT, TPOT, whole answer in ms at P99: ../shared/data/published_latency.json, mlperf_limits
    "llama2-70b-server": (2000, 200, None), "llama2-70b-interactive": (450, 40, None), "mixtral-8x7b-server": (2000, 200, None),
    "llama3.1-405b-server": (6000, 175, None), "llama3.1-405b-interactive": (4500, 80, None), "llama3.1-8b-server": (2000, 100, None),
    "llama3.1-8b-interactive": (500, 30, None), "deepseek-r1-server": (2000, 80, None), "deepseek-r1-interactive": (1500, 15, None),
    "gpt-oss-120b-server": (3000, 80, None), "gpt-oss-120b-interactive": (2000, 15, None), "gptj-server": (None, None, 20000),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), READY, ids=[name for name, _ in READY])
def test_a_ready_made_file_is_valid_and_has_the_published_limits(name, text):
    assert not schema_problem(tomllib.loads(text), "slo")
    (level,) = read(text, name)
    assert level.name == name and level.needed == 662 and level.search.low < level.search.high
    assert {limit.percentile for limit in level.limits} == {99}
    found = tuple(level.per_request.get(m) for m in ("ttft_ms", "tpot_ms", "e2e_ms"))
    assert found == MLPERF[name.removeprefix("mlperf-")]
    assert "mlcommons/inference, loadgen/mlperf.conf (last change b0662794, 2026-07-02)" in text and "Not an MLPerf result" in text


def test_every_published_limit_has_its_file():
    assert {name for name, _ in READY} == {f"mlperf-{name}" for name in MLPERF}

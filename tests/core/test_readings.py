"""A metrics page in common words: copies, engines, names old and new, pages that are none, and never a 0 for what is not there."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.readings import PER_PROCESS, READINGS, TOTALS, Readings, Series, grown, nothing, parsed, readings
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import TENSORRT_LLM
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.vllm import VLLM

ADAPTERS = (VLLM, SGLANG, TGI, TENSORRT_LLM)


def read(page, framework=VLLM):
    return readings(page, framework.readings, framework.unsupported)


def values(*lines, **places):
    """The readings of a page of these lines; each place is one series or several."""
    found = {name: place if isinstance(place, tuple) else (place,) for name, place in places.items()}
    return readings("".join(f"{line}\n" for line in lines), found).values


# --- one page, one table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "found"), [
    (['vllm:kv_cache_usage_perc{engine="0"} 0.25'], {"kv_usage": 0.25}),
    (["vllm:gpu_cache_usage_perc 0.5", "vllm:cpu_cache_usage_perc 0.9"], {"kv_usage": 0.5}),
    # Old and new names side by side are one number.
    (["vllm:gpu_cache_usage_perc 0.5", "vllm:kv_cache_usage_perc 0.4"], {"kv_usage": 0.4}),
    (["vllm:prefix_cache_queries_total 10", "vllm:gpu_prefix_cache_queries_total 10", "vllm:prefix_cache_hits_total 4",
      "vllm:gpu_prefix_cache_hits_total 4"], {"prefix_queries": 10, "prefix_hits": 4}),
    # Engines: counts are added, shares averaged, the fullest told.
    (['vllm:kv_cache_usage_perc{engine="0"} 0.4', 'vllm:kv_cache_usage_perc{engine="1"} 0.6', 'vllm:num_requests_running{engine="0"} 3',
      'vllm:num_requests_running{engine="1"} 5'], {"kv_usage": 0.5, "kv_usage_max": 0.6, "running": 8}),
    # Processes of one engine: of a gauge the largest, of a counter the sum.
    (['vllm:num_requests_waiting{pid="1"} 0', 'vllm:num_requests_waiting{pid="2"} 3', 'vllm:num_preemptions_total{pid="1"} 2',
      'vllm:num_preemptions_total{pid="2"} 3'], {"waiting": 3, "preemptions": 5}),
    # Series of one engine by reason or model add up.
    (['vllm:generation_tokens_total{model_name="a"} 5', 'vllm:generation_tokens_total{model_name="b"} 7'], {"output": 12}),
    # ... shares do not.
    (['vllm:kv_cache_usage_perc{model_name="a"} 0.4', 'vllm:kv_cache_usage_perc{model_name="b"} 0.2'], {"kv_usage": 0.4}),
    (["# TYPE vllm:num_preemptions counter", "vllm:num_preemptions_total 3", "vllm:num_preemptions_created 1.7e9"], {"preemptions": 3}),
    (["# TYPE vllm:num_preemptions_total counter", "vllm:num_preemptions_created 1.7e9"], {}),
    (["vllm:num_requests_running NaN", "vllm:num_requests_waiting +Inf", "vllm:kv_cache_usage_perc -Inf"], {}),
    (["vllm:num_requests_running 0"], {"running": 0}),
    (["vllm:kv_cache_usage_perc -1"], {"kv_usage": -1}),
    # Labels that are numbers.
    (['vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1'], {"kv_capacity_tokens": 1600}),
    (['vllm:cache_config_info{block_size="16",kv_cache_size_tokens="900",num_gpu_blocks="100"} 1'], {"kv_capacity_tokens": 900}),
    (['vllm:cache_config_info{block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="100"} 1'], {"kv_capacity_tokens": 1600}),
    (['vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1'], {}),
    (['vllm:cache_config_info{block_size="nan",num_gpu_blocks="inf"} 1'], {}),
    (['vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="9"} 1', 'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="9"} 1'],
     {"kv_capacity_tokens": 288}),
    # `where`: of one series the two directions.
    (['vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_CPU"} 9', 'vllm:kv_offload_total_bytes_total{transfer_type="CPU_to_GPU"} 4'],
     {"offload_stored_bytes": 9, "offload_loaded_bytes": 4}),
    (['vllm:kv_offload_total_bytes_total{transfer_type="GPU_to_DISK"} 9'], {}),
    # What does not fit into a number is none.
    (['vllm:num_requests_running{engine="0"} 1e308', 'vllm:num_requests_running{engine="1"} 1e308'], {}),
    (['vllm:generation_tokens_total{a="0"} 1e308', 'vllm:generation_tokens_total{a="1"} 1e308'], {}),
    (['vllm:cache_config_info{block_size="1e300",num_gpu_blocks="1e300"} 1'], {}),
    ([], {}),
])  # fmt: skip
def test_a_page_of_vllm(lines, found):
    said = read("".join(f"{line}\n" for line in lines))
    assert said.values == pytest.approx(found)
    assert {name.removesuffix("_max") for name in said.values} | set(said.absent) == set(READINGS)
    assert not set(said.values) & set(said.absent)


@pytest.mark.parametrize("framework", ADAPTERS, ids=lambda f: f.name)
def test_every_place_of_an_adapter_is_found_by_itself_and_the_first_wins(framework):
    for name, places in framework.readings.items():
        for at, place in enumerate(places):
            label = {**dict(place.where), **dict.fromkeys(place.labels, "2")}
            labels = ",".join(f'{k}="{v}"' for k, v in label.items())
            others = "".join(f"{other} 2\n" for other in (place.plus, place.times, place.over) if other)
            text = f"{place.name}{{{labels}}} 2\n{others}" if "." not in place.name else as_json(place)
            assert read(text, framework).values[name] > 0, (name, at)


def as_json(place):
    """A page of TensorRT-LLM that has everything a place asks for."""
    document = {}
    for path in filter(None, (place.name, place.plus, place.times, place.over)):
        *above, last = path.split(".")
        inner = document
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = 2
    return json.dumps([document])


@pytest.mark.parametrize(("page", "reason"), [("", "no_data"), (" \n", "no_data"), ("[]", "no_data"), ("{}", "no_data"), ("# only a comment\n", "no_data"),
                                              ("vllm:kv_cache_usage_perc NaN\n", "no_data"), ("other 1\n", "not_exported"), ('{"a": 1}', "not_exported")])  # fmt: skip
def test_what_is_not_there_is_absent_with_the_reason(page, reason):
    found = read(page)
    assert found.values == {}
    assert found.absent == dict.fromkeys(READINGS, reason) | VLLM.unsupported


def test_a_place_that_nobody_named_has_the_frameworks_own_reason():
    found = readings("x 1\n", {"running": (Series(name="x"),)}, {"waiting": "it has no queue"})
    assert found.values == {"running": 1} and found.absent["waiting"] == "it has no queue" and found.absent["output"] == "not_exported"


def test_nothing_is_every_reading_absent_for_one_reason():
    assert nothing("http_404") == Readings(values={}, absent=dict.fromkeys(READINGS, "http_404"))


@pytest.mark.parametrize(("line", "warned"), [
    ('vllm:num_requests_running{pid="1"} 1', True), ('vllm:num_requests_running{engine="1"} 1', False), ('python_info{pid="1"} 1', False),
    ('vllm:num_requests_running{pid="1"} NaN', False),
])  # fmt: skip
def test_series_by_process_are_warned_of_where_they_are_ours(line, warned):
    assert read(line + "\n").warnings == ((PER_PROCESS,) if warned else ())


# --- arithmetic of places -----------------------------------------------------------------------------------------------------

SUM = Series(name="a", plus="b", times="c", over="d")


@pytest.mark.parametrize(("lines", "found"), [
    (["a 1", "b 2", "c 10", "d 4"], {"running": 7.5}),
    (["a 1", "b 2", "c 10"], {}), (["a 1", "b 2", "d 4"], {}), (["a 1", "c 10", "d 4"], {}), (["b 2", "c 10", "d 4"], {}),
    (["a 1", "b 2", "c 10", "d 0"], {}), (["a 1", "b 2", "c NaN", "d 4"], {}), (["a 1", "b 2", "c 1e308", "d 1e-308"], {}),
    (["a 0", "b 0", "c 10", "d 4"], {"running": 0}),
    # By engine, and only where all of them have all of it.
    (['a{engine="0"} 1', 'b{engine="0"} 1', 'c{engine="0"} 3', 'd{engine="0"} 1', 'a{engine="1"} 1', 'b{engine="1"} 0', 'c{engine="1"} 1', 'd{engine="1"} 1'],
     {"running": 7}),
    (['a{engine="0"} 1', 'b{engine="0"} 1', 'c{engine="0"} 3', 'd{engine="0"} 1', 'a{engine="1"} 1'], {}),
    (['a{engine="0"} 1', "b 2", "c 10", "d 4"], {}),
])  # fmt: skip
def test_a_sum_a_product_and_a_quotient_or_nothing(lines, found):
    assert values(*lines, running=SUM) == found


def test_a_place_that_lacks_something_gives_way_to_the_next_one():
    assert values("a 1", "z 9", running=(SUM, Series(name="z"))) == {"running": 9}


def test_only_samples_with_the_labels_of_where_count():
    place = Series(name="x", where=(("unit", "bytes"), ("way", "in")))
    lines = (
        'x{unit="bytes",way="in",at="1"} 1',
        'x{unit="bytes",way="in",at="2"} 2',
        'x{unit="blocks",way="in"} 4',
        'x{unit="bytes"} 8',
        "x 16",
    )
    assert values(*lines, output=place) == {"output": 3}


# --- JSON ---------------------------------------------------------------------------------------------------------------------

STATS = {"usedNumBlocks": 30, "maxNumBlocks": 120, "tokensPerBlock": 32, "reusedBlocks": 5, "missedBlocks": 15}
LAST = {"iter": 9, "numActiveRequests": 4, "numQueuedRequests": 1, "kvCacheStats": STATS}
FOUND = {
    "kv_usage": 0.25,
    "kv_used_tokens": 960,
    "kv_capacity_tokens": 3840,
    "running": 4,
    "waiting": 1,
    "prefix_queries": 640,
    "prefix_hits": 160,
}


@pytest.mark.parametrize(("document", "found"), [
    ([LAST], FOUND), (LAST, FOUND), ([{"numActiveRequests": 99}, LAST], FOUND), ([LAST, {}], {}), ([LAST, None], {}), ([[LAST]], {}),
    ([LAST | {"kvCacheStats": STATS | {"maxNumBlocks": 0}}], {k: v for k, v in FOUND.items() if k != "kv_usage"} | {"kv_capacity_tokens": 0}),
    ([{"kvCacheStats": STATS | {"usedNumBlocks": "30"}}], {k: v for k, v in FOUND.items() if k in ("kv_capacity_tokens", "prefix_queries", "prefix_hits")}),
    ([{"numActiveRequests": True, "numQueuedRequests": "7"}], {}), ([{"numActiveRequests": None, "numQueuedRequests": [1]}], {}),
    ([{"numActiveRequests": math.nan, "numQueuedRequests": math.inf}], {}), ([{"numActiveRequests": 2**70}], {"running": 2.0**70}),
    ([{"kvCacheStats": {"usedNumBlocks": 1e308, "maxNumBlocks": 1e-300, "tokensPerBlock": 64}}], {"kv_capacity_tokens": 6.4e-299}),
    ([{"a": {"b": {"numActiveRequests": 3}}}], {}),
])  # fmt: skip
def test_a_page_of_tensorrt_llm(document, found):
    assert read(json.dumps(document), TENSORRT_LLM).values == pytest.approx(found)


@pytest.mark.parametrize("page", [
    "<html>no such page</html>", "a b c\n", "\x00\x01", "null", '"x"', "[", '{"a": 1', "[1] [2]", "\ufeff[]", "[" * 100_000, '{"a":' * 100_000,
    "[1" + "0" * 400 + "]", "[1" + "0" * 5000 + "]", '{"detail": "Not Found"} x',
], ids=lambda page: page[:12])  # fmt: skip
def test_a_page_that_is_none_is_a_value_error(page):
    with pytest.raises(ValueError):
        parsed(page)


# --- whatever a page says -----------------------------------------------------------------------------------------------------

GAUGES = {"kv_usage": "vllm:kv_cache_usage_perc", "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}
NAMES = sorted({place.name for places in VLLM.readings.values() for place in places})
numbers = st.floats(0, 1e12) | st.integers(0, 10**9)
labels = st.fixed_dictionaries({}, optional={
    "engine": st.sampled_from("012"), "pid": st.sampled_from("78"), "tp_rank": st.sampled_from("01"), "model_name": st.sampled_from("ab"),
    "block_size": st.sampled_from(["16", "None"]), "num_gpu_blocks": st.sampled_from(["7", "nan"]), "transfer_type": st.sampled_from(["GPU_to_CPU", "x"]),
})  # fmt: skip
samples = st.tuples(st.sampled_from(NAMES), labels, numbers | st.sampled_from(["NaN", "+Inf", "-Inf"]))


def line(name, labels, value):
    inner = ",".join(f'{k}="{v}"' for k, v in labels.items())
    return f"{name}{{{inner}}} {value}"


@given(st.lists(samples, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_the_lines_does_not_matter(drawn, random):
    lines = [line(*sample) for sample in drawn]
    mixed = random.sample(lines, len(lines))
    assert read("\n".join(lines)) == read("\n".join(mixed))


@pytest.mark.parametrize("label", ["engine", "model_name"])
def test_the_order_of_the_lines_does_not_matter_to_the_last_digit(label):
    lines = [line("vllm:generation_tokens_total", {label: str(i)}, value) for i, value in enumerate((0.1, 0.2, 0.3))]
    assert len({read("\n".join(mixed)).values["output"] for mixed in itertools.permutations(lines)}) == 1


@given(st.lists(samples, max_size=12))
def test_every_reading_is_finite_or_absent_and_never_0_for_what_is_not_there(drawn):
    found = read("\n".join(line(*sample) for sample in drawn))
    assert all(map(math.isfinite, found.values.values()))
    assert {name.removesuffix("_max") for name in found.values} ^ set(found.absent) == set(READINGS)
    there = {name for name, _, value in drawn if not isinstance(value, str)}
    assert {name for name in READINGS if name in found.values} <= {
        name for name, places in VLLM.readings.items() if there & {place.name for place in places}
    }


@given(st.sampled_from(sorted(GAUGES)), numbers, st.lists(st.tuples(st.sampled_from(["pid", "tp_rank"]), st.integers(0, 99)), max_size=5))
def test_copies_by_process_and_rank_do_not_change_a_gauge(name, value, copies):
    """Each shows the number or, when it has seen no update, 0."""
    one = [line(GAUGES[name], {"engine": "0"}, value)]
    more = [line(GAUGES[name], {"engine": "0", label: str(n)}, value if n % 2 else 0) for label, n in copies]
    assert read("\n".join(one + more)).values == read(one[0]).values


@given(st.sampled_from(["tp_rank", "pp_rank", "rank"]), numbers, st.integers(1, 8))
def test_copies_by_rank_do_not_change_a_counter(label, value, ranks):
    lines = [line("vllm:generation_tokens_total", {label: str(n)}, value) for n in range(ranks)]
    assert read("\n".join(lines)).values == {"output": value}


@given(st.sampled_from(["engine", "dp_rank"]), st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_engines_add_up_and_their_shares_are_averaged(label, each):
    lines = [line(name, {label: str(i)}, value) for i, value in enumerate(each) for name in (GAUGES["running"], GAUGES["kv_usage"])]
    found = read("\n".join(lines)).values
    assert found["running"] == sum(each) and found["kv_usage"] == pytest.approx(sum(each) / len(each))
    assert found.get("kv_usage_max") == (max(each) if len(each) > 1 else None)


@given(st.dictionaries(st.sampled_from([n for n in NAMES if n.endswith("_total")]), st.integers(0, 9)), st.floats(1e9, 2e9))
def test_time_stamps_of_counters_never_count(counts, created):
    lines = [f"{name} {value}" for name, value in counts.items()]
    stamps = [f"{name.removesuffix('_total')}_created {created}" for name in NAMES if name.endswith("_total")]
    assert read("\n".join(lines + stamps)).values == read("\n".join(lines)).values


@given(st.sampled_from([("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "kv_usage"),
                        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "prefix_hits")]), numbers, numbers)  # fmt: skip
def test_old_and_new_names_side_by_side_are_not_summed(names, new, old):
    today, before, name = names
    assert read(f"{before} {old}\n{today} {new}\n").values == {name: new}


WORDS = st.sampled_from([
    *NAMES, "{", "}", '"', ",", "=", 'engine="0"', 'pid="1"', "NaN", "+Inf", "1e999", "1e308", "-1", "1", "\n", "\r", " ", "\t", "# TYPE ", "# HELP ",
    "counter", "gauge", "histogram", "\\", "[", "]", "# EOF", "\x00", "\ud800", 'block_size="16"', 'num_gpu_blocks="1e308"', "<html>",
])  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**400), 10**400) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["kvCacheStats", "usedNumBlocks", "maxNumBlocks", "tokensPerBlock"]), inner),
    max_leaves=12,
)


@given(st.lists(WORDS, max_size=14).map("".join) | st.text(max_size=60) | json_values.map(json.dumps), st.sampled_from(ADAPTERS))
def test_whatever_a_page_is_it_gives_finite_numbers_or_a_value_error(page, framework):
    try:
        found = read(page, framework)
    except ValueError:
        return
    assert all(map(math.isfinite, found.values.values()))
    assert not set(found.values) & set(found.absent)


# --- between two readings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after", "deltas", "why"), [
    ({"output": 5, "input": 1}, {"output": 7, "input": 1}, {"output": 2, "input": 0}, {}),
    ({"output": 5}, {"output": 7, "input": 1}, {"output": 2}, {"input": "not_exported"}),
    ({}, {}, {}, {"output": "not_exported", "input": "not_exported"}),
    ({"output": 5, "input": 1}, {"output": 4, "input": 9}, {}, {"output": "counter_reset", "input": "counter_reset"}),
    ({"output": 5}, {"output": 4, "input": 9}, {}, {"output": "counter_reset", "input": "not_exported"}),
])  # fmt: skip
def test_what_counters_grew_by_and_why_there_is_no_difference(before, after, deltas, why):
    assert grown(before, after, ("output", "input")) == (deltas, why)
    assert grown(before, after, iter(("output", "input"))) == (deltas, why), "names may come once"


counters = st.dictionaries(st.sampled_from(TOTALS), st.integers(0, 100))


@given(counters, counters)
def test_a_difference_is_never_negative_and_every_counter_has_one_or_a_reason(before, after):
    deltas, why = grown(before, after)
    assert all(d >= 0 for d in deltas.values())
    assert set(deltas) ^ set(why) == set(TOTALS) and not set(deltas) & set(why)

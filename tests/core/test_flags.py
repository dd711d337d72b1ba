"""How a framework is told what an arm asks for: every setting is told or refused, by its version."""

import dataclasses
import itertools

import pytest

from pytest_kvcache.core.flags import before, beyond, told, unsupported, versions_of, words
from pytest_kvcache.core.framework import Flag, Framework, Launch
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Arm, UserError
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import TENSORRT_LLM
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM

ADAPTERS = (VLLM, SGLANG, TENSORRT_LLM, TGI, TRANSFORMERS, LLAMA_CPP)
SETTINGS = {
    "kv_dtype": "fp8", "weight_dtype": "float16", "quantization": "awq", "block_size": 32, "kv_gib": 2.0, "max_requests": 7,
    "max_batched_tokens": 512, "prefix_cache": False, "chunked_prefill": False, "context": 4096, "cpu_offload_gib": 3.0,
    "disk_offload_gib": 5.0,
}  # fmt: skip
VERSIONS = ("", "0.1", "0.9.0", "0.11.1", "0.25.1+cu130", "1.0", "1.2.0rc4", "3.3.6", "99", "dev")


def flags(**rows):
    return {name: tuple(Flag(words=lambda v, name=name, i=i: [f"--{name}-{i}", str(v)], since=since, until=until)
                        for i, (since, until) in enumerate(each)) for name, each in rows.items()}  # fmt: skip


def framework(**more):
    return Framework(**{"name": "f", "argv": lambda launch: [], "body": lambda *_: {}, "needs": (), "cure": ""} | more)


def everything_said(adapter, arm, version, device):
    launch = Launch(python="py", model="m", port=1, device=device, arm=arm, version=version, folder="/run/x")
    try:
        return adapter.argv(launch), adapter.environ(launch), adapter.files(launch)
    except UserError as e:  # not on this device
        return str(e)


def test_the_table_has_every_setting_of_an_arm():
    assert set(SETTINGS) == set(Arm(**SETTINGS).asked()) == {f.name for f in dataclasses.fields(Arm)} - {"name", "build", "memory_share"}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_every_setting_is_told_or_refused(adapter, name):
    """Told is what changes the command line, the variables or the files; a silent one would be measured under its name."""
    arm = Arm(**{name: SETTINGS[name]})
    for version in VERSIONS:
        if refused := unsupported(adapter, arm, version):
            assert adapter.name in refused and name in refused
            continue
        assert len(told(adapter.name, adapter.flags, arm, version, {})) == 1
        for device in ("gpu", "cpu"):
            said = everything_said(adapter, arm, version, device)
            assert said != everything_said(adapter, Arm(), version, device), (version, device)
            assert not isinstance(said, str) or (adapter.name in said and name in said)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_what_a_version_cannot_be_told_is_not_told(adapter):
    for name, value in SETTINGS.items():
        rows = adapter.flags.get(name, ())
        if not rows or rows[-1].since:
            with pytest.raises(UserError, match=f"arm base: {adapter.name} 0.0.1 cannot be told {name}="):
                told(adapter.name, adapter.flags, Arm(**{name: value}), "0.0.1", {})


@pytest.mark.parametrize(("name", "value"), [("kv_dtype", "float3"), ("weight_dtype", "float3"), ("kv_dtype", "FP8")])
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_a_precision_that_a_framework_has_not_is_refused_with_those_it_has(adapter, name, value):
    refused = unsupported(adapter, Arm(**{name: value}))
    assert refused == f"{adapter.name} has no {name} {value!r}; it has {', '.join(getattr(adapter, name + 's'))}"


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_every_precision_of_a_framework_is_told_in_its_own_word(adapter):
    for name in ("kv_dtype", "weight_dtype"):
        table = getattr(adapter, name + "s")
        for value in set(table) - {"auto"}:
            (said,) = told(adapter.name, adapter.flags, Arm(**{name: value}), "", {name: table})
            assert table[value] in said[-1]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_the_rows_of_a_setting_do_not_overlap_and_todays_is_the_first(adapter):
    for rows in adapter.flags.values():
        assert not rows[0].until
        for newer, older in itertools.pairwise(rows):
            assert newer.since == older.until != ""


ROWS = flags(x=[("1.0", ""), ("0.5", "1.0"), ("0.2", "0.4")])


@pytest.mark.parametrize(("version", "row"), [
    ("", 0), ("1.0", 0), ("2", 0), ("1.0.0", 0), ("0.9.9", 1), ("0.5", 1), ("0.4.9", None), ("0.4", None), ("0.3", 2), ("0.2", 2), ("0.1", None),
    ("1.0rc1", 0), ("0.9.9+cu130", 1), ("0.32.0@9f3c", 1), ("v0.7", 1), ("1.0.dev3+g12", 0), ("dev", 0), ("main-abc", 0), ("@", 0), ("0.10", 1),
])  # fmt: skip
def test_the_row_of_a_version(version, row):
    arm = dataclasses.make_dataclass("Asked", [("name", str), ("asked", object)])("a", lambda: {"x": 1})
    if row is None:
        with pytest.raises(
            UserError, match=f"arm a: f {version} cannot be told x=1; versions from 1.0 on or from 0.5 on and before 1.0 or"
        ):
            words("f", ROWS, arm, version, {})
    else:
        assert words("f", ROWS, arm, version, {}) == [f"--x-{row}", "1"]


@pytest.mark.parametrize(("version", "other", "older"), [
    ("0.25.1+cu130", "0.25.1", False), ("0.25.1+cu130", "0.25.2", True), ("1.2.0rc4", "1.2", False), ("1.2.0rc4", "1.2.1", True),
    ("0.32.0@9f3c", "0.32", False), ("0.32.0@9f3c", "0.32.1", True), ("0.9", "0.11", True), ("0.11", "0.9", False), ("dev", "0.1", False),
    ("", "0.1", False), ("0.5.post1", "0.5", False), ("0.5", "what", False), ("1!0.1", "9", False),
])  # fmt: skip
def test_a_version_is_older_than_another_one(version, other, older):
    assert before(version, other) == older


@pytest.mark.parametrize(("adapter", "versions"), [
    (VLLM, {"--kv-cache-memory-bytes": "is there from 0.11.1 on", "--kv-offloading-size": "is there from 0.11.1 on"}),
    (SGLANG, {"--page-size": "is there from 0.4.5 on", "--hicache-size": "is there from 0.4.6 on"}),
    (TENSORRT_LLM, {"kv_cache_config.tokens_per_block": "is there from 1.1 on", "kv_cache_dtype": "is there before 1.0"}),
    (TGI, {"--kv-cache-dtype": "is there from 2.4 on"}),
])  # fmt: skip
def test_an_argument_that_not_every_version_has_is_known_with_those_that_have_it(adapter, versions):
    assert versions.items() <= versions_of(adapter.flags).items()


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_no_argument_is_told_of_that_every_version_has(adapter):
    rows = [r for each in adapter.flags.values() for r in each]
    assert bool(versions_of(adapter.flags)) == any(r.since or r.until for r in rows if r.words(1))


@pytest.mark.parametrize(("adapter", "asked", "version", "words"), [
    (VLLM, {"kv_gib": 2.0}, "0.11.0", "vllm 0.11.0 cannot be told kv_gib=2.0; versions from 0.11.1 on can"),
    (VLLM, {"disk_offload_gib": 2.0}, "0.32.0", "vllm 0.32.0 cannot be told disk_offload_gib=2.0"),
    (TGI, {"kv_dtype": "fp8"}, "2.3", "tgi 2.3 cannot be told kv_dtype='fp8'; versions from 2.4 on can"),
    (TGI, {"block_size": 16}, "3.0", "tgi 3.0 cannot be told block_size=16"),
    (SGLANG, {"kv_gib": 2.0}, "", "sglang cannot be told kv_gib=2.0"),
    (TRANSFORMERS, {"prefix_cache": False}, "", "transformers cannot be told prefix_cache=False"),
])  # fmt: skip
def test_a_refusal_names_the_version_that_can(adapter, asked, version, words):
    assert unsupported(adapter, Arm(**asked), version) == words


@pytest.mark.parametrize(("adapter", "asked", "version", "words"), [
    (VLLM, {"chunked_prefill": True}, "0.9.0", ["--enable-chunked-prefill=true"]),
    (VLLM, {"chunked_prefill": True}, "0.9.1", ["--enable-chunked-prefill"]),
    (VLLM, {"chunked_prefill": False}, "0.25.1+cu130", ["--no-enable-chunked-prefill"]),
    (VLLM, {"kv_gib": 0.5}, "", ["--kv-cache-memory-bytes", "536870912"]),
    (TENSORRT_LLM, {"kv_dtype": "fp8"}, "0.20.0", ["kv_cache_dtype", '"fp8"']),
    (TENSORRT_LLM, {"kv_dtype": "fp8"}, "1.2.0rc4", ["kv_cache_config", "dtype", '"fp8"']),
])  # fmt: skip
def test_what_a_version_is_told(adapter, asked, version, words):
    assert told(adapter.name, adapter.flags, Arm(**asked), version, {}) == [words]


@pytest.mark.parametrize(("value", "version", "words"), [
    ("a", "0.1", ["--kv_dtype-0", "a"]), ("b", "1.0", ["--kv_dtype=b-0", "b"]), ("b", "0.9", ["--kv_dtype=b-1", "b"]), ("b", "0.4", None),
])  # fmt: skip
def test_a_value_that_has_rows_of_its_own_is_told_by_those(value, version, words):
    rows = flags(**{"kv_dtype": [("", "")], "kv_dtype=b": [("1.0", ""), ("0.5", "1.0")]})
    one, arm = framework(flags=rows, kv_dtypes={v: v for v in ("auto", "a", "b")}), Arm(kv_dtype=value)
    refused = unsupported(one, arm, version)
    assert refused == ("" if words else "f 0.4 cannot be told kv_dtype='b'; versions from 1.0 on or from 0.5 on and before 1.0 can")
    assert words is None or told("f", rows, arm, version, {}) == [words]
    assert versions_of(rows) == {}, "an argument that every version has, whatever its values"


def test_settings_are_told_in_the_order_of_an_arms_fields():
    arm = Arm(context=4, block_size=3, max_requests=2)
    assert words("f", flags(context=[("", "")], max_requests=[("", "")], block_size=[("", "")]), arm, "", {}) == [
        "--block_size-0", "3", "--max_requests-0", "2", "--context-0", "4",
    ]  # fmt: skip


def test_an_arm_that_asks_nothing_is_told_nothing_by_whatever_version():
    assert told("f", {}, Arm(), "0.1", {}) == [] and unsupported(framework(), Arm(), "0.1") == ""


@pytest.mark.parametrize(("more", "concurrency", "arm", "why"), [
    ({}, 8, {}, ""),
    ({"one_at_a_time": True}, 1, {}, ""),
    ({"one_at_a_time": True}, 8, {}, "f answers one request at a time: concurrency=8 would measure its queue"),
    ({}, 1, {"block_size": 16}, "f cannot be told block_size=16"),
    ({"flags": flags(block_size=[("9", "")])}, 1, {"block_size": 16}, ""),
])  # fmt: skip
def test_what_is_beyond_a_framework(more, concurrency, arm, why):
    scenario = ClosedLoop(isl=8, osl=8, concurrency=concurrency, arms=(Arm(), Arm(name="b", **arm)))
    assert beyond(framework(**more), scenario) == why


def test_weights_of_fewer_bits_are_made_by_those_who_can():
    for adapter, can in ((VLLM, ("fp8",)), (SGLANG, ("fp8",)), (TGI, ("fp8",)), (TRANSFORMERS, ("int8", "int4"))):
        for word in ("fp8", "int8", "int4"):
            why = unsupported(adapter, Arm(quantization=word))
            assert why == ("" if word in can else f"{adapter.name} makes no weights of {word} as it loads them")
    arm = Arm(quantization="int4")
    assert "bnb-4bit" in TRANSFORMERS.argv(Launch(python="py", model="m", port=1, device="gpu", arm=arm)), "said in its own word"
    assert unsupported(VLLM, Arm(quantization="bitsandbytes")) == "", "what it may know is passed on"

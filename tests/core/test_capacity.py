"""What a cache holds: what servers say of their pools, against arithmetic; and what of a filled cache makes a run invalid."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import capacity, gguf, still
from pytest_kvcache.core.arms import narrowed
from pytest_kvcache.core.limits import GAINS
from pytest_kvcache.core.lint import text_problem
from pytest_kvcache.core.metrics import SIZES, find_metric
from pytest_kvcache.core.plan import Wanted, gate_specs, make_plan
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.resolved import resolved
from pytest_kvcache.core.scenarios import Capacity, ClosedLoop, Text
from pytest_kvcache.core.spec import Arm, Gate, SpecError
from pytest_kvcache.core.units import factor
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import TENSORRT_LLM
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM

SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}

# Lines of real logs and pages (vLLM 0.32 and llama.cpp here, 2026-12-01; the others from public reports), and bytes of a token by them.
SAID = {
    "llama_cpp f16": (LLAMA_CPP, "llama_kv_cache: size =   22.50 MiB (  1024 cells,  30 layers,  1/1 seqs), K (f16):   11.25 MiB, V (f16):   11.25 MiB", 1024, 23040),
    "llama_cpp q8_0": (LLAMA_CPP, "llama_kv_cache: size =   11.95 MiB (  1024 cells,  30 layers,  1/1 seqs), K (q8_0):    5.98 MiB, V (q8_0):    5.98 MiB", 1024, 12240),
    "llama_cpp q4_0": (LLAMA_CPP, "llama_kv_cache: size =    6.33 MiB (  1024 cells,  30 layers,  1/1 seqs), K (q4_0):    3.16 MiB, V (q4_0):    3.16 MiB", 1024, 6480),
    "vllm cpu": (
        VLLM, 'INFO [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency\nvllm:cache_config_info{block_size="128",kv_cache_memory_bytes="1073741824",num_gpu_blocks="364"} 1.0',
        46592, 23040,
    ),
    "vllm gpu": (
        VLLM, 'INFO [gpu_worker.py:760] Available KV cache memory: 109.97 GiB\nINFO GPU KV cache size: 900,880 tokens\nx{block_size="16",kv_cache_memory_bytes="None"} 1',
        900880, 131072,
    ),
    "sglang": (SGLANG, "[TP0] KV Cache is allocated. #tokens: 350208, K size: 21.38 GB, V size: 21.38 GB\nmax_total_num_tokens=350208, chunked", 350208, 131072),
    "sglang mla": (SGLANG, "[TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 524288, KV size: 34.31 GB\nmax_total_num_tokens=524288,", 524288, 70272),
    "tensorrt_llm": (TENSORRT_LLM, "[MemUsageChange] Allocated 7.31 GiB for max tokens in paged KV cache (273792)\nNumber of tokens per block: 64.", 273792, 28672),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_servers_say_of_their_pools(name):
    framework, log, tokens, each = SAID[name]
    pool, not_told = capacity.pool(resolved(log, framework.resolved))
    assert pool["kv_tokens"] == tokens and not_told == {}
    assert capacity.figures(pool)["kv_bytes_per_token"] == pytest.approx(each, rel=2e-3)


@pytest.mark.parametrize(("said", "bytes_"), [
    ("22.50 MiB", 22.5 * 2**20), (1073741824, 2**30), ("1073741824", 2**30), ("K size: 0.21 GB, V size: 0.21 GB", 0.42 * 2**30),
    ("13.32 GiB + 13.30 GiB", 13.3 * 2**30), ("60.00 MiB + 12.00 MiB", None), ("13 GiB + unknown", None),
    (None, None), (True, None), ("", None), ("None", None), (0, None), (1.5, None),
])  # fmt: skip
def test_one_size_or_none(said, bytes_):
    assert capacity.size(said) == (bytes_ and pytest.approx(bytes_))


@pytest.mark.parametrize(("told", "lacks"), [
    ({}, SIZES), ({"kv_memory": "1 GiB"}, SIZES), ({"kv_tokens": "1024 + 2048", "kv_memory": "1 GiB"}, SIZES),
    ({"kv_tokens": 1024}, ("kv_bytes_per_token", "kv_size_ratio")), ({"kv_tokens": 1024, "kv_memory": "9 MiB + 4 MiB"}, ("kv_bytes_per_token", "kv_size_ratio")),
])  # fmt: skip
def test_what_is_not_told_has_a_reason_and_is_no_figure(told, lacks):
    pool, not_told = capacity.pool(told)
    assert set(not_told) == set(lacks) and all("the server told no kv_" in why for why in not_told.values())
    assert not set(capacity.figures(pool)) & set(lacks)


@pytest.mark.parametrize(("framework", "arm", "said", "form"), [
    (LLAMA_CPP, Arm(), {"kv_dtype": "f16"}, "auto"), (LLAMA_CPP, Arm(kv_dtype="int8"), {}, "q8_0"), (LLAMA_CPP, Arm(kv_dtype="q4_0"), {}, "q4_0"),
    (VLLM, Arm(), {"dtype": "bfloat16"}, "bfloat16"), (VLLM, Arm(weight_dtype="float32"), {}, "float32"), (VLLM, Arm(), {"dtype": "float32"}, "float32"),
    (VLLM, Arm(kv_dtype="int8"), {}, "int8_per_token_head"), (VLLM, Arm(kv_dtype="fp8"), {"dtype": "bfloat16"}, "fp8"), (VLLM, Arm(kv_dtype="nvfp4"), {}, ""),
    (SGLANG, Arm(kv_dtype="fp8"), {}, "fp8_e4m3"),
])  # fmt: skip
def test_the_arithmetic_is_that_of_what_was_asked_for(framework, arm, said, form):
    found = capacity.format_of(framework, arm, said)
    assert (found, found and capacity.FORMATS[found]) == (found, form and capacity.FORMATS[form])
    assert bool(found) == bool(form)


@pytest.mark.parametrize(("config", "form", "tp", "longest", "each"), [
    (SMOLLM2, "auto", 1, None, 23040), (SMOLLM2, "q8_0", 1, None, 12240), (SMOLLM2, "auto", 3, None, 7680),
    ({**SMOLLM2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "auto", 8, None, 30 * 576 * 2),
    ({**SMOLLM2, "sliding_window": 4096}, "auto", 1, 4096, 23040), ({**SMOLLM2, "sliding_window": 4096}, "auto", 1, 8192, "keep 4096 tokens only"),
    ({**SMOLLM2, "sliding_window": 4096}, "auto", 1, None, "keep 4096 tokens only"),
    ({**SMOLLM2, "layer_types": ["linear_attention"] * 20 + ["full_attention"] * 10}, "auto", 1, None, "state of fixed size"),
    ({}, "auto", 1, None, "is not here"), (SMOLLM2, "", 1, None, "not known"), ({"text_config": SMOLLM2}, "auto", 1, None, 23040),
])  # fmt: skip
def test_what_a_token_should_take_or_why_that_is_not_known(config, form, tp, longest, each):
    found, how = capacity.expected(config, form, tp, longest)
    if isinstance(each, str):
        assert found is None and each in how
    else:
        assert found == each and "layers x" in how


@given(st.sampled_from([n for n in capacity.FORMATS if n not in ("auto",)]), st.integers(1, 10**7))
def test_a_pool_of_exactly_these_bytes_has_the_ratio_one(form, tokens):
    each, _ = capacity.expected(SMOLLM2, form)
    found = capacity.figures({"kv_tokens": tokens, "kv_bytes": each * tokens, "expected_bytes_per_token": each})
    assert found["kv_size_ratio"] == pytest.approx(1) and set(found) == set(SIZES)


def test_the_gains_that_are_claimed_are_below_arithmetic_and_above_the_next_wider_precision():
    wide, _ = capacity.expected(SMOLLM2, "auto")
    for name, forms in {"fp8": ("fp8",), "int8": ("q8_0", "int8_per_token_head"), "int4": ("q4_0", "int4_per_token_head")}.items():
        for form in forms:
            gain = wide / capacity.expected(SMOLLM2, form)[0]
            assert 0.9 * gain < GAINS[name] < 0.97 * gain
    assert GAINS["int4"] > 2 * 1.5 and GAINS["int8"] > 1.5


@pytest.mark.parametrize(("tokens", "share", "block", "n"), [
    (46592, 0.9, 128, 81), (46592, 1.0, 128, 91), (46592, 0.9, 1, 90), (512, 0.9, 1, 0), (464, 1.0, 1, 1), (463, 1.0, 1, 0),
])  # fmt: skip
def test_how_many_requests_fit_in_whole_blocks(tokens, share, block, n):
    assert capacity.fits(tokens, share, Capacity(isl=448, osl=16), block) == n


@pytest.mark.parametrize(("told", "tokens", "limit"), [
    ({"max_model_len": 512}, 46592, 512), ({"max_model_len": 512}, 512, 512), ({"max_model_len": 512}, 511, None), ({"max_model_len": 512}, None, None),
    ({}, 512, None), ({"max_model_len": "512 + 1024"}, 4096, None),
])  # fmt: skip
def test_the_longest_request_is_known_only_where_it_is_told_and_fits(told, tokens, limit):
    found, why = capacity.longest(told, tokens)
    assert found == limit and bool(why) == (limit is None)


GOOD = {
    "kv_tokens": 46592, "kv_bytes": 2.0**30, "kv_blocks": 364, "block_size": 128, "expected_bytes_per_token": 23040.0, "expected_by": "30 layers",
    "batch": {"requests": 81, "share": 0.89, "preempted": 0.0}, "above": {"requests": 137, "share": 1.5, "failed": 0, "preempted": 3.0},
    "drained": {"before": 0.0, "usage": 0.0, "running": 0.0, "seconds": 0.3},
    "longest": {"tokens": 512, "fits": 511, "requests": 1, "failed": 0, "beyond": {"tokens": 513, "became": "refused", "status": 400, "words": "too long"}},
    "not_told": {},
}  # fmt: skip


def trace(told, **more):
    record = RequestRecord(index=0, sent_s=0.0, first_s=1.0, last_s=2.0, end_s=2.0, input_tokens=448, output_tokens=16)
    load = {"asked": 1, "foreign_cores": 1.9, "device": "cpu", "cores": 2, "capacity": told} | more
    return Trace(scenario="s", arm="int8", run=1, workload="w", isl=448, osl=16, records=(record,), load=load)


def test_a_good_run_counts_whatever_else_the_machine_did():
    assert trace_problem(trace(GOOD)) is None
    assert capacity.figures(GOOD)["kv_size_ratio"] == pytest.approx(1.00024, abs=1e-5)


@pytest.mark.parametrize(("part", "words"), [
    ({"batch": {"requests": 81, "share": 0.89, "preempted": 3.0}}, "preempted 3 of 81 requests at 89% of its pool; none may be"),
    ({"above": {"requests": 137, "share": 1.5, "failed": 2, "first": "http_status: HTTP 500: no"}}, "2 of 137 requests at once (150% of its pool) failed"),
    ({"drained": {"before": 0.0, "usage": 0.12, "running": 0.0, "seconds": 5.1}}, "12.00% of the pool was in use 5.1 s after all requests had ended"),
    ({"drained": {"before": 0.0, "usage": 0.0, "running": 1.0, "seconds": 5.1}}, "says that 1 requests run"),
    ({"longest": {**GOOD["longest"], "failed": 1, "first": "http_status: HTTP 400"}}, "a request of 511 of its 512 tokens of context failed"),
    ({"longest": {**GOOD["longest"], "short": "3 of 8 output tokens came"}}, "did not get them: 3 of 8"),
    *(({"longest": {**GOOD["longest"], "beyond": {"tokens": 513, "words": "", **b}}}, words) for b, words in [
        ({"became": "answered", "status": 200}, "was answered as if it fitted"), ({"became": "hung"}, "hung"), ({"became": "broke"}, "broke the connection"),
        ({"became": "refused", "status": 500}, "no clear error but HTTP 500"),
    ]),
    ({"kv_bytes": 2.0**29}, "0.5 of what 30 layers take"), ({"not_asked_pool": "kv_gib=1 was not applied"}, "kv_gib=1"),
    ({"kv_tokens": 46593}, "364 blocks of 128 hold 46592"),
])  # fmt: skip
def test_what_no_cache_may_do_is_named(part, words):
    problem, by_machine = trace_problem(trace(GOOD | part))
    assert words in problem and not by_machine


def test_its_own_counters_and_answers_are_looked_at_too():
    lost, warm = (
        ({"preemptions": 0.0}, {"preemptions": 2.0}),
        ({"prefix_queries": 0.0, "prefix_hits": 0.0}, {"prefix_queries": 448.0, "prefix_hits": 400.0}),
    )
    assert "preempted 2 requests" in trace_problem(trace(GOOD, counters=lost))[0]
    assert "the prefix cache was warm" in trace_problem(trace(GOOD, counters=warm))[0]
    assert "only 1 of 2 requests were sent" in trace_problem(trace(GOOD, asked=2))[0]


@pytest.mark.parametrize("part", ["batch", "above", "drained", "longest", "kv_blocks", "expected_bytes_per_token"])
def test_a_part_that_is_not_known_is_no_fault(part):
    assert trace_problem(trace({k: v for k, v in GOOD.items() if k != part})) is None


@pytest.mark.parametrize(
    ("asked", "taken", "wrong"),
    [(1, 2**30, False), (1, 2**30 * 1.01, False), (1, 2**30 * 1.05, True), (None, 2**30, False), (1, None, False)],
)
def test_a_pool_is_as_large_as_was_asked(asked, taken, wrong):
    assert bool(capacity.asked_pool(Arm(kv_gib=asked), taken)) == wrong


@pytest.mark.parametrize(("value", "verdict"), [(1.0, "pass"), (1.05, "pass"), (1.0501, "regression")])
def test_a_limit_of_a_figure_without_spread(value, verdict):
    assert still.of_size(value, 1.05, find_metric("kv_size_ratio")).verdict == verdict


@pytest.mark.parametrize(("name", "old", "new", "claim", "verdict"), [
    ("kv_bytes_per_token", 23040, 12240, {"at_least": 1.8}, "pass"), ("kv_bytes_per_token", 23040, 23040, {"at_least": 1.8}, "regression"),
    ("kv_tokens", 100, 180, {"at_least": 1.8}, "pass"), ("kv_tokens", 100, 179, {"at_least": 1.8}, "regression"),
    ("kv_tokens", 100, 99.5, {}, "pass"), ("kv_tokens", 100, 97, {}, "regression"), ("kv_bytes_per_token", 100, 97, {}, "pass"),
])  # fmt: skip
def test_two_arms_beside_each_other(name, old, new, claim, verdict):
    found = still.beside(old, new, find_metric(name), margin=0.02, at_least=claim.get("at_least"))
    assert found.verdict == verdict and found.value == new and found.baseline == old


ARMS = (Arm(name="fp16"), Arm(name="fp8", kv_dtype="fp8"), Arm(name="int8", kv_dtype="int8"))
SCENARIO = Capacity(isl=448, osl=16, fill=0, arms=ARMS)


@pytest.mark.parametrize(("framework", "named", "why"), [
    (LLAMA_CPP, {"int8", "fp16"}, ""), (LLAMA_CPP, {"fp8"}, "llama_cpp has no kv_dtype 'fp8'"), (LLAMA_CPP, set(), ""), (VLLM, {"fp8", "int8"}, ""),
    (TRANSFORMERS, {"fp16"}, "transformers does not tell how many tokens its KV cache holds and how many bytes it takes"),
])  # fmt: skip
def test_what_a_framework_never_tells_or_has_is_known_at_collection(framework, named, why):
    assert capacity.unsized(framework, SCENARIO, named).startswith(why) and bool(capacity.unsized(framework, SCENARIO, named)) == bool(why)
    assert "leave --kv-ab out" in capacity.unsized(framework, SCENARIO, named, beside="--kv-ab")


def test_one_precision_less_costs_no_other():
    assert [a.name for a in narrowed(SCENARIO, lambda arm: arm.kv_dtype != "fp8").arms] == ["fp16", "int8"]
    assert narrowed(SCENARIO, lambda arm: False) is SCENARIO
    wide = Capacity(isl=448, osl=16, arms=(Arm(name="pool", kv_gib=1),))
    assert "llama_cpp cannot be told kv_gib=1" in capacity.unsized(LLAMA_CPP, wide, ())


@pytest.mark.parametrize("wrong", [{"isl": 0}, {"osl": 1.5}, {"fill": 1}, {"fill": -0.1}, {"fill": True}, {"fill": "much"}])
def test_a_scenario_that_cannot_be_is_refused(wrong):
    with pytest.raises(SpecError, match="Capacity: "):
        Capacity(**{"isl": 8, "osl": 8} | wrong)


def test_its_id_says_what_is_off_its_default():
    assert [str(Capacity(isl=8, osl=4, fill=f)) for f in (0.9, 0, 0.5)] == [
        "capacity-isl8-osl4",
        "capacity-isl8-osl4-fill0",
        "capacity-isl8-osl4-fill0.5",
    ]
    assert len({capacity.workload(Capacity(isl=8, osl=4, fill=f)) for f in (0.9, 0, 0.5)}) == 3


LOAD, TEXT = ClosedLoop(isl=8, osl=8, concurrency=1), Text(arms=ARMS)


@pytest.mark.parametrize(("gate", "scenario", "words"), [
    (Gate("kv_tokens"), LOAD, "is a figure of what a cache holds"), (Gate("kv_size_ratio", arm="int8"), TEXT, "is a figure of what a cache holds"),
    (Gate("output_tok_s"), SCENARIO, "is no figure of what a cache holds"), (Gate("kld.mean", arm="int8"), SCENARIO, "is no figure"),
    (Gate("kv_size_ratio", limit=2), SCENARIO, "1.25 is the loosest"), (Gate("kv_size_ratio", arm="int8", against="fp16", at_least=2), SCENARIO, "its own arithmetic"),
    (Gate("kv_tokens", margin=0.9), SCENARIO, "hardly ever fail"),
    (Gate("kv_size_ratio", limit=1.05), SCENARIO, ""), (Gate("kv_tokens"), SCENARIO, ""), (Gate("kv_bytes_per_token", arm="int8", against="fp16", at_least=1.8), SCENARIO, ""),
    (Gate("kld.mean", arm="int8"), TEXT, ""), (Gate("output_tok_s"), LOAD, ""),
])  # fmt: skip
def test_gates_of_other_kinds_are_refused(gate, scenario, words):
    found = text_problem(gate, scenario)
    assert words in found and bool(found) == bool(words)


def test_its_block_is_its_own_and_takes_one_run():
    gates = (
        Gate("kv_size_ratio", arm="int8", limit=1.05),
        Gate("kv_bytes_per_token", arm="int8", against="fp16", at_least=1.8),
        Gate("kv_tokens", arm="int8"),
    )
    wants = [
        Wanted(framework="f", model="m", family="a", scenario=s, gates=g)
        for s, g in ((SCENARIO, gates), (ClosedLoop(isl=8, osl=8, concurrency=1, arms=ARMS), (Gate("output_tok_s"),)))
    ]
    sizes, load = make_plan(wants, 0.05, side_by_side=True)
    assert sizes.still and not sizes.text and not sizes.together and not load.still
    assert sizes.id.startswith("f/m/capacity:fp16+fp8")
    assert [g.once for g in gate_specs(wants[0], 0.05)] == [True, True, False]
    assert [g.key for g in sizes.gates] == [
        f"a/{SCENARIO}/int8-limit/kv_size_ratio",
        f"a/{SCENARIO}/int8-vs-fp16/kv_bytes_per_token",
        f"a/{SCENARIO}/int8/kv_tokens",
    ]


def test_units_of_the_figures_are_known():
    assert factor("KiB/tok", find_metric("kv_bytes_per_token").unit) == 1024 and factor("ktok", find_metric("kv_tokens").unit) == 1000


# -- the head of a GGUF file --------------------------------------------------------------------------------------------


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def head(architecture="llama", version=3, **entries):
    """A file with a text, an array of texts and one of numbers among whole numbers."""
    said = [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
    ]
    said += [text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3), text("eps") + struct.pack("<If", 6, 1e-5)]
    for name, value in entries.items():
        key = text(f"{architecture}.{name.replace('__', '.')}")
        said.append(
            key + (struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value) if isinstance(value, list) else struct.pack("<II", 4, value))
        )
    return b"GGUF" + struct.pack("<IQQ", version, 5, len(said)) + b"".join(said)


SHAPE = {"block_count": 30, "attention__head_count": 9, "attention__head_count_kv": 3, "embedding_length": 576}


def test_a_gguf_file_tells_the_shape_as_a_config_does():
    assert gguf.config_of(io.BytesIO(head(**SHAPE))) == SMOLLM2
    assert gguf.config_of(io.BytesIO(head("qwen3", **SHAPE, attention__key_length=128)))["head_dim"] == 128


@pytest.mark.parametrize("data", [
    b"", b"GGUF", b"GGML" + head(**SHAPE)[4:], head(version=1, **SHAPE), head(**SHAPE)[:-3], head(**SHAPE | {"attention__head_count_kv": [3, 0, 3]}),
    head("deepseek2", **SHAPE, attention__kv_lora_rank=512), b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**60),
])  # fmt: skip
def test_any_other_file_tells_nothing(data):
    assert gguf.config_of(io.BytesIO(data)) == {}


@given(st.binary(max_size=200), st.integers(0, 300))
def test_a_damaged_file_raises_nothing(noise, at):
    whole = head(**SHAPE)
    assert isinstance(gguf.config_of(io.BytesIO(whole[:at] + noise)), dict)

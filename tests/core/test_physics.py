"""Bounds from published rates, worked out by hand, and where none is known."""

import dataclasses

import pytest

from pytest_kvcache.core import physics
from pytest_kvcache.core.gpus import GPUS
from pytest_kvcache.core.models import MODELS
from pytest_kvcache.core.physics import card_of, limit_of
from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop
from pytest_kvcache.core.spec import Arm, Model

GRANITE, H200 = MODELS["granite-3.3-8b"], GPUS["h200-sxm"]
CLOSED, OPEN = ClosedLoop(isl=1000, osl=101, concurrency=8), OpenLoop(isl=1000, osl=101, rate=4)


def environment(name="NVIDIA H200", cards=1, argv=("vllm", "serve")):
    return {
        "identity": {"gpu": name}, "subject": {"server_argv": list(argv)}, "context": {"gpu_uuids": [f"GPU-{i}" for i in range(cards)]},
    }  # fmt: skip


def bound(metric, scenario=CLOSED, arm=None, model=GRANITE, **env):
    found = limit_of(metric, scenario, arm or Arm(), model, environment(**env))
    return None if found is None else (found.value, found.at_most)


def test_the_cards_of_a_fingerprint():
    assert card_of(environment()).bytes_s == 4.8e12
    assert card_of(environment(cards=2)).bytes_s == 9.6e12
    assert card_of(environment(cards=2)).label == f"2 x {H200.label}"
    for other in ({"name": "AMD EPYC, 2 cores"}, {"name": "NVIDIA H200 + NVIDIA L4"}, {"cards": 0}, {"name": None}):
        assert card_of(environment(**other)) is None
    assert card_of({}) is None


def test_bytes_of_weights_and_of_a_tokens_cache():
    assert physics.weight_bytes(GRANITE) == 2 * 8_170_532_864
    assert physics.weight_bytes(GRANITE, "int4") == 8_170_532_864 / 2
    assert physics.kv_bytes_per_token(GRANITE) == 2 * 40 * 8 * 128 * 2
    assert physics.kv_bytes_per_token(GRANITE, "fp8") == 2 * 40 * 8 * 128
    assert physics.weight_bytes(Model(key="x")) is None
    assert physics.kv_bytes_per_token(Model(key="x")) is None
    assert physics.weight_bytes(GRANITE, "of-its-own") is None


def test_a_token_takes_at_least_its_weights_and_its_own_cache_from_memory():
    ms = 1e3 * (2 * 8_170_532_864 + 1000 * 2 * 40 * 8 * 128 * 2) / 4.8e12
    assert bound("tpot_ms.p50") == bound("tpot_ms.p99") == (pytest.approx(ms), False)
    assert 3.4 < ms < 3.5, "measured on this card with a model of this size: 4.9 ms"
    assert bound("e2e_ms.p50") == (pytest.approx(100 * ms), False)
    assert bound("tpot_ms.p50", cards=2) == (pytest.approx(ms / 2), False)


def test_a_rate_is_bound_by_the_streams_and_by_arithmetic():
    (token_ms, _), (tok_s, at_most) = bound("tpot_ms.p50"), bound("output_tok_s")
    assert (tok_s, at_most) == (pytest.approx(8 / token_ms * 1e3), True)
    assert bound("req_s") == (pytest.approx(tok_s / 101), True)
    flops = H200.bf16_tflops * 1e12 / (2 * 8_170_532_864)
    assert bound("output_tok_s", OPEN) == (pytest.approx(flops), True)
    many = dataclasses.replace(CLOSED, concurrency=2048)
    assert bound("output_tok_s", many) == (pytest.approx(flops), True), "the tighter of the two"


@pytest.mark.parametrize(("arm", "weights", "cache"), [
    (Arm(), 2.0, 2.0), (Arm(kv_dtype="fp8"), 2.0, 1.0), (Arm(weight_dtype="int8"), 1.0, 2.0), (Arm(weight_dtype="int4", kv_dtype="int4"), 0.5, 0.5),
])  # fmt: skip
def test_narrower_numbers_are_fewer_bytes(arm, weights, cache):
    bytes_needed = weights * 8_170_532_864 + cache * 1000 * 2 * 40 * 8 * 128
    assert bound("tpot_ms.p50", arm=arm) == (pytest.approx(1e3 * bytes_needed / 4.8e12), False)
    assert bound("output_tok_s", OPEN, arm)[0] == pytest.approx(H200.bf16_tflops * 1e12 * 2 / weights / (2 * 8_170_532_864))


@pytest.mark.parametrize(
    "argv", [("--quantization", "awq"), ("--speculative-config", "{}"), ("--draft-model", "x"), ("--hf-overrides", "{}")]
)
def test_words_that_make_a_token_cheaper_leave_no_bound(argv):
    assert bound("tpot_ms.p50", argv=argv) is None
    assert bound("output_tok_s", argv=argv) is None


def test_a_cache_of_a_precision_that_is_not_known_is_left_out():
    assert bound("tpot_ms.p50", argv=("--kv-cache-dtype", "fp8")) == (pytest.approx(1e3 * 2 * 8_170_532_864 / 4.8e12), False)


@pytest.mark.parametrize("more", [
    {"model": None}, {"model": Model(key="x", hub_id="a/x")}, {"model": MODELS["smollm2-135m"]}, {"name": "AMD EPYC, 2 cores"},
    {"arm": Arm(weight_dtype="of-its-own")},
])  # fmt: skip
@pytest.mark.parametrize("metric", ["tpot_ms.p50", "output_tok_s"])
def test_where_card_or_model_is_not_known_or_fits_a_cache_there_is_no_bound(metric, more):
    assert bound(metric, **more) is None


def test_prompts_that_are_new_take_their_arithmetic():
    """512 tokens of 8.17e9 weights, two operations each, at 989.5e12 a second: 8.46 ms; as many tokens a second in all."""
    (least, low), (most, high) = bound("ttft_ms.p50"), bound("total_tok_s")
    assert (low, high) == (False, True)
    isl = round(least * most / 1e3)
    assert least == pytest.approx(1e3 * isl * 2 * 8_170_532_864 / 989.5e12, rel=0.01)
    assert most == pytest.approx(989.5e12 / (2 * 8_170_532_864), rel=0.01)


@pytest.mark.parametrize("metric", ["itl_ms.p50", "ttfa_ms.p50"])
def test_other_metrics_have_no_bound(metric):
    assert bound(metric) is None


def test_memory_power_and_tokens_per_joule():
    pair = physics.cards(H200, 2)
    assert (physics.most_memory(pair).value, physics.most_memory(pair).at_most) == (2 * H200.memory_gb * 1e9, True)
    assert (physics.most_power(pair).value, physics.most_power(pair).at_most) == (2 * H200.tdp_w, True)
    assert physics.most_memory(physics.Card(label="x")) is None
    assert physics.most_power(physics.Card(label="x")) is None
    assert physics.most_tok_per_j(2800.0, 70.0) == 40.0


@pytest.mark.parametrize(
    ("value", "at_most", "broken"), [(98, False, False), (98.1, False, False), (97, False, True), (102, True, False), (103, True, True)]
)
def test_two_per_cent_beyond_are_allowed(value, at_most, broken):
    assert physics.Limit(value=100.0, at_most=at_most, reason="r").broken_by(value * (0.99999 if at_most else 1.001)) is broken

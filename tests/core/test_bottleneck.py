"""What binds a model on a card: worked out by hand, on both sides of each border, and where a figure is not known."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import physics
from pytest_kvcache.core.bottleneck import BANDWIDTH, CAPACITY, COMPUTE, bottleneck
from pytest_kvcache.core.gpus import GPUS
from pytest_kvcache.core.models import MODELS
from pytest_kvcache.core.spec import Gpu, Model

LLAMA, GRANITE, H200, L4 = MODELS["llama-3.1-8b"], MODELS["granite-3.3-8b"], GPUS["h200-sxm"], GPUS["l4"]
KV = 2 * 32 * 8 * 128 * 2  # bytes of a token of llama-3.1-8b at 16 bits
WEIGHTS = 2 * 7_504_658_432
HELD = WEIGHTS + 2 * 128_256 * 4096  # with the input embedding, which is not tied


def test_a_decode_step_by_hand():
    found = bottleneck(LLAMA, H200, context=4096, batch=8)
    moved = WEIGHTS + 8 * 4096 * KV
    flops = 8 * (2 * 7_504_658_432 + 4 * 32 * 32 * 128 * 4096)  # four for each layer, query head, number of a head and token before
    assert (found.decode.tokens, found.decode.bytes, found.decode.flops) == (8, moved, pytest.approx(flops))
    assert found.decode.bandwidth_s == pytest.approx(moved / 4.8e12)
    assert found.decode.compute_s == pytest.approx(flops / 989e12)
    assert found.decode.intensity == pytest.approx(flops / moved) and found.ridge == pytest.approx(989e12 / 4.8e12)
    assert found.decode_binds == BANDWIDTH and found.attention and found.reason == ""


def test_a_prefill_by_hand():
    found = bottleneck(LLAMA, H200, context=4096)
    flops = 4096 * 2 * 7_504_658_432 + 4 * 32 * 32 * 128 * 4096 * 4097 / 2
    assert found.prefill.flops == pytest.approx(flops) and found.prefill.compute_s == pytest.approx(flops / 989e12)
    assert found.prefill.bytes == WEIGHTS + 4096 * KV
    assert found.prefill_binds == COMPUTE


def test_one_token_alone_is_the_least_time_of_the_physics():
    found = bottleneck(GRANITE, H200, context=1000)
    weights, kv = physics.weight_bytes(GRANITE), physics.kv_bytes_per_token(GRANITE)
    assert found.decode.bandwidth_s == pytest.approx(physics.least_tpot_s(weights, 1000 * kv, 4.8e12))
    assert not found.attention, "the catalogue does not tell its query heads"
    assert found.decode.flops == 2 * 8_170_532_864


def test_what_fits_by_hand():
    found = bottleneck(LLAMA, L4, context=8192, batch=5)
    room = 24e9 * 0.9
    assert (found.there_bytes, found.weights_bytes, found.cache_bytes) == (pytest.approx(room), HELD, 5 * 8192 * KV)
    assert found.requests == int((room - HELD) // (8192 * KV)) == 5 and found.fits
    beyond = bottleneck(LLAMA, L4, context=8192, batch=6)
    assert not beyond.fits and (beyond.prefill_binds, beyond.decode_binds) == (CAPACITY, CAPACITY)
    assert beyond.decode.binds == BANDWIDTH, "what would bind if it fitted is still told"
    assert bottleneck(LLAMA, L4, context=131_072).requests == 0


def test_weights_that_do_not_fit_leave_room_for_nothing():
    assert bottleneck(LLAMA, dataclasses.replace(L4, memory_gb=12), context=16).requests == 0


@pytest.mark.parametrize(
    ("batch", "context", "binds"),
    [(1, 128, BANDWIDTH), (64, 128, BANDWIDTH), (512, 128, COMPUTE), (512, 1600, BANDWIDTH), (512, 8192, CAPACITY)],
)
def test_decoding_is_bound_by_arithmetic_only_in_large_batches_of_short_contexts(batch, context, binds):
    assert bottleneck(LLAMA, H200, context=context, batch=batch).decode_binds == binds


@pytest.mark.parametrize(("context", "binds"), [(16, BANDWIDTH), (128, BANDWIDTH), (512, COMPUTE), (32768, COMPUTE), (10**6, CAPACITY)])
def test_a_prompt_is_bound_by_arithmetic_once_it_is_long_enough(context, binds):
    assert bottleneck(LLAMA, H200, context=context).prefill_binds == binds


@pytest.mark.parametrize(
    ("weight_dtype", "faster", "narrower"), [("auto", 1, 1), ("fp8", 2, 2), ("int8", 2, 2), ("awq", 1, 4), ("int4", 1, 4), ("fp32", 1, 0.5)]
)
def test_weights_that_are_widened_save_bytes_and_no_arithmetic(weight_dtype, faster, narrower):
    plain, found = (bottleneck(GRANITE, H200, context=512, weight_dtype=w) for w in ("auto", weight_dtype))
    assert found.prefill.compute_s == pytest.approx(plain.prefill.compute_s / faster)
    assert found.weights_bytes == pytest.approx(plain.weights_bytes / narrower)
    assert found.prefill.flops == plain.prefill.flops


@pytest.mark.parametrize(("kv_dtype", "each"), [
    ("auto", KV), ("fp8", KV / 2), ("int8", KV / 2), ("int4", KV / 4), ("q8_0", KV * 8.5 / 16), ("int8_per_token_head", KV / 2 + 2 * 32 * 8 * 4),
])  # fmt: skip
def test_the_cache_is_counted_as_it_is_stored(kv_dtype, each):
    assert bottleneck(LLAMA, H200, context=100, batch=3, kv_dtype=kv_dtype).cache_bytes == pytest.approx(300 * each)


def test_windows_and_latents_hold_and_read_what_they_do():
    sliding = dataclasses.replace(
        LLAMA, config=LLAMA.config | {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 16}
    )
    found = bottleneck(sliding, H200, context=4096)
    assert found.cache_bytes == 16 * 4096 * KV / 32 + 16 * 1024 * KV / 32
    dense = 2 * 7_504_658_432
    assert found.decode.flops - dense == pytest.approx(4 * 32 * 128 * (16 * 4096 + 16 * 1024))
    pairs = 16 * sum(range(1, 4097)) + 16 * (sum(range(1, 1025)) + 3072 * 1024)
    assert found.prefill.flops - 4096 * dense == pytest.approx(4 * 32 * 128 * pairs)
    latent = dataclasses.replace(LLAMA, config=LLAMA.config | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    found = bottleneck(latent, H200, context=4096)
    assert found.cache_bytes == 4096 * 32 * 576 * 2
    assert found.decode.flops - dense == pytest.approx(2 * 32 * 32 * 4096 * (576 + 512))


def test_more_cards_share_the_work_and_add_their_memory():
    one, two = (bottleneck(LLAMA, H200, context=8192, batch=4, tp=n) for n in (1, 2))
    assert two.decode.bandwidth_s == pytest.approx(one.decode.bandwidth_s / 2) and two.there_bytes == 2 * one.there_bytes
    assert two.requests > 2 * one.requests, "the weights are there once"
    assert bottleneck(LLAMA, H200, context=8192, tp=16).cache_bytes == 2 * one.cache_bytes / 4, (
        "eight KV heads on sixteen cards are there twice"
    )


@pytest.mark.parametrize(("model", "how", "why"), [
    (Model(key="x"), {}, "weights, shape"), (Model(key="x", parameters=10**9), {}, "shape"), (GRANITE, {"kv_dtype": "odd"}, "cache in 'odd'"),
    (GRANITE, {"weight_dtype": "odd"}, "weights"),
])  # fmt: skip
def test_a_model_that_is_not_known_has_a_reason_and_no_figure(model, how, why):
    found = bottleneck(model, H200, context=512, **how)
    assert why in found.reason and found.decode is None and found.requests is None
    assert (found.fits, found.prefill_binds, found.decode_binds) == (None, "", "")


def test_a_card_of_which_a_figure_is_not_known_tells_the_others():
    found = bottleneck(GRANITE, GPUS["h100-nvl"], context=512)
    assert "16-bit rate" in found.reason and found.decode.compute_s is None and found.decode.bandwidth_s and found.fits
    assert (found.prefill_binds, found.ridge) == ("", None)
    nothing = bottleneck(GRANITE, GPUS["cpu"], context=512)
    assert "memory, bandwidth, 16-bit rate" in nothing.reason and nothing.fits is None and nothing.decode_binds == ""
    assert bottleneck(GRANITE, Gpu(key="x", label="x", memory_gb=10), context=512).decode_binds == CAPACITY


@pytest.mark.parametrize("how", [{"context": 0}, {"context": 1, "batch": 0}, {"context": 1, "tp": 0}])
def test_what_cannot_be_is_refused(how):
    with pytest.raises(ValueError, match="at least 1"):
        bottleneck(LLAMA, H200, **how)


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([k for k in GPUS if k != "cpu"]),
    st.integers(1, 10**6),
    st.integers(1, 2048),
    st.integers(2, 8),
)
def test_longer_wider_and_more_never_take_less(model, gpu, context, batch, times):
    one = bottleneck(MODELS[model], GPUS[gpu], context=context, batch=batch)
    longer, more = (
        bottleneck(MODELS[model], GPUS[gpu], **how)
        for how in ({"context": times * context, "batch": batch}, {"context": context, "batch": times * batch})
    )
    for other in (longer, more):
        assert other.cache_bytes >= one.cache_bytes and other.decode.bytes >= one.decode.bytes and other.prefill.flops > one.prefill.flops
    assert longer.requests is None or longer.requests <= one.requests == more.requests
    narrow = bottleneck(MODELS[model], GPUS[gpu], context=context, batch=batch, kv_dtype="fp8")
    assert narrow.requests is None or narrow.requests >= 2 * one.requests
    for phase in (one.prefill, one.decode):
        if phase.binds:
            assert (phase.binds == COMPUTE) == (phase.intensity > one.ridge)

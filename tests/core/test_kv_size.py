"""Bytes of keys and values: against published shapes, and against what real caches were seen to take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.kv_size import FORMATS, bytes_per_token, gain, layers_of


def config(layers, heads, kv, size, **more):
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": size, **more}


# Shapes as LitGPT's `litgpt/config.py` and the models' own config.json have them; 16-bit bytes a token on one GPU while no window is full.
SHAPES = {
    "llama-2-7b (MHA)": ({"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}, 524288),
    "llama-3.1-8b (GQA)": (config(32, 32, 8, 128), 131072), "llama-3.1-405b (GQA)": (config(126, 128, 8, 128), 516096),
    "qwen2.5-7b (GQA, a window that is off)": (config(28, 28, 4, 128, sliding_window=131072, use_sliding_window=False), 57344),
    "mistral-7b-v0.1 (all layers slide)": (config(32, 32, 8, 128, sliding_window=4096), 131072),
    "gemma-2-9b (every other layer slides)": (
        config(42, 16, 8, 256, sliding_window=4096, layer_types=["sliding_attention", "full_attention"] * 21), 344064,
    ),
    "gemma-3-27b (a text model inside another)": (
        {"text_config": config(62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6)}, 507904,
    ),
    "deepseek-v3 (MLA)": (config(61, 128, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64), 61 * (512 + 64) * 2),
    "three of four layers linear (hybrid)": (
        config(48, 16, 2, 256, layer_types=[*["linear_attention"] * 3, "full_attention"] * 12), 12 * 2 * 2 * 256 * 2,
    ),
    "smollm2-135m (GQA)": (config(30, 9, 3, 64), 23040),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes(name):
    shape, wanted = SHAPES[name]
    assert bytes_per_token(layers_of(shape), FORMATS["auto"]) == wanted


@pytest.mark.parametrize(
    ("form", "seen"), [("bfloat16", 11_796_480), ("group64-8", 6_266_880), ("group64-4", 3_317_760), ("group64-2", 1_843_200)]
)
def test_what_transformers_caches_were_seen_to_take(form, seen):
    """SmolLM2-135M, 512 tokens: all tensors of transformers 5.24's `DynamicCache` and `QuantizedCache` (hqq and quanto), 2026-12-01."""
    layers = layers_of(SHAPES["smollm2-135m (GQA)"][0])
    assert 512 * bytes_per_token(layers, FORMATS[form]) == seen


def test_what_fewer_bits_buy_less_their_scales():
    llama, small = (layers_of(SHAPES[name][0]) for name in ("llama-3.1-8b (GQA)", "smollm2-135m (GQA)"))
    assert gain(llama, FORMATS["fp8"]) == 2
    assert gain(llama, FORMATS["int8_per_token_head"]) == pytest.approx(256 / 132)
    assert gain(llama, FORMATS["int4_per_token_head"]) == pytest.approx(256 / 68)
    assert gain(small, FORMATS["int4_per_token_head"]) == pytest.approx(128 / 36), "small heads pay more for their scales"
    assert gain(llama, FORMATS["q4_0"]) == pytest.approx(16 / 4.5)


def test_tensor_parallelism_divides_heads_and_no_latent():
    llama, latent = layers_of(SHAPES["llama-3.1-8b (GQA)"][0]), layers_of(SHAPES["deepseek-v3 (MLA)"][0])
    assert [bytes_per_token(llama, FORMATS["auto"], tp=n) for n in (1, 2, 8, 16)] == [131072, 65536, 16384, 16384]
    assert bytes_per_token(latent, FORMATS["auto"], tp=8) == bytes_per_token(latent, FORMATS["auto"])


def test_a_window_holds_no_more_than_itself():
    gemma = layers_of(SHAPES["gemma-3-27b (a text model inside another)"][0])
    assert bytes_per_token(gemma, FORMATS["auto"], tokens=1024) == 507904
    whole = 131072 * bytes_per_token(gemma, FORMATS["auto"], tokens=131072)
    assert whole == pytest.approx(131072 * 10 * 8192 + 1024 * 52 * 8192)


@pytest.mark.parametrize("shape", [{}, {"num_hidden_layers": 4}, {"text_config": {"num_attention_heads": 4}}])
def test_a_configuration_that_says_too_little_gives_nothing(shape):
    assert layers_of(shape) is None


@given(st.sampled_from(list(SHAPES)), st.sampled_from(list(FORMATS)), st.integers(1, 64), st.integers(1, 10**6))
def test_more_gpus_and_longer_texts_never_take_more_of_each(name, form, tp, tokens):
    layers = layers_of(SHAPES[name][0])
    one = bytes_per_token(layers, FORMATS[form], tp=tp, tokens=tokens)
    assert 0 < one <= bytes_per_token(layers, FORMATS[form])
    assert bytes_per_token(layers, FORMATS[form], tp=2 * tp, tokens=2 * tokens) <= one

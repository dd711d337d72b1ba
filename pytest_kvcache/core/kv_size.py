"""How many bytes the keys and values of a token take, from a model's own config.json and the format of the cache. Pure.

Of an attention layer, keys and values of each KV head; of latent attention (MLA), one latent and one rotary key that all heads share, which
no tensor parallelism divides; of a linear or state-space layer nothing that grows with the text. A sliding layer holds no more than its
window. Field names as in the configurations of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Format:
    """`bits` of a number as it is stored, with the scales of its group, and bytes of a scale of its own for each token, head and side."""

    bits: float
    scale_bytes: int = 0


# vLLM: `TritonAttentionBackend.customize_spec` (0.32): a float32 scale a token, head and side. llama.cpp: `ggml-common.h`, blocks of 32
# numbers with one or two half-precision scales. transformers: `QuantizedCache`, groups of 64 with a scale and a zero point of 16 bits each.
FORMATS: Mapping[str, Format] = {
    **dict.fromkeys(("auto", "bfloat16", "bf16", "float16", "fp16", "f16"), Format(bits=16)),
    **dict.fromkeys(("float32", "f32"), Format(bits=32)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), Format(bits=8)),
    "int8_per_token_head": Format(bits=8, scale_bytes=4), "fp8_per_token_head": Format(bits=8, scale_bytes=4),
    "int4_per_token_head": Format(bits=4, scale_bytes=4),
    "q8_0": Format(bits=8.5), "q5_1": Format(bits=6), "q5_0": Format(bits=5.5), "q4_1": Format(bits=5), "q4_0": Format(bits=4.5),
    "iq4_nl": Format(bits=4.5),
    "group64-8": Format(bits=8.5), "group64-4": Format(bits=4.5), "group64-2": Format(bits=2.5),
}  # fmt: skip

SLIDING = ("sliding_attention", "chunked_attention")
STATELESS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")  # of their states none grows


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What a model keeps of a token: `full` layers and `sliding` ones of `window` tokens, each with `heads` KV heads of `key` and `value`
    numbers. `latent`: one such head that is shared."""

    full: int
    sliding: int
    window: int
    heads: int
    key: int
    value: int
    latent: bool = False


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Read of a config.json; None where it does not say what is needed."""
    text = config.get("text_config") or config
    count, query = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not count or not query:
        return None
    full, sliding = _kinds(text, int(count))
    latent, size = text.get("kv_lora_rank"), text.get("head_dim") or text.get("hidden_size", 0) // query
    heads, key, value = int(text.get("num_key_value_heads") or query), int(size), int(text.get("v_head_dim") or size)
    if latent:
        heads, key, value = 1, int(latent), int(text.get("qk_rope_head_dim") or 0)
    window = int(text.get("sliding_window") or 0)
    return Layers(full=full, sliding=sliding, window=window, heads=heads, key=key, value=value, latent=bool(latent))


def _kinds(text: Mapping[str, Any], count: int) -> tuple[int, int]:
    """How many layers attend to everything, and how many to a window."""
    kinds = list(text.get("layer_types") or [])
    if not kinds:
        every = text.get("sliding_window_pattern")  # Gemma 3: each so-many-th layer attends to everything
        if text.get("sliding_window") and every:
            return count // int(every), count - count // int(every)
        return (0, count) if text.get("sliding_window") and text.get("use_sliding_window", True) else (count, 0)
    known = [k for k in kinds if k not in STATELESS]
    sliding = sum(k in SLIDING for k in known)
    return len(known) - sliding, sliding


def bytes_per_token(layers: Layers, form: Format, tp: int = 1, tokens: int | None = None) -> float:
    """Bytes on one of `tp` GPUs that a sequence of so many tokens takes for each of them; None: while no window is full.

    With fewer KV heads than GPUs, heads are there more than once.
    """
    heads = 1 if layers.latent else max(1, layers.heads // tp)
    numbers = heads * (layers.key + layers.value)
    one = numbers * form.bits / 8 + heads * (1 if layers.latent else 2) * form.scale_bytes
    held = 1.0 if tokens is None or not layers.window or tokens <= layers.window else layers.window / tokens
    return one * (layers.full + layers.sliding * held)


def gain(layers: Layers, form: Format) -> float:
    """How many times the tokens of a 16-bit cache fit in as much memory: 2 for INT8 and 4 for INT4, less their scales."""
    return bytes_per_token(layers, FORMATS["auto"]) / bytes_per_token(layers, form)

"""What binds a model on a GPU at a context length: arithmetic, memory bandwidth, or memory capacity. Pure.

The roofline (Williams, Waterman and Patterson 2009): a step takes no less than its operations at the card's rate and no less than its
bytes at the card's bandwidth, and the longer of the two binds. Operations: two for each weight and token (`core.physics`); in attention two
for each number of a key and of a value, query head and pair of tokens. Bytes: the weights once, and the keys and values once that are read
or written. From published rates, so that these are least times: measured ones are longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .kv_size import FORMATS, Format, Layers, bytes_per_token, layers_of
from .physics import BYTES, Card, cards, least_tpot_s, most_tok_s_by_compute, weight_bytes
from .spec import Gpu, Model

COMPUTE, BANDWIDTH, CAPACITY = "compute", "bandwidth", "capacity"

# Of the memory for weights and cache; engines leave the rest to activations and graphs. Published GB are taken as 10^9 bytes, the least.
MEMORY_SHARE = 0.9
# Of these only the weights are narrow (W4A16: Lin et al. 2023, AWQ): they are widened to 16 bits before they are multiplied.
WIDENED = ("int4", "awq", "gptq")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A step: `tokens` that it computes, its operations and its bytes of memory traffic, and the least seconds by either (None: the card's
    rate is not known)."""

    tokens: int
    flops: float
    bytes: float
    compute_s: float | None
    bandwidth_s: float | None

    @property
    def intensity(self) -> float:
        """Operations for each byte; above `Bottleneck.ridge` compute binds, below it bandwidth (at 16 bits)."""
        return self.flops / self.bytes

    @property
    def binds(self) -> str:
        """Which of COMPUTE and BANDWIDTH takes longer; empty where one is not known."""
        if self.compute_s is None or self.bandwidth_s is None:
            return ""
        return COMPUTE if self.compute_s > self.bandwidth_s else BANDWIDTH


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """`batch` sequences of a model at a context length. `prefill` is a step that computes all their prompts, `decode` one that adds a token
    to each; None with a `reason` where the model's own figures are not known.

    `weights_bytes` and `cache_bytes` are needed of `there_bytes`; `requests` of this context fit at once (None: the card's memory is not
    known). `ridge` is the card's operations for each byte, at 16 bits. `attention` says whether attention's own operations are in:
    they are not where the configuration does not tell the query heads. `reason` also names figures of the card that are not known.
    """

    prefill: Phase | None = None
    decode: Phase | None = None
    weights_bytes: float | None = None
    cache_bytes: float | None = None
    there_bytes: float | None = None
    requests: int | None = None
    batch: int = 1
    ridge: float | None = None
    attention: bool = False
    reason: str = ""

    @property
    def fits(self) -> bool | None:
        return None if self.requests is None else self.requests >= self.batch

    @property
    def prefill_binds(self) -> str:
        """COMPUTE or BANDWIDTH; CAPACITY where the batch does not fit; empty where it is not known."""
        return CAPACITY if self.fits is False else self.prefill.binds if self.prefill else ""

    @property
    def decode_binds(self) -> str:
        """As `prefill_binds`, of decoding."""
        return CAPACITY if self.fits is False else self.decode.binds if self.decode else ""


def bottleneck(
    model: Model, gpu: Gpu, *, context: int, batch: int = 1, weight_dtype: str = "auto", kv_dtype: str = "auto", tp: int = 1,
    memory_share: float = MEMORY_SHARE,
) -> Bottleneck:  # fmt: skip
    """The bottleneck on `tp` cards. A precision is a name of `physics.BYTES`, of the cache also one of `kv_size.FORMATS`. All weights are
    taken to be read in a step and used by each of its tokens: mixtures of experts are not covered."""
    if min(context, batch, tp) < 1:
        raise ValueError(f"context={context}, batch={batch} and tp={tp} must each be at least 1")
    weights, layers, card = weight_bytes(model, weight_dtype), _layers(model), cards(gpu, tp)
    form = FORMATS.get(kv_dtype) or (Format(bits=8 * BYTES[kv_dtype]) if kv_dtype in BYTES else None)
    if weights is None or layers is None or form is None:
        why = {"weights": weights, "shape": layers, f"cache in {kv_dtype!r}": form}
        return Bottleneck(batch=batch, reason=f"not known of {model.key}: " + ", ".join(what for what, its in why.items() if its is None))
    each = context * tp * bytes_per_token(layers, form, tp, context)
    held = weights + _input_embedding(model)
    there = None if card.memory is None else card.memory * memory_share
    narrow = "auto" if weight_dtype in WIDENED else weight_dtype
    moved, heads = weights + batch * each, _query_heads(model)
    return Bottleneck(
        prefill=_phase(model, card, batch * context, heads * batch * _prefill_pairs(layers, context), moved, narrow, layers),
        decode=_phase(model, card, batch, heads * batch * _decode_pairs(layers, context), moved, narrow, layers),
        weights_bytes=held, cache_bytes=batch * each, there_bytes=there, batch=batch, attention=heads > 0,
        requests=None if there is None else max(0, math.floor((there - held) / each)),
        ridge=card.flops / card.bytes_s if card.flops and card.bytes_s else None, reason=_lacking(card),
    )  # fmt: skip


def _lacking(card: Card) -> str:
    figures = {"memory": card.memory, "bandwidth": card.bytes_s, "16-bit rate": card.flops}
    missing = [what for what, its in figures.items() if its is None]
    return f"not known of {card.label}: {', '.join(missing)}" if missing else ""


def _phase(model: Model, card: Card, tokens: int, pairs: float, moved: float, narrow: str, layers: Layers) -> Phase:
    """A step of so many tokens and (query head, layer, pair of tokens), that moves so many bytes. Attention is computed at 16 bits."""
    # The scores of latent attention take the latent and the rotary part, their sum over values the latent again.
    numbers = layers.key + layers.value + (layers.key if layers.latent else 0)
    parameters, attention = float(model.parameters or 0), 2.0 * numbers * pairs
    compute_s = bandwidth_s = None
    if card.flops is not None:
        compute_s = tokens / most_tok_s_by_compute(parameters, card.flops, narrow) + attention / card.flops
    if card.bytes_s is not None:
        bandwidth_s = least_tpot_s(moved, 0.0, card.bytes_s)
    return Phase(tokens=tokens, flops=2 * parameters * tokens + attention, bytes=moved, compute_s=compute_s, bandwidth_s=bandwidth_s)


def _prefill_pairs(layers: Layers, context: int) -> float:
    """Pairs of a token and one that it attends to, itself and those before it, in all layers."""
    seen = min(context, layers.window or context)
    return layers.full * context * (context + 1) / 2 + layers.sliding * (seen * (seen + 1) / 2 + (context - seen) * seen)


def _decode_pairs(layers: Layers, context: int) -> float:
    return float(layers.full * context + layers.sliding * min(context, layers.window or context))


def _layers(model: Model) -> Layers | None:
    if (found := layers_of(model.config)) is not None:
        return found
    if model.layers is None or model.kv_heads is None or model.head_dim is None:
        return None
    return Layers(full=model.layers, sliding=0, window=0, heads=model.kv_heads, key=model.head_dim, value=model.head_dim)


def _query_heads(model: Model) -> int:
    """0 where the configuration does not tell them."""
    text = model.config.get("text_config") or model.config
    return int(text.get("num_attention_heads") or 0)


def _input_embedding(model: Model) -> float:
    """Bytes of an input embedding of its own (see `Model.parameters`), of which also quantised models keep 16 bits."""
    text = model.config.get("text_config") or model.config
    if text.get("tie_word_embeddings", True):
        return 0.0
    return float(text.get("vocab_size", 0) * text.get("hidden_size", 0)) * BYTES["auto"]

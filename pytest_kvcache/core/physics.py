"""What hardware cannot exceed: bounds on measured figures from a card's published rates and a model's shape. Pure.

A decoded token needs every weight, and its own sequence's keys and values, once from memory, and two operations for each
weight (Pope et al. 2022, "Efficiently scaling transformer inference", section 2). A figure beyond such a bound is a
measurement error, never an improvement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .gpus import GPUS
from .kv_size import Format, Layers, bytes_per_token
from .lengths import shortest
from .scenarios import ClosedLoop, Traffic
from .spec import Arm, Gpu, Model

TOLERANCE = 0.02
# Bytes of a weight or of a cached number; the framework's own choice is 16 bits for every model of the catalogue.
BYTES = {
    "auto": 2.0, "bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0, "fp32": 4.0, "float32": 4.0, "fp8": 1.0, "int8": 1.0,
    "int4": 0.5, "fp4": 0.5, "nvfp4": 0.5, "awq": 0.5, "gptq": 0.5,
}  # fmt: skip
CACHED_GB = 0.5  # weights below may stay in the card's own cache, which is faster than its memory
# Words of a server's command line after which a token may need fewer weights than the catalogue says.
OTHER_WEIGHTS = ("quant", "speculative", "draft", "hf-overrides", "hf_overrides")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A bound in the metric's unit, with its reason; `at_most` says on which side the possible lies."""

    value: float
    at_most: bool
    reason: str
    tolerance: float = TOLERANCE

    def broken_by(self, value: float) -> bool:
        """Whether a value lies beyond the bound by more than the tolerance."""
        far = 1 + self.tolerance
        return value > self.value * far if self.at_most else value * far < self.value


@dataclass(frozen=True, kw_only=True)
class Card:
    """Rates of the cards that serve together: bytes a second from memory, operations a second at 16 bits, bytes, watts."""

    label: str
    bytes_s: float | None = None
    flops: float | None = None
    memory: float | None = None
    power_w: float | None = None


def cards(gpu: Gpu, count: int = 1) -> Card:
    """`count` cards of one kind, each at its published rate."""

    def times(value: float | None, unit: float) -> float | None:
        return None if value is None else value * unit * count

    return Card(
        label=gpu.label if count == 1 else f"{count} x {gpu.label}", bytes_s=times(gpu.bandwidth_gb_s, 1e9),
        flops=times(gpu.bf16_tflops, 1e12), memory=times(gpu.memory_gb, 1e9), power_w=times(gpu.tdp_w, 1.0),
    )  # fmt: skip


def weight_bytes(model: Model, dtype: str = "auto") -> float | None:
    """Bytes that a decoded token needs of the weights; None where the catalogue does not know."""
    return None if model.parameters is None or dtype not in BYTES else model.parameters * BYTES[dtype]


def kv_bytes_per_token(model: Model, dtype: str = "auto") -> float | None:
    """Bytes of the keys and values of one token: 2 x layers x KV heads x head size x bytes of a number."""
    if model.layers is None or model.kv_heads is None or model.head_dim is None or dtype not in BYTES:
        return None
    size = model.head_dim
    layers = Layers(full=model.layers, sliding=0, window=0, heads=model.kv_heads, key=size, value=size)
    return bytes_per_token(layers, Format(bits=8 * BYTES[dtype]))


def least_tpot_s(weights: float, kv: float, bytes_s: float) -> float:
    """Least time of a decoded token: its weights and its sequence's cache (bytes), once from memory."""
    return (weights + kv) / bytes_s


def most_tok_s_by_memory(batch: int, token_s: float) -> float:
    """Most output tokens a second of `batch` sequences none of which decodes a token faster than `token_s`."""
    return batch / token_s


def most_tok_s_by_compute(parameters: float, flops: float, dtype: str = "auto") -> float:
    """Most tokens a second by arithmetic: two operations a weight; narrower numbers are computed faster in proportion."""
    return flops * max(1.0, BYTES["auto"] / BYTES[dtype]) / (2 * parameters)


def most_memory(card: Card) -> Limit | None:
    """Bytes that anything on the cards can occupy."""
    return None if card.memory is None else Limit(value=card.memory, at_most=True, reason=f"the memory of {card.label}")


def most_power(card: Card) -> Limit | None:
    """Watts that the cards may draw."""
    return None if card.power_w is None else Limit(value=card.power_w, at_most=True, reason=f"the power cap of {card.label}")


def most_tok_per_j(most_tok_s: float, idle_w: float) -> float:
    """Most output tokens a joule: the most tokens a second at no more power than the idle cards draw."""
    return most_tok_s / idle_w


def card_of(environment: Mapping[str, Any]) -> Card | None:
    """The cards of a fingerprint, all that the server may use; None where they are not in the catalogue, and on a CPU."""
    name, uuids = environment.get("identity", {}).get("gpu"), environment.get("context", {}).get("gpu_uuids")
    gpu = next((g for g in GPUS.values() if name in g.nvml_names), None)
    return cards(gpu, len(uuids)) if gpu and uuids else None


def limit_of(metric: str, scenario: Traffic, arm: Arm, model: Model | None, environment: Mapping[str, Any]) -> Limit | None:
    """The tightest bound on a metric of a scenario that is known; None where nothing is."""
    argv = [str(word) for word in environment.get("subject", {}).get("server_argv", ())]
    card = card_of(environment)
    if card is None or model is None or any(part in word for word in argv for part in OTHER_WEIGHTS):
        return None
    weights = weight_bytes(model, arm.weight_dtype) if arm.quantization == "auto" else None
    if weights is None or weights < CACHED_GB * 1e9:
        return None
    token_s = None if card.bytes_s is None else least_tpot_s(weights, _own_cache(model, arm, scenario, argv), card.bytes_s)
    by_compute = None
    if card.flops is not None and model.parameters is not None:
        by_compute = most_tok_s_by_compute(model.parameters, card.flops, arm.weight_dtype)
    tok_s = _most_tok_s(scenario, token_s, by_compute)
    return _bound(metric.partition(".")[0], scenario, card, token_s, tok_s, by_compute)


def _own_cache(model: Model, arm: Arm, scenario: Traffic, argv: Sequence[str]) -> float:
    """Bytes of the prompt's keys and values; 0 where their precision is not known."""
    if arm.kv_dtype == "auto" and any("cache-dtype" in word or "cache-type" in word or "cache_dtype" in word for word in argv):
        return 0.0
    return (kv_bytes_per_token(model, arm.kv_dtype) or 0.0) * shortest(scenario.isl)


def _most_tok_s(scenario: Traffic, token_s: float | None, by_compute: float | None) -> float | None:
    found = [] if by_compute is None else [by_compute]
    if token_s is not None and isinstance(scenario, ClosedLoop):
        found.append(most_tok_s_by_memory(scenario.concurrency, token_s))
    return min(found, default=None)


def _bound(name: str, scenario: Traffic, card: Card, token_s: float | None, tok_s: float | None, by_compute: float | None) -> Limit | None:
    by_memory = f"weights and cache of a token, read once by {card.label}"
    least = {"tpot_ms": 1.0, "e2e_ms": shortest(scenario.osl) - 1.0}
    if name in least and token_s is not None and least[name] > 0:
        return Limit(value=1e3 * token_s * least[name], at_most=False, reason=by_memory)
    most = {"output_tok_s": 1.0, "req_s": 1.0 / shortest(scenario.osl)}
    if name in most and tok_s is not None:
        return Limit(value=tok_s * most[name], at_most=True, reason=f"memory and arithmetic of {card.label}")
    if name == "total_tok_s" and by_compute is not None:  # prompts that are new, so that each token of theirs is computed
        return Limit(value=by_compute, at_most=True, reason=f"arithmetic of {card.label}")
    if name == "ttft_ms" and by_compute is not None:
        return Limit(value=1e3 * shortest(scenario.isl) / by_compute, at_most=False, reason=f"a prompt's arithmetic on {card.label}")
    return None

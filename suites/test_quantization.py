"""Quantised KV caches and weights: what a precision costs in quality, measured through the cache itself, and what it buys in speed."""

from dataclasses import replace

import pytest

from pytest_kvcache import DECODING, LIMITS, PROTOCOLS, Arm, ClosedLoop, Gate, Text

SIXTEEN_BITS = Arm(name="fp16")
CACHES = {name: Arm(name=name, kv_dtype=name) for name in ("fp8", "int8", "int4")}
METHODS = {"w8": "int8", "w4": "int4", "wfp8": "fp8", "w8a8": "w8a8", "awq": "awq", "gptq": "gptq"}
WEIGHTS = {name: Arm(name=name, quantization=method) for name, method in METHODS.items()}
OF_CACHES, OF_WEIGHTS = ((SIXTEEN_BITS, *arms.values()) for arms in (CACHES, WEIGHTS))
# As many windows as a limit of 0.5 % of the perplexity needs are asked of a GPU only: there, minutes.
TEXTS = [
    Text(windows=6, arms=OF_CACHES, device="cpu", profile="ci"),
    Text(windows=24, arms=OF_CACHES, device="cpu", profile="full", tasks=20),
    Text(windows=2, arms=OF_CACHES, scheme=DECODING, device="cpu", profile="full"),
    Text(windows=40, arms=OF_CACHES, device="gpu", profile="ci"),
    Text(windows=4, arms=OF_CACHES, scheme=DECODING, device="gpu", profile="ci"),
    Text(windows=160, arms=OF_CACHES, device="gpu", profile="full", tasks=60),
]
PUBLISHED = [Text(windows=160, arms=OF_CACHES, scheme=replace(s, step=64), device="gpu", profile="acceptance") for s in PROTOCOLS.values()]
TEXTS_OF_WEIGHTS = [
    Text(windows=6, arms=OF_WEIGHTS, device="cpu", profile="full", tasks=6),
    Text(windows=160, arms=OF_WEIGHTS, device="gpu", profile="full", tasks=60),
]


def claims(name):
    """Good enough for such a precision, and as good as it was."""
    limits = [Gate(metric, arm=name, limit=limit) for metric, limit in LIMITS[name].items()]
    return pytest.param(name, marks=pytest.mark.kv_gates(*limits, Gate("ppl_ratio", arm=name), Gate("kld.mean", arm=name)))


@pytest.mark.parametrize("kv_scenario", TEXTS + PUBLISHED, ids=str)
@pytest.mark.parametrize("precision", [claims(name) for name in CACHES])
def test_kv_precision(precision, kv_result, kv_gate):
    """A cache of fewer bits predicts the text nearly as one of 16 bits does, and no worse than it did."""
    kv_gate(kv_result)


@pytest.mark.parametrize("kv_scenario", TEXTS_OF_WEIGHTS, ids=str)
@pytest.mark.parametrize("precision", [claims(name) for name in WEIGHTS])
def test_weight_precision(precision, kv_result, kv_gate):
    """Weights of fewer bits predict the text nearly as those of 16 bits do, and no worse than they did."""
    kv_gate(kv_result)


def in_turns(arm, **shape):
    """A precision and 16 bits under one load, measured in turns: their ratio needs no baseline."""
    gates = [Gate(metric, arm=arm.name, against=SIXTEEN_BITS.name, margin=0.15) for metric in ("output_tok_s", "tpot_ms.p50")]
    load = ClosedLoop(arms=(SIXTEEN_BITS, arm), **shape)
    return pytest.param(arm.name, load, marks=pytest.mark.kv_gates(*gates), id=f"{arm.name}-{load}")


ON_TWO_CORES = {"isl": 256, "osl": 32, "concurrency": 1, "device": "cpu", "profile": "full"}
ON_A_CARD = {"isl": 2048, "osl": 128, "concurrency": 64, "device": "gpu"}
LOADS = [
    *(in_turns(arm, **ON_TWO_CORES) for arm in CACHES.values()),
    *(in_turns(arm, **ON_A_CARD, profile="ci" if name == "fp8" else "full") for name, arm in (CACHES | WEIGHTS).items()),
]


@pytest.mark.parametrize(("precision", "kv_scenario"), LOADS)
def test_speed_of_precision(precision, kv_result, kv_gate):
    """Fewer bits are served as fast as 16; how much faster stands beside what they cost in the report's table of quality."""
    kv_gate(kv_result)

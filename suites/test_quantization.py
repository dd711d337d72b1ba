"""Quantised KV caches and weights: what a precision costs in quality, measured through the cache itself."""

from dataclasses import replace

import pytest

from pytest_kvcache import LIMITS, PROTOCOLS, Arm, Gate, Text

PRECISIONS = ("fp8", "int8", "int4")
CACHES = (Arm(name="fp16"), *(Arm(name=name, kv_dtype=name) for name in PRECISIONS))
WEIGHTS = (Arm(name="fp16"), Arm(name="w8", quantization="int8"), Arm(name="w4", quantization="int4"))
# As many windows as a limit of 0.5 % of the perplexity needs are asked of a GPU only: there, minutes.
TEXTS = [
    Text(windows=6, arms=CACHES, device="cpu", profile="ci"),
    Text(windows=24, arms=CACHES, device="cpu", profile="full", tasks=20),
    Text(windows=40, arms=CACHES, device="gpu", profile="ci"),
    Text(windows=160, arms=CACHES, device="gpu", profile="full", tasks=60),
]
PUBLISHED = [Text(windows=160, arms=CACHES, scheme=replace(s, step=64), device="gpu", profile="acceptance") for s in PROTOCOLS.values()]
OF_WEIGHTS = [
    Text(windows=6, arms=WEIGHTS, device="cpu", profile="full", tasks=20),
    Text(windows=160, arms=WEIGHTS, device="gpu", profile="full", tasks=60),
]


def claims(name):
    """Good enough for such a precision, and as good as it was."""
    limits = [Gate(metric, arm=name, limit=limit) for metric, limit in LIMITS[name].items()]
    return pytest.param(name, marks=pytest.mark.kv_gates(*limits, Gate("ppl_ratio", arm=name), Gate("kld.mean", arm=name)))


@pytest.mark.parametrize("kv_scenario", TEXTS + PUBLISHED, ids=str)
@pytest.mark.parametrize("precision", [claims(name) for name in PRECISIONS])
def test_kv_precision(precision, kv_result, kv_gate):
    """A cache of fewer bits predicts the text nearly as one of 16 bits does, and no worse than it did."""
    kv_gate(kv_result)


@pytest.mark.parametrize("kv_scenario", OF_WEIGHTS, ids=str)
@pytest.mark.parametrize("precision", [claims(name) for name in ("w8", "w4")])
def test_weight_precision(precision, kv_result, kv_gate):
    """Weights of fewer bits predict the text nearly as those of 16 bits do, and no worse than they did."""
    kv_gate(kv_result)

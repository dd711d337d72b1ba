"""What a framework's probe can be asked of a text: which arms it has, and what it is told of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .framework import Framework
from .scenarios import Text
from .spec import Arm, json_hash

TEXT_VERSION = 1  # of what a text's hash stands for
TOLD = ("kv_dtype", "quantization")  # what of an arm a probe can be told


def asks(framework: Framework, arm: Arm) -> dict[str, Any] | None:
    """What the probe is told of an arm; None where it cannot do that."""
    probe = framework.probe
    if probe is None or set(arm.asked()) - set(TOLD) or arm.kv_dtype not in probe.kv or arm.quantization not in probe.weights:
        return None
    return {**probe.kv[arm.kv_dtype], **probe.weights[arm.quantization]}


def unscored(framework: Framework, scenario: Text, arms: Iterable[str], *, beside: str = "", random: bool = False) -> str:
    """Why the framework cannot score the text with these arms, of a model of `random` weights, or `beside` an option; empty when it can."""
    if beside:
        return f"a text is scored once, in the framework's own interpreter; leave {beside} out"
    if random:
        return "the model has random weights: no text is likely"
    if framework.probe is None:
        why = framework.no_probe or "it gives no log-probabilities that are known to come through its cache"
        return f"{framework.name} scores no text: {why}"
    for arm in scenario.arms:
        if arm.name in arms and asks(framework, arm) is None:
            asked = ", ".join(f"{k}={v!r}" for k, v in arm.asked().items())
            kinds = ", ".join(k for k in framework.probe.kv if k != "auto")
            weights = ", ".join(k for k in framework.probe.weights if k != "auto")
            has = f"of the cache {kinds}" + (f", of the weights {weights}" if weights else "")
            return f"{framework.name} scores no text with {asked}; it has {has}"
    return ""


def text_hash(scenario: Text, corpus: str, tokens: Iterable[Iterable[int]]) -> str:
    """What a figure is a figure of: the corpus (its hash), the scheme, and the very tokens of each window."""
    return json_hash([TEXT_VERSION, corpus, str(scenario.scheme), [list(t) for t in tokens]])

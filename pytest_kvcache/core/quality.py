"""Whether a precision's text may be judged at all, and whether it is good enough. Pure.

A text that is scored in one pass never reads the KV cache back: int2 then shows no error at all. So beside every measurement stand a floor
(16-bit in steps against 16-bit in one pass: what the arithmetic alone makes of another order) and a negative control (a cache made worse on
purpose), and a figure counts only where the control moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .perplexity import Figure, Scores
from .rule import INVALID, PASS, REGRESSION

NOT_SEEN = "the probe does not see the cache"
WIDE = 3.0  # standard errors that two means lie apart to be called different: one in a thousand by chance
LUCKY = 0.05  # a perplexity that is better by more than this, and than five times the limit, is of another text


@dataclass(frozen=True, kw_only=True)
class Controls:
    """`floor` and `negative` are summaries (`core.perplexity.summarise`) of the two controls, against the 16-bit reference in steps."""

    floor: Mapping[str, Figure]
    negative: Mapping[str, Figure]


def not_seen(controls: Controls, reads_back: bool) -> str:
    """Why no figure of this measurement counts; empty where the negative control lies clearly above the floor."""
    if not reads_back:
        return f"{NOT_SEEN}: the text was scored in one pass, which attends to fresh keys and values"
    floor, negative = controls.floor["kld.mean"], controls.negative["kld.mean"]
    if negative.value - WIDE * (negative.error or 0.0) <= floor.value + WIDE * (floor.error or 0.0):
        return f"{NOT_SEEN}: a cache made worse on purpose diverges by {negative.value:.2g} nats, 16 bits in one pass by {floor.value:.2g}"
    return ""


def not_applied(scores: Scores, precision: str) -> str:
    """Why a quantised cache was none: every token is the reference's, to the last bit."""
    if max(scores.kld, default=0.0) == 0.0 and list(scores.nll) == list(scores.base_nll):
        return f"{NOT_SEEN}, or {precision} was not applied: every token is exactly the 16-bit one"
    return ""


def within(base: float, new: float, limit: float) -> tuple[str, str]:
    """A perplexity against another and the increase that is allowed (a fraction): the word, and the reason where it is not `pass`."""
    increase = new / base - 1
    if increase < -max(5 * limit, LUCKY):
        return INVALID, f"suspicious: the perplexity is {-100 * increase:.3g} % better, so this is not the same test"
    if increase > limit:
        return REGRESSION, f"the perplexity is {100 * increase:.3g} % higher; {100 * limit:.3g} % are allowed"
    return PASS, ""

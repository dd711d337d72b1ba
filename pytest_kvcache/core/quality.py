"""Whether a precision's text may be judged at all, and whether it is good enough. Pure.

A text that is scored in one pass never reads the KV cache back: int2 then shows no error at all. So beside every measurement stand a floor
(16-bit in steps against 16-bit in one pass: what the arithmetic alone makes of another order) and a negative control (a cache made worse on
purpose), and a figure counts only where the control moved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .perplexity import Figure, Scores, scores_of, unusable
from .record import Trace
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


ALIKE, MOSTLY = 1e-6, 0.99  # nats: what a float32 of the same arithmetic leaves; of the tokens
FEW_BITS = re.compile(r"(int|fp|q|w|k8v)4|(?<![a-z0-9])4[_-]?bit|nvfp4|turboquant|ultraquant")  # no such precision is as good as 16 bits


def never_read(nll: Sequence[float], base_nll: Sequence[float], floor_nll: Sequence[float], precision: str) -> str:
    """Why a quantised cache was written and never read: its tokens are those of 16 bits in one pass, which are others than the
    reference's."""
    n = len(nll)
    as_floor = sum(abs(a - b) <= ALIKE for a, b in zip(nll, floor_nll, strict=True))
    as_base = sum(abs(a - b) <= ALIKE for a, b in zip(nll, base_nll, strict=True))
    if as_floor >= MOSTLY * n > as_base:
        return f"{NOT_SEEN}: with {precision} every token is that of 16 bits in one pass, so the cache was written and never read"
    return ""


def too_good(kld: Figure, floor: Figure, precision: str) -> str:
    """Why a precision of 4 bits or fewer was none: it diverges no more than the order of the arithmetic does."""
    if FEW_BITS.search(precision) and kld.value <= floor.value + WIDE * (floor.error or 0.0):
        return f"{NOT_SEEN}, or {precision} was not applied: it diverges by {kld.value:.2g} nats, 16 bits in one pass by {floor.value:.2g}"
    return ""


def controls_of(told: Mapping[str, Any]) -> Controls:
    """From what a trace keeps of its controls: `floor` and `negative`, of each figure its value and its error."""
    floor, negative = ({name: Figure(value=v, error=e) for name, (v, e) in told[of].items()} for of in ("floor", "negative"))
    return Controls(floor=floor, negative=negative)


def text_problem(trace: Trace) -> tuple[str, bool] | None:
    """Why the scores of a text do not count, and whether the machine is to blame, which it never is."""
    scores, told = scores_of(trace.tokens), trace.load
    if len(set(scores.chunks)) < 2:
        return "the text has one window only: nothing tells how far its figures hold", False
    if problem := unusable(scores):
        return problem, False
    if told.get("controls") and (problem := not_seen(controls_of(told["controls"]), told["reads_back"])):
        return problem, False
    if precision := told.get("precision"):
        problem = not_applied(scores, precision) or told.get("never_read", "")
        if not problem and told.get("controls"):
            mean = Figure(value=math.fsum(scores.kld) / len(scores.kld))
            problem = too_good(mean, controls_of(told["controls"]).floor["kld.mean"], precision)
        if problem:
            return problem, False
    return (told["garbage"], False) if told.get("garbage") else None


def too_lucky(increase: float, most: float = LUCKY) -> str:
    """Why a perplexity that is better by so much (`increase`, a fraction, is below 0 then) is of another text; empty when it may be."""
    return f"suspicious: the perplexity is {-100 * increase:.3g} % better, so this is not the same test" if increase < -most else ""


def within(base: float, new: float, limit: float) -> tuple[str, str]:
    """A perplexity against another and the increase that is allowed (a fraction): the word, and the reason where it is not `pass`."""
    increase = new / base - 1
    if why := too_lucky(increase, max(5 * limit, LUCKY)):
        return INVALID, why
    if increase > limit:
        return REGRESSION, f"the perplexity is {100 * increase:.3g} % higher; {100 * limit:.3g} % are allowed"
    return PASS, ""

"""The looks of a gate: an estimate and a margin become a word, or the wish for more runs. Pure.

Looks are taken at 3, 5, 8 and 12 runs with a quarter of alpha each. A regression needs p_seq <= 0.002 as well, so that
hundreds of gates raise no false alarm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from . import stats

PASS, IMPROVEMENT, REGRESSION = "pass", "improvement", "regression"
INCONCLUSIVE, INVALID, NO_BASELINE = "inconclusive", "invalid", "no-baseline"
VERDICTS = (REGRESSION, INVALID, NO_BASELINE, INCONCLUSIVE, IMPROVEMENT, PASS)  # worst first

P_SEQ_LIMIT = 0.002
LOOKS = (3, 5, 8, 12)
FUTILE = "futile"
MIN_BASE_RUNS = 5


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a gate is judged on a kind of device: default margin, session prior, planned looks, runs to record, and
    the fewest that a baseline has.

    `alpha` is the error of each one-sided claim over all looks, `weight` a look's share of it; `futility` gives up at the
    second look on what the last cannot decide; `full_floors` enforces the floors of `core.samples.full_floor`.
    """

    margin: float = 0.05
    session_prior: float = 0.0075
    looks: tuple[int, ...] = LOOKS
    record_runs: int = 2
    record_sessions: int = 5
    base_runs: int = MIN_BASE_RUNS
    futility: bool = False
    weight: float = 1 / len(LOOKS)
    alpha: float = stats.ALPHA
    full_floors: bool = False


# On a CPU restarts differ by 7 to 10 % (measured), so the margin is wide and more than five runs buy nothing.
RULES = {
    "gpu": Rule(),
    "cpu": Rule(margin=0.15, session_prior=0.02, looks=(3, 5), record_runs=5, record_sessions=1),
}
# Two arms measured in turns, looked at by the round: a session's shift is in both and cancels.
PAIRED = Rule(margin=0.03, session_prior=0.0, looks=(4, 6, 8, 12))


def rule_for(kind: str, profile: str) -> Rule:
    """The rule on a `cpu` or `gpu`. Profile `ci` gives up early on what its budget cannot decide, `acceptance` enforces all floors."""
    return dataclasses.replace(RULES[kind], futility=profile == "ci" and kind == "gpu", full_floors=profile == "acceptance")


class Sides(Protocol):
    """The two sides of a comparison, as far as the runs go."""

    def estimate(self, runs: int) -> stats.Estimate:
        """From the first `runs`."""

    def projected(self, e: stats.Estimate, runs: int) -> stats.Estimate:
        """As if there were `runs`, with the mean and the spread of those that `e` rests on."""

    def weaken(self, word: str, reason: str, e: stats.Estimate, half: float, decided: Callable[[float], str]) -> tuple[str, str, float]:
        """A word and its reason where the runs themselves or the machine speak against it, and the log ratio above which a
        margin must lie for a pass to stand with that (that of `e` where nothing speaks against it). `half` is half the interval's width,
        `decided` the word of this look had the log ratio been so much larger."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The look that decided, or the last: its word and reason, the estimate, the ends of its interval (log ratios), and the
    p-value of "not worse" under all looks so far. `certain` is the log margin that these runs could certify."""

    word: str
    reason: str
    estimate: stats.Estimate
    p_seq: float
    low: float
    high: float
    certain: float
    more_runs: int | None = None


def look_by_look(sides: Sides, runs: int, delta: float, rule: Rule, *, final: bool) -> Look:
    """Takes each planned look that `runs` allow, in order, and freezes at the first that decides. At least the first look is taken.

    `final` says that no more runs will come: the last complete look then counts as the last. `delta` is the log margin; below 0, it
    is a gain that is claimed, and what is not as much better counts as worse.
    """
    p_seq, more = 1.0, None
    looks = [n for n in rule.looks if n <= runs]
    for n in looks:
        e = sides.estimate(n)
        p_seq = min(p_seq, e.p_worse(min(delta, 0.0)) / rule.weight)
        half, last = e.bound(rule.alpha * rule.weight), n == rule.looks[-1] or (final and n == looks[-1])
        plain = decide(e.theta, half, delta, p_seq=p_seq, last=last)
        futile = rule.futility and not last and n in rule.looks[1:2] and delta / 2 < e.theta < delta
        if plain[0] == INCONCLUSIVE and n != looks[-1] and not futile:
            continue
        again = partial(_decided_by, e.theta, half, delta, p_seq, last)
        word, reason, certain = sides.weaken(*plain, e, half, again)
        if word != INCONCLUSIVE:
            break
        # More runs only help where their spread is what stands in the way.
        more = more_runs(sides, e, delta, rule, p_seq) if (word, reason) == plain else None
        if futile and more is None and (word, reason) == plain:
            reason = f"{FUTILE} within this profile's budget: the change lies between half the margin and the margin"
            break
    more = more if word == INCONCLUSIVE else None
    low, high = e.theta - half, e.theta + half
    return Look(
        word=word, reason=reason, estimate=e, p_seq=min(1.0, p_seq), low=low, high=high, certain=max(high, certain), more_runs=more
    )  # fmt: skip


def _decided_by(theta: float, half: float, delta: float, p_seq: float, last: bool, more: float) -> str:
    """The word of a look had its log ratio been larger by `more`."""
    return decide(theta + more, half, delta, p_seq=p_seq, last=last)[0]


def decide(theta: float, half: float, delta: float, *, p_seq: float, last: bool) -> tuple[str, str]:
    """One look's word and, when it is `inconclusive`, the reason. `half` is half the interval's width.

    Pass if U < delta; regression if L > delta, or at the last look L > 0 and theta > delta.
    """
    low, high = theta - half, theta + half
    if high < delta:
        return (IMPROVEMENT if delta > 0 and high < 0 and theta < -delta else PASS), ""
    if low > delta or (last and low > 0 and theta > delta):
        if p_seq <= P_SEQ_LIMIT:
            return REGRESSION, ""
        return INCONCLUSIVE, f"suspected: worse by more than the margin, but chance is not excluded (p {p_seq:.2g}, needed {P_SEQ_LIMIT:g})"
    return INCONCLUSIVE, "the interval reaches beyond the margin"


def more_runs(sides: Sides, e: stats.Estimate, delta: float, rule: Rule, p_seq: float) -> int | None:
    """How many more runs, with the mean and the spread of those made, would settle the gate at a look still to come.

    None when no planned look would: a session makes no more runs than the rule's last look.
    """
    for n in rule.looks:
        if n <= e.new_runs:
            continue
        then = sides.projected(e, n)
        p_seq = min(p_seq, then.p_worse(min(delta, 0.0)) / rule.weight)
        word, _ = decide(then.theta, then.bound(rule.alpha * rule.weight), delta, p_seq=p_seq, last=n == rule.looks[-1])
        if word != INCONCLUSIVE:
            return n - e.new_runs
    return None

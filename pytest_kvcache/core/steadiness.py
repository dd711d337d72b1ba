"""What runs tell besides their mean: two levels, a spread too wide for any, a drift, more noise than before. Pure.

All values are logs oriented so that + is worse (`core.stats.worse_logs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from . import stats
from .rule import IMPROVEMENT, INCONCLUSIVE, PASS, REGRESSION

UNSTABLE_SD = 0.25
NOISIER_P = 0.001
DRIFT, DRIFT_P = 0.01, 0.01


@dataclass(frozen=True, kw_only=True)
class Unsteady:
    """Why runs have no one level: the best and the worst that they may be said to have, and the two groups they fall into."""

    best: float
    worst: float
    groups: tuple[tuple[float, ...], tuple[float, ...]]

    def words(self, what: str, better: str) -> str:
        """`new runs: 3 near 100, 2 near 121`, in the metric's own unit."""
        levels = [math.exp(stats.mean(g) if better == "lower" else -stats.mean(g)) for g in self.groups]
        return f"{what}: " + ", ".join(f"{len(g)} near {level:.4g}" for g, level in zip(self.groups, levels, strict=True))


def unsteady(logs: Sequence[float]) -> Unsteady | None:
    """None for steady runs. Two levels more than 10 % apart are their means; a CV above 25 % goes from one end to the other."""
    if max(logs) - min(logs) <= stats.LEVELS_APART:
        return None
    ordered = sorted(logs)
    if cut := stats.two_levels(ordered):
        groups = tuple(ordered[:cut]), tuple(ordered[cut:])
        return Unsteady(best=stats.mean(groups[0]), worst=stats.mean(groups[1]), groups=groups)
    if stats.mean_variance(ordered)[1] <= UNSTABLE_SD**2:
        return None
    cut = max(range(1, len(ordered)), key=lambda i: ordered[i] - ordered[i - 1])
    return Unsteady(best=ordered[0], worst=ordered[-1], groups=(tuple(ordered[:cut]), tuple(ordered[cut:])))


def outlier(logs: Sequence[float]) -> Unsteady | None:
    """One run more than 10 % off the others, and by more than six times the sd of those; None where there is none of four or more."""
    if len(logs) < 4 or max(logs) - min(logs) <= stats.LEVELS_APART:
        return None
    ordered = tuple(sorted(logs))
    for cut, one, rest in ((1, ordered[0], ordered[1:]), (len(ordered) - 1, ordered[-1], ordered[:-1])):
        middle, var = stats.mean_variance(rest)
        if abs(one - middle) > max(stats.LEVELS_APART, stats.LEVELS_SDS * math.sqrt(var)):
            return Unsteady(best=min(one, middle), worst=max(one, middle), groups=(ordered[:cut], ordered[cut:]))
    return None


def unless_unsteady(word: str, theta: float, delta: float, best: float, worst: float) -> str:
    """A word stands beside unsteady runs only if the best and the worst level by themselves would bear it out.

    `best` and `worst` are log ratios: noise neither hides a loss that every level shows, nor excuses one that a level shows.
    """
    if (word == REGRESSION and best <= delta) or (word in (PASS, IMPROVEMENT) and worst >= delta):
        return INCONCLUSIVE
    return PASS if word == IMPROVEMENT and worst >= -delta else word


def drift_note(logs: Sequence[float], better: str) -> tuple[str, ...]:
    """A trend from the first run to the last, which no session term holds."""
    if max(logs) - min(logs) <= DRIFT:
        return ()
    change, p = stats.trend(logs)
    if abs(change) <= DRIFT or p >= DRIFT_P:
        return ()
    value = 100 * math.expm1(change if better == "lower" else -change)
    return (f"drift: {value:+.1f} % from the first run to the last (p {p:.2g}); measure old and new in turns",)


def noisier_note(new_var: float, new_runs: int, old: stats.Stored) -> tuple[str, ...]:
    """New runs that spread more than those of the baseline."""
    if new_var <= max(old.var, stats.FLOOR**2) or stats.p_noisier(new_var, new_runs, old) >= NOISIER_P:
        return ()
    new_sd, old_sd = 100 * math.sqrt(new_var), 100 * math.sqrt(old.var)
    return (f"noisier than the baseline: runs spread by {new_sd:.2g} %, those of the baseline by {old_sd:.2g} %",)

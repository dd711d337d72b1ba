"""The two sides of a comparison: new runs against a baseline, or two arms round by round. See `core.rule.Sides`. Pure.

All values are logs oriented so that + is worse (`core.stats.worse_logs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import stats
from .canary import Canary
from .rule import INCONCLUSIVE, PASS, REGRESSION
from .steadiness import Unsteady, drift_note, noisier_note, outlier, unless_unsteady, unsteady


def _unless_shifted(word: str, allowance: float, decided: Callable[[float], str]) -> str:
    """A verdict that the machine's own state could have made is none: it must be decided alike with so much against it."""
    if word == INCONCLUSIVE:
        return word
    against = decided(-allowance if word == REGRESSION else allowance)
    if word == REGRESSION:
        return word if against == REGRESSION else INCONCLUSIVE
    return against if against in (PASS, word) else INCONCLUSIVE


@dataclass(frozen=True)
class Against:
    """New runs in the order they were made, against a baseline; `delta` is the log margin."""

    old: stats.Stored
    new: Sequence[float]
    delta: float
    better: str
    canary: Canary
    old_unsteady: Unsteady | None

    def estimate(self, runs: int) -> stats.Estimate:
        return stats.compare(self.old, *stats.mean_variance(self.new[:runs]), runs)

    def projected(self, e: stats.Estimate, runs: int) -> stats.Estimate:
        return stats.compare(self.old, *stats.mean_variance(self.new[: e.new_runs]), runs)

    def weaken(self, word: str, reason: str, e: stats.Estimate, half: float, decided: Callable[[float], str]) -> tuple[str, str, float]:
        found, certain = unsteady(self.new[: e.new_runs]), e.theta
        if found or self.old_unsteady:
            best, worst = self._levels(e, found)
            word, certain = unless_unsteady(word, e.theta, self.delta, best, worst), worst
            if word == INCONCLUSIVE and not reason.startswith("suspected"):
                reason = f"unstable: {self._unsteady_words(found)}"
        if shift := self.canary.shift(e.new_runs):
            before = word
            word, certain = _unless_shifted(word, shift.allowance, decided), max(certain, e.theta + half + shift.allowance)
            if word == INCONCLUSIVE != before:
                reason = f"{shift.words}: that alone may have made the change; measure again"
        return word, reason, certain

    def _levels(self, e: stats.Estimate, found: Unsteady | None) -> tuple[float, float]:
        """The best and the worst log ratio, taking the levels of one side at a time.

        A loss against a baseline of two levels stands unless the new runs are as good as the worse of these, margin or not.
        """
        best = worst = e.theta
        if found:
            best, worst = min(best, found.best - self.old.mean), max(worst, found.worst - self.old.mean)
        if self.old_unsteady:
            middle = e.theta + self.old.mean
            best = min(best, middle - self.old_unsteady.worst + self.delta)
            worst = max(worst, middle - self.old_unsteady.best)
        return best, worst

    def _unsteady_words(self, found: Unsteady | None) -> str:
        sides = ((found, "new runs"), (self.old_unsteady, "baseline runs"))
        return "; ".join(side.words(what, self.better) for side, what in sides if side)

    def notes(self, runs: int, *, told: bool) -> tuple[str, ...]:
        """What should be known beside a verdict on the first `runs`; `told` when it says itself that they are unstable."""
        new, found = self.new[:runs], unsteady(self.new[:runs])
        odd, shift = None if found else outlier(new), self.canary.shift(runs)
        return (
            *((f"unstable: {self._unsteady_words(found)}",) if (found or self.old_unsteady) and not told else ()),
            *((f"outlier: {odd.words('new runs', self.better)}",) if odd else ()),
            *drift_note(new, self.better),
            *noisier_note(stats.mean_variance(new)[1], runs, self.old),
            *((shift.words,) if shift else ()),
            *((note,) if (note := self.canary.note) else ()),
        )


@dataclass(frozen=True)
class Pairs:
    """Log ratios of two arms, one a round; `delta` is the log margin."""

    ratios: Sequence[float]
    delta: float
    better: str

    def estimate(self, runs: int) -> stats.Estimate:
        return stats.compare_pairs(*stats.mean_variance(self.ratios[:runs]), runs)

    def projected(self, e: stats.Estimate, runs: int) -> stats.Estimate:
        return stats.compare_pairs(*stats.mean_variance(self.ratios[: e.new_runs]), runs)

    def weaken(self, word: str, reason: str, e: stats.Estimate, half: float, decided: Callable[[float], str]) -> tuple[str, str, float]:
        found = unsteady(self.ratios[: e.new_runs])
        if found is None:
            return word, reason, e.theta
        word = unless_unsteady(word, e.theta, self.delta, found.best, found.worst)
        if word == INCONCLUSIVE and not reason.startswith("suspected"):
            reason = f"unstable: {self._words(found)}"
        return word, reason, found.worst

    def _words(self, found: Unsteady) -> str:
        return found.words("new to old by the round", self.better)

    def notes(self, runs: int, *, told: bool) -> tuple[str, ...]:
        found = unsteady(self.ratios[:runs])
        return (f"unstable: {self._words(found)}",) if found and not told else ()

"""The rules that are compared, on sessions whose truth is known: ours as the product judges, and the naive ones. Counts only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvcache.core import gate, stats

from .gate_noise import BLOCK, Logs, Noise, as_figures, draw

GATES, MARGIN = 300, 0.05
RUNS = gate.rule_for("gpu", "full").looks[-1]  # the most new runs of a gate
CAUGHT, PASSED, OPEN = 0, 1, 2
CODES = {gate.REGRESSION: CAUGHT, gate.PASS: PASSED, gate.IMPROVEMENT: PASSED, gate.INCONCLUSIVE: OPEN}

Counts = NDArray[np.int64]
Judged = tuple[Counts, Counts]  # of each gate: CAUGHT, PASSED or OPEN, and the new runs that it took


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What is true: every gate got worse by `loss`, a fraction of the figure's own value, and `noise` lies over it."""

    loss: float
    noise: Noise
    better: str = "lower"


CVS = (0.02, 0.035)
LOSSES = (0.0, 0.05, 0.07, 0.10)
BLOCKS = tuple((cv, shared) for cv in (0.01, 0.02, 0.03) for shared in (0.0, 0.5))
# What else is simulated: changes of `Noise` and of `Condition`.
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as above": ({}, {}),
    "higher is better": ({}, {"better": "higher"}),
    "normal restarts": ({"restart": "normal"}, {}),
    "no drift": ({"drift": 0.0}, {}),
    "drift 2 %": ({"drift": 0.02}, {}),
    "session shift 1 %": ({"common_sd": 0.006, "own_sd": 0.008}, {}),
    "session shift 2 %": ({"common_sd": 0.012, "own_sd": 0.016}, {}),
    "CVs not cut off": ({"least": 0.0, "most": math.inf}, {}),
}


def condition(loss: float, cv: float, other: str = "as above") -> Condition:
    """`loss` of every gate at a median CV of `cv`, under the noise of the main tables or another of `OTHER`."""
    noise, rest = OTHER[other]
    return Condition(loss=loss, noise=Noise(cv=cv, **noise), **rest)


def of_one_cv(cv: float, shared: float) -> Condition:
    """Nothing got worse, and all gates have one CV, a part of it in common with their block."""
    return Condition(loss=0.0, noise=Noise(cv=cv, spread=0.0, shared=shared))


def ours(base: Logs, new: Logs, better: str, *, profile: str) -> Judged:
    """The product's verdicts on a GPU. A verdict that is not about the numbers is a fault of the simulation: KeyError."""
    rule = gate.rule_for("gpu", profile)
    found = [
        gate.judge(gate.Base(sessions=tuple(map(tuple, b))), n, better=better, margin=MARGIN, rule=rule)
        for b, n in zip(as_figures(base, better), as_figures(new, better), strict=True)
    ]
    return np.array([CODES[v.verdict] for v in found]), np.array([len(v.runs) for v in found])


def threshold(base: Logs, new: Logs, better: str, *, margin: float, base_runs: int, new_runs: int) -> Judged:
    """The naive rule: is the mean of the first `new_runs` worse than that of the last `base_runs` by more than `margin`?"""
    old = as_figures(base.reshape(len(base), -1)[:, -base_runs:], better)
    ratio = np.mean(as_figures(new[:, :new_runs], better), axis=1) / np.mean(old, axis=1)
    worse = ratio > 1 + margin if better == "lower" else ratio < 1 - margin
    return np.where(worse, CAUGHT, PASSED), np.full(len(base), new_runs)


FULL, CI = "ours", "ours with futility stop (`ci`)"
RULES: dict[str, Callable[[Logs, Logs, str], Judged]] = {
    FULL: partial(ours, profile="full"),
    CI: partial(ours, profile="ci"),
    "run v run, 5 %": partial(threshold, margin=0.05, base_runs=1, new_runs=1),
    "run v run, 10 %": partial(threshold, margin=0.10, base_runs=1, new_runs=1),
    "mean of 10 v mean of 3, 5 %": partial(threshold, margin=0.05, base_runs=10, new_runs=3),
    "mean of 10 v mean of 12, 5 %": partial(threshold, margin=0.05, base_runs=10, new_runs=12),
}


def session(condition: Condition, rules: Iterable[str], seed: tuple[int, ...]) -> dict[str, Judged]:
    """One session under each rule. The same seed is the same noise, whatever the loss."""
    base, new = draw(seed, condition.noise, gates=GATES, runs=RUNS)
    worse = new + stats.log_margin(condition.loss, condition.better)
    return {name: RULES[name](base, worse, condition.better) for name in rules}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Sessions under one rule: gates by code (sessions, 3), mean new runs of a gate (sessions,) and of a block (sessions,).

    A block of 30 gates shares its server starts, so it takes as many runs as the longest of its gates.
    """

    counts: Counts
    runs: NDArray[np.float64]
    block_runs: NDArray[np.float64]

    def shares(self, code: int) -> NDArray[np.float64]:
        """Share of each session's gates."""
        return np.asarray(self.counts[:, code] / self.counts.sum(axis=1))


def tally(judged: Sequence[Judged]) -> Tally:
    """Counts the sessions of one rule. Their gates must be whole blocks."""
    counts = np.array([np.bincount(codes, minlength=3) for codes, _ in judged])
    runs = np.array([used for _, used in judged])
    blocks = runs.reshape(len(judged), -1, BLOCK).max(axis=2)
    return Tally(counts=counts, runs=runs.mean(axis=1), block_runs=blocks.mean(axis=1))


def mean_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over the sessions and two standard errors of it: gates of a session depend on each other, sessions do not."""
    return float(values.mean()), float(2 * values.std(ddof=1) / len(values) ** 0.5)


def rate_bounds(events: int, sessions: int) -> tuple[float, float]:
    """95 % bounds of a rate per session after `events` rare ones (exact, Poisson)."""
    from scipy.special import gammaincinv

    low = gammaincinv(events, 0.025) if events else 0.0
    return float(low) / sessions, float(gammaincinv(events + 1, 0.975)) / sessions

"""Which of the measurements that were made stand for a run, and which for a round of two arms. Pure; the same for a stored run.

A scenario that was spoiled is measured again, with what was measured in turns with it: the last that counts is that of its run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import stats
from .gate import geometric_mean
from .metrics import quantile_of

Row = dict[str, Any]
CUT = 0.25  # of the windows' ratios at each end


def runs_of(measurements: Sequence[Row], scenario: str, arm: str) -> list[Row]:
    """The measurement of each run of an arm that has one that counts, in the order of the runs."""
    return list(_by_run(measurements, scenario, arm).values())


def rounds_of(measurements: Sequence[Row], scenario: str, arms: tuple[str, str]) -> list[tuple[Row, Row]]:
    """The measurements of two arms, side by side, of each round in which both count."""
    first, second = (_by_run(measurements, scenario, arm) for arm in arms)
    return [(m, second[run]) for run, m in first.items() if run in second]


def _by_run(measurements: Sequence[Row], scenario: str, arm: str) -> dict[int, Row]:
    return {m["run"]: m for m in measurements if m["valid"] and (m["scenario"], m["arm"]) == (scenario, arm)}


def values_of(rounds: Sequence[tuple[Row, Row]], metric: str) -> tuple[list[float], list[float]]:
    """A metric's values of both arms, round by round.

    Where the arms took turns in short windows, the second's is the first's times the interquartile mean of the windows' ratios: a
    machine that changes its speed between two windows spoils that one ratio only, and it is left out. A quantile above the median is
    that of all requests: a window has too few.
    """
    pairs = [_pair(one, other, metric) for one, other in rounds]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _pair(one: Row, other: Row, metric: str) -> tuple[float, float]:
    first, second = (m.get("windows", {}).get(metric, ()) for m in (one, other))
    if (quantile_of(metric) or 0.5) > 0.5 or not first or len(first) != len(second) or None in (*first, *second):
        return one["metrics"][metric], other["metrics"][metric]
    ratios = sorted(math.log(b / a) for a, b in zip(first, second, strict=True))
    cut = int(CUT * len(ratios))
    level = geometric_mean(first)
    return level, level * math.exp(stats.mean(ratios[cut : len(ratios) - cut]))

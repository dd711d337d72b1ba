"""How many requests a run needs before a quantile of it says anything: floors, default margins, MLPerf early stopping. Pure.

A P99 of few requests is nearly their largest value and its bias depends on their number. A floor is no error bar: requests
share batches, so it is the spread between runs that the gate judges by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .metrics import QUANTILES

TAIL = 5  # requests that must lie beyond a quantile
MEDIAN = 5  # requests whose largest is a 95 % upper bound of the median: ceil(ln 0.05 / ln 0.5)
DIFFER = 0.10  # sides whose number of requests differs by more are not compared
# Where floors are enforced in full: from this margin on, this many requests a run (smallest margin last).
FULL = {"p95": ((0.0, 1000),), "p99": ((0.20, 1000), (0.0, 5000))}
# The default margin of a quantile where the device's own is smaller, by requests a run (most first).
MARGINS = {"p95": ((0, 0.10),), "p99": ((5000, 0.10), (0, 0.20))}


def floor(q: float) -> int:
    """The fewest requests of a run whose quantile `q` may be gated: n(1-q) >= 5 in the tail, 5 up to the median."""
    return MEDIAN if q <= 0.5 else math.ceil(TAIL / (1 - q) - 1e-9)


def full_floor(q: float, margin: float) -> int:
    """The same where floors are enforced in full (profile acceptance): a P99 needs 1,000 at a margin of 20 %, 5,000 below."""
    steps = next((FULL[name] for name, value in QUANTILES.items() if abs(value - q) < 1e-9 and name in FULL), ())
    return max(floor(q), next((n for least, n in steps if margin >= least - 1e-9), 0))


def default_margin(device_margin: float, quantile: str, requests: int) -> float:
    """The margin of a gate that names none: the device's own, or the quantile's where that is wider."""
    return max(device_margin, next((margin for least, margin in MARGINS.get(quantile, ()) if requests >= least), 0.0))


def problem(q: float, margin: float, old: Sequence[int], new: Sequence[int], *, full: bool) -> str:
    """Why quantiles `q` of runs of so many requests may not be compared; empty when they may.

    `full` enforces the floors of `full_floor`. A side without numbers is not known and says nothing.
    """
    if not (old or new):
        return ""
    name, least = f"P{100 * q:g}", full_floor(q, margin) if full else floor(q)
    fewest = min([*old, *new])
    if fewest < least:
        return f"a {name} of {fewest} requests a run; {least} are the least" + (f" at a margin of {100 * margin:g} %" if full else "")
    if old and new:
        before, now = math.fsum(old) / len(old), math.fsum(new) / len(new)
        if abs(now - before) > DIFFER * before:
            return f"a {name} of {now:g} requests a run against one of {before:g}; its bias depends on their number"
    return ""


# MLPerf LoadGen's early stopping (inference_policies, appendix "Early Stopping Criterion"), tolerance d = 0.


def least_under(over: int, q: float, confidence: float = 0.99) -> int:
    """Fewest requests within the latency limit that make `over` requests beyond it acceptable:
    the least h with P[Binomial(h + over, 1 - q) <= over] < 1 - confidence, which is the incomplete beta I_q(h, over + 1)."""
    from scipy.special import betainc

    low, high = 0, 1
    while betainc(high, over + 1, q) >= 1 - confidence:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if betainc(middle, over + 1, q) >= 1 - confidence else (low, middle)
    return high


def least_queries(q: float, confidence: float = 0.99) -> int:
    """Fewest requests that give an early-stopping estimate of the quantile `q` at all."""
    return least_under(1, q, confidence) + 1


def estimate_rank(n: int, q: float, confidence: float = 0.99) -> int:
    """Which of `n` latencies, counted from the largest, is an upper bound of the quantile `q`; 0 when none is."""
    over = 0
    while least_under(over + 1, q, confidence) + over + 1 <= n:
        over += 1
    return over


def order_bound(q: float, confidence: float) -> int:
    """Fewest independent samples whose largest is an upper confidence bound of the quantile `q`: ln(1-confidence)/ln(q)."""
    return math.ceil(math.log(1 - confidence) / math.log(q) - 1e-9)

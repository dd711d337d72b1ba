"""What goes into the gate and what comes out: a stored number, a verdict, and which verdict fails its test. Plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from . import stats
from .rule import FUTILE, INCONCLUSIVE, INVALID, NO_BASELINE, P_SEQ_LIMIT, REGRESSION
from .units import factor

HUGE = 1e300  # no figure is larger
FEW_SAMPLES = "too few samples: "
SMOKE = "profile smoke takes one run: reported, not judged"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A stored number as the gate needs it: runs by session, and beside each its requests (`samples`) and what each part of the canary
    took, where that ran (`canary_on`; empty where it is not known of all).

    `unit`, `better` and `definition` are what it was stored as; an empty `better` is not known.
    `missing` says why there is none, `mismatch` why it is of something else and must not be compared. `others` are the stored
    runs of other cards of the same model: among these where it is a `reference`, else left aside. `session_sd` is the spread of sessions
    as it was calibrated on this machine, 0 where it was not.
    """

    sessions: tuple[tuple[float, ...], ...] = ()
    unit: str = ""
    definition: str = ""
    canary_on: str = ""
    canary_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: str = ""
    mismatch: str = ""
    better: str = ""
    samples: tuple[tuple[int, ...], ...] = ()
    others: int = 0
    reference: bool = False
    session_sd: float = 0.0

    @property
    def runs(self) -> tuple[float, ...]:
        return tuple(chain.from_iterable(self.sessions))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one gate, JSON-plain through `dataclasses.asdict`.

    `value` and `baseline` are geometric means, `change`, `low` and `high` fractions of the metric's own value
    (negative: it went down), `p_seq` the p-value of "not worse" under all looks taken. Every inconclusive one has
    `more_runs`, about how many more runs would settle it, or `certifiable`, the smallest margin that these could certify; or its reason
    says how many requests a run needs, where they are too few.
    """

    verdict: str
    reason: str = ""
    value: float | None = None
    baseline: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    p_seq: float | None = None
    runs: tuple[float, ...] = ()
    baseline_runs: tuple[float, ...] = ()
    more_runs: int | None = None
    certifiable: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def decided(self) -> bool:
        return self.verdict != INCONCLUSIVE

    @property
    def settled(self) -> bool:
        """Whether no further run of this session would change it."""
        return self.decided or self.reason.startswith((FUTILE, FEW_SAMPLES))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(stats.mean([math.log(v) for v in values]))


def as_change(theta: float, better: str) -> float:
    """A log ratio (+ is worse) as a fraction of the metric's own value."""
    return math.expm1(min(theta if better == "lower" else -theta, math.log(HUGE)))


def in_unit(base: Base, unit: str) -> Base | None:
    """The stored number in another unit of its dimension; None where there is no such conversion."""
    times = factor(base.unit, unit)
    if times is None or base.unit == unit:
        return base if times else None
    return dataclasses.replace(base, sessions=tuple(tuple(v * times for v in s) for s in base.sessions), unit=unit)


def false_alarms(verdicts: int) -> float:
    """How many false regressions chance alone could give at most: the local limit times the gates judged."""
    return P_SEQ_LIMIT * verdicts


def fails(verdict: str, reason: str, *, profile: str, strict: bool, recording: bool) -> bool:
    """Whether a verdict fails its test. Recording cures a missing baseline; profile smoke only reports."""
    if verdict in (REGRESSION, INVALID):
        return True
    if verdict == NO_BASELINE:
        return profile != "smoke" and not (recording and not reason)
    return verdict == INCONCLUSIVE and profile != "smoke" and (strict or profile == "acceptance")

"""The rule: new runs, a baseline and a margin become a verdict. The only place where a verdict is decided. Pure.

A verdict depends on its own gate's runs alone. Validity comes first: no path leads from NaN, zero, a missing value or
a missing baseline to `pass`. Looks are taken at 3, 5, 8 and 12 runs with a quarter of alpha each; a decision is frozen
at the look that made it. A regression needs p_seq <= 0.002 as well, so that hundreds of gates raise no false alarm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import stats

PASS, IMPROVEMENT, REGRESSION = "pass", "improvement", "regression"
INCONCLUSIVE, INVALID, NO_BASELINE = "inconclusive", "invalid", "no-baseline"
VERDICTS = (REGRESSION, INVALID, NO_BASELINE, INCONCLUSIVE, IMPROVEMENT, PASS)  # worst first

P_SEQ_LIMIT = 0.002
MIN_BASE_RUNS = 5
LOOKS = (3, 5, 8, 12)
UNSTABLE_SD = 0.25
# The canary (a fixed piece of work with no framework in it) repeats itself within a few per cent in one state of the machine.
CANARY_NOISE = 0.05
# How much of a canary's change (as a log) a server's figures may follow, either way. Seen on one machine: 0.33.
STATE_SHARE = 0.35
MISMATCH = "the baseline is of something else: "


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a gate is judged on a kind of device: default margin, session prior, planned looks, runs to record."""

    margin: float = 0.05
    session_prior: float = 0.0075
    looks: tuple[int, ...] = LOOKS
    record_runs: int = 2
    record_sessions: int = 5
    futility: bool = False
    weight: float = 1 / len(LOOKS)


# On a CPU restarts differ by 7 to 10 % (measured), so the margin is wide and more than five runs buy nothing.
RULES = {
    "gpu": Rule(),
    "cpu": Rule(margin=0.15, session_prior=0.02, looks=(3, 5), record_runs=5, record_sessions=1),
}


def rule_for(kind: str, profile: str) -> Rule:
    """The rule on a `cpu` or `gpu`; profile `ci` gives up early on gates that its budget cannot decide."""
    return dataclasses.replace(RULES[kind], futility=profile == "ci" and kind == "gpu")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A stored number as the gate needs it: runs by session, and what the canary took beside each.

    `missing` says why there is none, `mismatch` why it is of something else and must not be compared.
    """

    sessions: tuple[tuple[float, ...], ...] = ()
    unit: str = ""
    definition: str = ""
    canary_ms: tuple[tuple[float, ...], ...] = ()
    missing: str = ""
    mismatch: str = ""

    @property
    def runs(self) -> tuple[float, ...]:
        return tuple(v for s in self.sessions for v in s)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one gate, JSON-plain through `dataclasses.asdict`.

    `value` and `baseline` are geometric means, `change`, `low` and `high` fractions of the metric's own value
    (negative: it went down), `p_seq` the p-value of "not worse" under all looks taken.
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


def _invalid_values(values: Sequence[Any], whose: str) -> str:
    for v in values:
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v):
            return f"{whose} is not a finite number: {v!r}"
        if v <= 0:
            return f"{whose} is not positive: {v!r}"
    return ""


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _baseline_mean(base: Base) -> float:
    """Mean of session means on the log scale, as the estimate takes it."""
    return geometric_mean([geometric_mean(s) for s in base.sessions])


def as_change(theta: float, better: str) -> float:
    """A log ratio (+ is worse) as a fraction of the metric's own value."""
    return math.expm1(theta if better == "lower" else -theta)


def _check(base: Base, new: Sequence[Any], *, better: str, margin: float, unit: str, definition: str) -> Verdict | None:
    """The validity rules that need no statistics, first hit wins; None when the numbers may be compared."""
    if better not in ("lower", "higher"):
        return Verdict(verdict=INVALID, reason=f"direction {better!r} is neither lower nor higher")
    if not 0 < margin < 1:
        return Verdict(verdict=INVALID, reason=f"margin {margin!r} does not lie between 0 and 1")
    if base.mismatch:
        return Verdict(verdict=INVALID, reason=MISMATCH + base.mismatch)
    if not new and len(base.runs) < MIN_BASE_RUNS:
        few = f"only {len(base.runs)} of the {MIN_BASE_RUNS} runs that a baseline needs are stored"
        return Verdict(verdict=NO_BASELINE, reason=few if base.runs else base.missing or "no baseline is stored for this gate")
    if not new:
        return Verdict(verdict=INVALID, reason="nothing was measured: the metric is missing from every run")
    if problem := _invalid_values(new, "a measured value"):
        return Verdict(verdict=INVALID, reason=problem)
    if base.missing or not base.runs:
        return Verdict(
            verdict=NO_BASELINE, reason=base.missing or "no baseline is stored for this gate", runs=tuple(new), value=geometric_mean(new)
        )
    if problem := _invalid_values(base.runs, "a baseline value"):
        return Verdict(verdict=INVALID, reason=problem)
    for what, stored, measured in (("unit", base.unit, unit), ("definition", base.definition, definition)):
        if stored != measured:
            return Verdict(verdict=INVALID, reason=f"{what} differs: baseline {stored!r}, measured {measured!r}")
    return None


def machine_shift(base: Base, canary_ms: Sequence[float | None]) -> float:
    """How far the machine itself was from its state at the baseline: the canary's change as a log; 0 within its noise.

    0 too where the canary is not known of every run.
    """
    old, new = [v for s in base.canary_ms for v in s], [v for v in canary_ms if v]
    if not old or not new or len(new) < len(canary_ms):
        return 0.0
    shift = math.log(geometric_mean(new) / geometric_mean(old))
    return shift if abs(shift) > CANARY_NOISE else 0.0


def judge(
    base: Base,
    new: Sequence[float],
    *,
    better: str,
    margin: float,
    rule: Rule,
    unit: str = "",
    definition: str = "",
    final: bool = False,
    canary_ms: Sequence[float | None] = (),
) -> Verdict:
    """The verdict on all runs so far: takes each planned look in order and freezes at the first that decides.

    `final` says that no more runs will come (budget spent): the last complete look then counts as the last.
    `inconclusive` before that means "measure more". `canary_ms` stands beside the new runs, as in the baseline: where
    the machine was in another state, a verdict must stand with STATE_SHARE of the canary's change against it.
    """
    if bad := _check(base, new, better=better, margin=margin, unit=unit, definition=definition):
        return dataclasses.replace(bad, margin=margin)
    if len(base.runs) < MIN_BASE_RUNS or len(new) < rule.looks[0]:
        few = f"{len(base.runs)} baseline and {len(new)} new runs; {MIN_BASE_RUNS} and {rule.looks[0]} are the least"
        return Verdict(
            verdict=INCONCLUSIVE, reason=f"too few runs: {few}", margin=margin, runs=tuple(new), baseline_runs=base.runs,
            value=geometric_mean(new), baseline=_baseline_mean(base), more_runs=max(rule.looks[0] - len(new), 0) or None,
        )  # fmt: skip
    looks = [n for n in rule.looks if n <= len(new)]
    logs = [stats.worse_logs(s, better) for s in base.sessions]
    p_seq, verdict = 1.0, None
    for n in looks:
        shift = machine_shift(base, canary_ms[:n])
        e = stats.estimate(logs, stats.worse_logs(new[:n], better), session_prior=rule.session_prior)
        p_seq = min(p_seq, e.p_worse() / rule.weight)
        last = n == rule.looks[-1] or (final and n == looks[-1])
        delta = stats.log_margin(margin, better)
        word, reason = _decide(e, delta, rule, p_seq=p_seq, last=last, second=n == rule.looks[1])
        word, reason = _unless_shifted(word, reason, e.theta, delta, shift)
        found = _described(word, reason, e, base, new[:n], better=better, margin=margin, rule=rule)
        verdict = dataclasses.replace(found, p_seq=min(1.0, p_seq), notes=found.notes + _shift_note(shift))
        if verdict.decided or (rule.futility and reason.startswith("futile")):
            break
    assert verdict is not None  # len(new) >= rule.looks[0], so there was a look
    return verdict


def _decide(e: stats.Estimate, delta: float, rule: Rule, *, p_seq: float, last: bool, second: bool) -> tuple[str, str]:
    """One look's word and, when it is `inconclusive`, the reason.

    Pass if U < delta; regression if L > delta, or at the last look L > 0 and theta > delta.
    """
    half = e.bound(stats.ALPHA * rule.weight)
    low, high = e.theta - half, e.theta + half
    if high < delta:
        return (IMPROVEMENT if high < 0 and e.theta < -delta else PASS), ""
    if (low > delta or (last and low > 0 and e.theta > delta)) and p_seq <= P_SEQ_LIMIT:
        return REGRESSION, ""
    if rule.futility and second and not last and delta / 2 < e.theta < delta:
        return INCONCLUSIVE, "futile within this profile's budget: the change lies between half the margin and the margin"
    return INCONCLUSIVE, "the interval reaches beyond the margin"


def _described(
    word: str, reason: str, e: stats.Estimate, base: Base, new: Sequence[float], *, better: str, margin: float, rule: Rule
) -> Verdict:
    """A look's word with the figures that explain it, in terms of the metric's own value."""
    delta, half = stats.log_margin(margin, better), e.bound(stats.ALPHA * rule.weight)
    low, high = e.theta - half, e.theta + half
    ends = sorted((as_change(low, better), as_change(high, better)))
    open_gate = word == INCONCLUSIVE
    return Verdict(
        verdict=word, reason=reason,
        value=geometric_mean(new), baseline=_baseline_mean(base), change=as_change(e.theta, better), low=ends[0], high=ends[1],
        margin=margin, runs=tuple(new), baseline_runs=base.runs,
        notes=("unstable: runs differ by more than 25 %",) if e.sd > UNSTABLE_SD else (),
        more_runs=max((stats.runs_needed(e, delta) or 0) - e.new_runs, 0) or None if open_gate else None,
        certifiable=abs(as_change(high, better)) if open_gate and high > 0 else None,
    )  # fmt: skip


def _unless_shifted(word: str, reason: str, theta: float, delta: float, shift: float) -> tuple[str, str]:
    """A verdict that the machine's own state could have made is none; nothing else changes."""
    allowance = STATE_SHARE * abs(shift)
    accused = word == REGRESSION and theta - allowance <= delta
    excused = word in (PASS, IMPROVEMENT) and theta + allowance >= delta
    if shift and (accused or excused):
        return INCONCLUSIVE, f"{_shift_words(shift)}: that alone may have made the change; measure again"
    return (PASS if word == IMPROVEMENT and theta + allowance >= -delta else word), reason


def _shift_words(shift: float) -> str:
    return f"the machine itself was in another state than at the baseline (canary {100 * math.expm1(shift):+.0f} %)"


def _shift_note(shift: float) -> tuple[str, ...]:
    return (_shift_words(shift),) if shift else ()


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

"""The gate: new runs, a baseline and a margin become a verdict. The only place where a verdict is decided. Pure.

A verdict depends on its own gate's runs alone. Validity comes first: no path leads from NaN, zero, a missing value, a
missing baseline, failed requests, too few samples or wrong units to `pass`. `core.rule` takes the looks; a decision is frozen
at the look that made it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from . import samples as requests
from . import stats
from .canary import Canary, Reading, Side, side
from .lint import MOST_MARGIN
from .physics import Limit
from .rule import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    MIN_BASE_RUNS,
    NO_BASELINE,
    P_SEQ_LIMIT,
    PAIRED,
    PASS,
    REGRESSION,
    RULES,
    VERDICTS,
    Look,
    Rule,
    look_by_look,
    rule_for,
)
from .sides import Against, Pairs
from .steadiness import unsteady
from .units import factor
from .verdict import FEW_SAMPLES, HUGE, Base, Verdict, as_change, fails, false_alarms, geometric_mean, in_unit

# The whole gate is had from here.
__all__ = [
    "IMPROVEMENT", "INCONCLUSIVE", "INVALID", "MIN_BASE_RUNS", "MISMATCH", "NOTHING_STORED", "NO_BASELINE",
    "PAIRED", "PASS", "P_SEQ_LIMIT", "REGRESSION",
    "RULES", "VERDICTS", "Base", "Limit", "Rule", "Verdict", "as_change", "fails", "false_alarms", "geometric_mean", "in_unit", "judge",
    "judge_paired", "rule_for", "too_few_samples",
]  # fmt: skip

# No build is better than another by more than this factor: a wrong unit, or a broken measurement.
IMPLAUSIBLE = 100.0
MISMATCH = "the baseline is of something else: "
NOTHING_STORED = "no baseline is stored for this gate"


def _invalid(reason: str, margin: Any) -> Verdict:
    return Verdict(verdict=INVALID, reason=reason, margin=margin)


def _bad_direction(better: Any) -> str:
    return "" if better in ("lower", "higher") else f"direction {better!r} is neither lower nor higher"


def _bad_margin(margin: Any) -> str:
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 < margin < 1:
        return f"margin {margin!r} does not lie between 0 and 1"
    return ""


def bad_values(values: Sequence[Any], whose: str) -> str:
    """Why one of these is no figure that may be compared; empty when all are."""
    for v in values:
        if type(v) is float and 0 < v <= HUGE:
            continue
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not -HUGE <= v <= HUGE:
            return f"{whose} is not a finite number: {v!r}"
        if v <= 0:
            return f"{whose} is not positive: {v!r}"
    return ""


def missing(base: Base, new: Sequence[Any], margin: float) -> Verdict | None:
    """The verdict where one side has no numbers, or none that may be used; None when both have."""
    if base.mismatch:
        return _invalid(MISMATCH + base.mismatch, margin)
    old = base.runs
    if not new and len(old) < MIN_BASE_RUNS:
        few = f"only {len(old)} of the {MIN_BASE_RUNS} runs that a baseline needs are stored"
        return Verdict(verdict=NO_BASELINE, reason=few if old else base.missing or NOTHING_STORED, margin=margin)
    if not new:
        return _invalid("nothing was measured: the metric is missing from every run", margin)
    if problem := bad_values(old, "a baseline value") or bad_values(new, "a measured value"):
        return _invalid(problem, margin)
    if not base.missing and old:
        return None
    return Verdict(verdict=NO_BASELINE, reason=base.missing or NOTHING_STORED, runs=tuple(new), value=geometric_mean(new), margin=margin)


def differs(base: Base, better: str, unit: str, definition: str) -> str:
    """Whether the two sides are numbers of different things."""
    for what, was, now in (("direction", base.better or better, better), ("definition", base.definition, definition)):
        if was != now:
            return f"{what} differs: baseline {was!r}, measured {now!r}"
    if factor(base.unit, unit) is None:
        return f"unit differs: baseline {base.unit!r}, measured {unit!r}, and the one does not convert into the other"
    return ""


def _beyond(limit: Limit | None, values: Sequence[float], whose: str, unit: str) -> str:
    for v in values if limit else ():
        if limit and limit.broken_by(v):
            bound = f"{'at most' if limit.at_most else 'at least'} {limit.value:.4g} {unit} ({limit.reason})"
            return f"{whose} is beyond the physical limit: {v:.4g} {unit}, {bound}"
    return ""


def too_few_samples(
    base: Base, samples: Sequence[int], *, quantile: float | None, margin: float, rule: Rule, runs: Sequence[float] = ()
) -> Verdict | None:
    """The verdict where runs of so many requests say too little of a quantile; None where they may be compared.

    It holds before anything is measured: `samples` may be the requests that a run will have.
    """
    old = [n for s in base.samples for n in s]
    problem = requests.problem(quantile, margin, old, samples, full=rule.full_floors) if quantile else ""
    if not problem:
        return None
    return Verdict(
        verdict=INCONCLUSIVE, reason=f"{FEW_SAMPLES}{problem}: ask for more requests a run and record anew", margin=margin,
        runs=tuple(runs), value=geometric_mean(runs) if runs else None,
    )  # fmt: skip


def judge(
    base: Base, new: Sequence[Any], *, better: str, margin: float, rule: Rule, unit: str = "", definition: str = "",
    samples: Sequence[int] = (), failed: int = 0, quantile: float | None = None, limit: Limit | None = None, floor: float = 0.0,
    final: bool = False, canary: Sequence[Reading | None] = (),
) -> Verdict:  # fmt: skip
    """The verdict on all runs so far: takes each planned look in order and freezes at the first that decides.

    `new` has one value a run, in the order of the runs, of `unit` and `definition`; a baseline in another unit of the same
    dimension is converted. Beside each run stand `samples`, its requests (they count where the value is the quantile
    `quantile` of them), and the readings of the `canary`: where the machine was in another state, a verdict must stand with the share
    of that change which an engine may follow against it (`core.canary`). `failed` requests are those above the allowance.
    `limit` is a physical bound on either side; a change below `floor`, in `unit`, is no loss. `final` says that no more runs
    will come (budget spent): the last complete look then counts as the last. `inconclusive` before that means "measure more".
    """
    if problem := _bad_direction(better) or _bad_margin(margin):
        return _invalid(problem, None)
    if verdict := missing(base, new, margin):
        return verdict
    problem = f"{failed} requests failed above the allowance" if failed else differs(base, better, unit, definition)
    old = base if problem else in_unit(base, unit) or base
    problem = problem or _beyond(limit, old.runs, "a baseline value", unit) or _beyond(limit, new, "a measured value", unit)
    if problem:
        return _invalid(problem, margin)
    first = rule.looks[0]
    if len(new) >= first and (few := too_few_samples(old, samples[:first], quantile=quantile, margin=margin, rule=rule, runs=new[:first])):
        return few
    found = Canary(old=Side(base.canary_on, base.canary_ms), new=side(canary))
    if problem := found.problem(len(new)):
        return _invalid(problem, margin)
    return _judge_runs(old, tuple(new), found, better=better, margin=margin, floor=floor, rule=rule, final=final)


def _judge_runs(
    base: Base, new: tuple[float, ...], canary: Canary, *, better: str, margin: float, floor: float, rule: Rule, final: bool
) -> Verdict:
    """The statistics, on numbers that may be compared."""
    sessions = [stats.worse_logs(s, better) for s in base.sessions]
    old, runs = stats.stored(sessions, rule.session_prior), base.runs
    level = math.exp(old.mean if better == "lower" else -old.mean)
    if len(runs) < MIN_BASE_RUNS or len(new) < rule.looks[0]:
        few = f"{len(runs)} baseline and {len(new)} new runs; {MIN_BASE_RUNS} and {rule.looks[0]} are the least"
        return Verdict(
            verdict=INCONCLUSIVE, reason=f"too few runs: {few}", margin=margin, runs=new, baseline_runs=runs, value=geometric_mean(new),
            baseline=level, more_runs=max(rule.looks[0] - len(new), 0) + max(MIN_BASE_RUNS - len(runs), 0),
        )  # fmt: skip
    wide = max(margin, floor / level)
    if floor and wide > MOST_MARGIN and better == "higher":
        return _invalid(f"a floor of {floor:g} lets {100 * wide:.3g} % of the baseline be lost: the gate could hardly ever fail", margin)
    delta = stats.log_margin(wide, better)
    sides = Against(old, stats.worse_logs(new, better), delta, better, canary, unsteady([z for s in sessions for z in s]))
    look = look_by_look(sides, len(new), delta, rule, final=final)
    notes = sides.notes(look.estimate.new_runs, told=look.reason.startswith("unstable"))
    if wide > margin:
        notes += (f"a change below {floor:g} is no loss, so that the margin is {100 * wide:.3g} %",)
    return _told(look, new, runs, level, better=better, margin=wide, notes=notes)


def judge_paired(
    old: Sequence[Any], new: Sequence[Any], *, better: str, margin: float = PAIRED.margin, at_least: float | None = None,
    rule: Rule = PAIRED, unit: str = "", samples: Sequence[int] = (), quantile: float | None = None, limit: Limit | None = None,
    old_limit: Limit | None = None, floor: float = 0.0, final: bool = False,
) -> Verdict:  # fmt: skip
    """The verdict on two arms measured in turns (A B, B A, ...): one value of each a round, in the order of the rounds, in one unit.

    A round's log ratio is one observation; `samples` are the requests of the windows of both. With `at_least` the claim is no margin
    but a gain: the new arm is so many times as good as the old one. Each arm has its own physical bound. Otherwise as `judge`.
    """
    if problem := _bad_direction(better) or ("" if at_least else _bad_margin(margin)):
        return _invalid(problem, None)
    margin = 0.0 if at_least else margin
    rounds = f"{len(old)} runs of the old arm and {len(new)} of the new: rounds are not complete"
    problem = rounds if len(old) != len(new) else "" if new else "nothing was measured: the metric is missing from every run"
    for values, whose, bound in ((new, "a value of the new arm", limit), (old, "a value of the old arm", old_limit)):
        problem = problem or bad_values(values, whose) or _beyond(bound, values, whose, unit)
    if problem:
        return _invalid(problem, margin)
    if verdict := too_few_samples(Base(), samples, quantile=quantile, margin=margin, rule=rule, runs=new):
        return verdict
    new, old, level = tuple(new), tuple(old), geometric_mean(old)
    if len(new) < rule.looks[0]:
        return Verdict(
            verdict=INCONCLUSIVE, reason=f"too few runs: {len(new)} rounds; {rule.looks[0]} are the least", margin=margin, runs=new,
            baseline_runs=old, value=geometric_mean(new), baseline=level, more_runs=rule.looks[0] - len(new),
        )  # fmt: skip
    wide = max(margin, floor / level)
    if floor and wide > MOST_MARGIN and better == "higher":
        return _invalid(
            f"a floor of {floor:g} lets {100 * wide:.3g} % of the other arm's value be lost: the gate could hardly ever fail", margin
        )
    pairs = zip(stats.worse_logs(new, better), stats.worse_logs(old, better), strict=True)
    delta = -math.log(at_least) if at_least else stats.log_margin(wide, better)
    sides = Pairs([now - was for now, was in pairs], delta, better)
    look = look_by_look(sides, len(new), delta, rule, final=final)
    n = look.estimate.new_runs
    notes = sides.notes(n, told=look.reason.startswith("unstable"))
    found = _told(look, new, old[:n], geometric_mean(old[:n]), better=better, margin=wide, notes=notes)
    return _as_claim(found, at_least, look) if at_least else found


def _as_claim(found: Verdict, at_least: float, look: Look) -> Verdict:
    """A verdict on a gain that is claimed: what fails it and what its runs show is told in times, not as a loss."""
    shown = f"at least {at_least:g} times as good is claimed, these runs certify {math.exp(-look.certain):.3g} times"
    reason = f"{found.reason}; {shown}" if found.reason else shown
    kept = found.verdict in (PASS, INVALID)
    return dataclasses.replace(found, certifiable=None, reason=found.reason if kept else reason)


def _told(
    look: Look, new: tuple[float, ...], old: tuple[float, ...], level: float, *, better: str, margin: float, notes: tuple[str, ...]
) -> Verdict:
    """A look's word with the figures that explain it, in terms of the metric's own value."""
    e, word, reason = look.estimate, look.word, look.reason
    if word in (PASS, IMPROVEMENT) and -e.theta > math.log(IMPLAUSIBLE):
        word, reason = INVALID, f"better than the baseline by a factor of {math.exp(-e.theta):.4g}: a wrong unit, or a broken measurement"
    ends = sorted((as_change(look.low, better), as_change(look.high, better)))
    new = new[: e.new_runs]
    return Verdict(
        verdict=word, reason=reason, value=geometric_mean(new), baseline=level, change=as_change(e.theta, better), low=ends[0],
        high=ends[1], margin=margin, p_seq=look.p_seq, runs=new, baseline_runs=old, notes=notes, more_runs=look.more_runs,
        certifiable=abs(as_change(look.certain, better)) if word == INCONCLUSIVE else None,
    )  # fmt: skip

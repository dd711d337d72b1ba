"""The noise of a machine, from runs of an unchanged engine in several sessions: what its gates can certify. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import stats
from .baseline import Current, lookup
from .gate import Base, Rule, as_change
from .metrics import find_metric

RUNS = 5  # of a session that calibrates
SUFFIX = ".noise"  # of the model in the name of the file that keeps them beside the baselines
PASSES = 0.10  # a margin counts as certifiable when all but this share of equal builds pass


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What is known of one gate: standard deviations (of the logarithm, so fractions) of restarts and of a session's own shift, and
    the smallest margin that each number of new runs certifies. `session_sd` is the prior's alone where one session was measured."""

    key: str
    margin: float
    restart_sd: float
    session_sd: float
    sessions: int
    runs: int
    certifiable: tuple[tuple[int, float], ...]


def session_sd(base: Base, better: str, rule: Rule) -> float:
    """The spread of sessions that were measured, shrunk towards the rule's prior; 0 where fewer than two were, or on other cards."""
    if len(base.sessions) < 2 or base.missing or base.mismatch or base.reference:
        return 0.0
    return stats.session_sd([stats.worse_logs(s, better) for s in base.sessions], rule.session_prior)


def noise_of(doc: Mapping[str, Any], key: str, margin: float, now: Current, rule: Rule) -> Noise | None:
    """The noise of a gate by the runs stored in `doc` (in the form of a baseline file); None where fewer than two are."""
    metric = find_metric(key.rpartition("/")[2])
    base = lookup(doc, key, metric, now)
    if base.missing or base.mismatch or len(base.runs) <= len(base.sessions):
        return None
    logs = [stats.worse_logs(s, metric.better) for s in base.sessions]
    restart = math.sqrt(max(stats.stored(logs, 0.0).var, stats.FLOOR**2))
    shift = session_sd(base, metric.better, rule) or rule.session_prior
    return Noise(
        key=key, margin=margin, restart_sd=restart, session_sd=shift, sessions=len(base.sessions), runs=len(base.runs),
        certifiable=tuple((n, certifiable(restart, shift, rule, n, metric.better)) for n in rule.looks),
    )  # fmt: skip


def certifiable(restart_sd: float, shift_sd: float, rule: Rule, runs: int, better: str) -> float:
    """The smallest margin (a fraction) that a look at so many runs certifies for 9 of 10 equal builds, against a full baseline."""
    sessions, stored_runs = rule.record_sessions, rule.record_sessions * rule.record_runs
    old = stats.Stored(
        mean=0.0, var=restart_sd**2, df=stored_runs - sessions, runs=stored_runs, session_var=shift_sd**2 * (1 + 1 / sessions),
        session_df=stats.PRIOR_DF + sessions - 1,
    )  # fmt: skip
    e = stats.compare(old, 0.0, restart_sd**2, runs)
    return abs(as_change(e.bound(rule.alpha * rule.weight) + e.bound(PASSES), better))


def of_gates(doc: Mapping[str, Any], margins: Mapping[str, float], environment: Mapping[str, Any], rule: Rule) -> list[Noise]:
    """The noise of all gates (keys, with their margins) that have runs stored in `doc`, by key; each entry is of the workload that it
    was stored with."""
    found = []
    for key, margin in margins.items():
        entry = doc["entries"].get(key)
        if entry and (one := noise_of(doc, key, margin, Current(environment=environment, workload=entry["workload"]), rule)):
            found.append(one)
    return sorted(found, key=lambda n: n.key)

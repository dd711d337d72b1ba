"""What is known of a block so far, and which of its gates that settles. Pure, but for the progress, which grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .evidence import Evidence, as_judged
from .gate import (
    INCONCLUSIVE,
    INVALID,
    NO_BASELINE,
    PAIRED,
    Base,
    Limit,
    Rule,
    Verdict,
    geometric_mean,
    in_unit,
    judge,
    judge_paired,
    too_few_samples,
)
from .metrics import find_metric, quantile_of
from .models import find_model
from .physics import limit_of
from .plan import Block, GateSpec, Task
from .resolved import noted
from .scenarios import Traffic
from .still import settle_still
from .verdict import SMOKE
from .windows import rounds_of, runs_of, values_of


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How far to measure: the rule, what each gate needs (see `core.baseline.need`), its stored number, the end of time."""

    rule: Rule
    needs: Mapping[str, str]
    bases: Mapping[str, Base]
    deadline: float | None = None

    @classmethod
    def against(cls, evidence: Mapping[str, Evidence], rule: Rule, deadline: float | None = None) -> Orders:
        """From what each gate is judged against."""
        needs, bases = {k: e.need for k, e in evidence.items()}, {k: e.base for k, e in evidence.items()}
        return cls(rule=rule, needs=needs, bases=bases, deadline=deadline)


@dataclass
class Progress:
    """Everything known so far about a block; `plain` is what is stored after every step. `traces` say where the raw ones are."""

    block: Block
    environment: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    error: str | None = None
    server_start_s: list[float] = field(default_factory=list)
    spent_s: dict[str, float] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)

    def note_resolved(self, arm: str, found: Mapping[str, Any]) -> None:
        """What a server made of its arguments is part of the environment, though known only when it runs."""
        self.environment = {**self.environment, "subject": noted(self.environment.get("subject", {}), arm, found)}

    def runs(self, gate: GateSpec) -> list[dict[str, Any]]:
        """The valid runs of the gate's scenario."""
        return runs_of(self.measurements, gate.scenario, gate.arm)

    def rounds(self, gate: GateSpec) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Of each whole round, the run of the arm that the gate is against and that of its own."""
        return rounds_of(self.measurements, gate.scenario, (gate.against, gate.arm))

    def plain(self) -> dict[str, Any]:
        named = ("complete", "error", "server_start_s", "spent_s", "measurements", "traces", "environment", "evidence")
        found = {name: getattr(self, name) for name in named}
        found["broken"] = [{"scenario": scenario, "arm": arm, "reason": why} for (scenario, arm), why in self.broken.items()]
        return found | {"id": self.block.id, "verdicts": {k: dataclasses.asdict(v) for k, v in self.verdicts.items()}}


def settle(gate: GateSpec, progress: Progress, orders: Orders, *, final: bool) -> Verdict | None:
    """The gate's verdict on what is known, or None when it needs more runs. Looks at no other gate.

    A decision is frozen: what came after the run that made it, for the sake of other gates, changes nothing. A baseline of another
    card is judged by wider terms, which the verdict names.
    """
    if find_metric(gate.metric).drift is not None:
        return settle_still(gate, progress, orders, final=final)
    if gate.against:
        return _paired(gate, progress, orders, final=final)
    if orders.needs[gate.key] not in ("judge", "report", "attached"):
        return _settled(gate, progress, orders, final=final)
    gate, rule, notes = as_judged(gate, orders.bases[gate.key], orders.rule)
    found = _settled(gate, progress, dataclasses.replace(orders, rule=rule), final=final)
    return dataclasses.replace(found, notes=found.notes + notes) if found and found.verdict != INVALID else found


def _settled(gate: GateSpec, progress: Progress, orders: Orders, *, final: bool) -> Verdict | None:
    runs, need, rule = progress.runs(gate), orders.needs[gate.key], orders.rule
    values: list[Any] = [m["metrics"].get(gate.metric) for m in runs]
    whole = values.index(None) if None in values else len(values)
    if need == "nothing":
        return _judged(gate, progress, orders, [], final=True)
    for n in sorted({whole, *(n for n in rule.looks if n < whole)}) if need == "judge" else ():
        if (found := _judged(gate, progress, orders, runs[:n], final=False)).settled:
            return found
    enough = {"record": rule.record_runs, "report": 1, "attached": 1, "judge": rule.looks[-1]}[need]
    if whole < enough:
        if whole < len(values):
            return Verdict(verdict=INVALID, reason=f"{gate.metric} is missing from run {runs[whole]['run']}", margin=gate.margin)
        if reason := progress.broken.get((gate.scenario, gate.arm)):
            return Verdict(verdict=INVALID, reason=reason, margin=gate.margin)
        if not final:
            return None
    if need == "judge":
        return _judged(gate, progress, orders, runs[:enough], final=True)
    if need == "record":
        return _recorded(gate, values[:enough], rule)
    return _reported(gate, values[:enough], orders.bases[gate.key], rule, attached=need == "attached")


def _paired(gate: GateSpec, progress: Progress, orders: Orders, *, final: bool) -> Verdict | None:
    """As `settle`, of a gate on two arms that are measured in turns: a round has one value of each."""
    rounds = progress.rounds(gate)
    rule = dataclasses.replace(PAIRED, full_floors=orders.rule.full_floors, futility=orders.rule.futility)
    whole = next((i for i, pair in enumerate(rounds) if any(gate.metric not in m["metrics"] for m in pair)), len(rounds))
    smoke, asked = orders.needs[gate.key] == "report", _task(gate, progress).scenario.n_requests
    few = too_few_samples(Base(), (asked,), quantile=quantile_of(gate.metric), margin=gate.margin, rule=rule)
    if few and not smoke:  # what no round would change, before the first
        return few
    for n in () if smoke else [n for n in rule.looks if n <= whole]:
        if (found := _judged_pairs(gate, progress, rounds[:n], rule, final=False)).settled or n == rule.looks[-1]:
            return found
    if whole < len(rounds):
        return Verdict(verdict=INVALID, reason=f"{gate.metric} is missing from run {rounds[whole][0]['run']}", margin=gate.margin)
    if smoke and rounds:
        return _reported_pair(gate, *rounds[0], rule)
    for arm in (gate.arm, gate.against):
        if reason := progress.broken.get((gate.scenario, arm)):
            return Verdict(verdict=INVALID, reason=reason, margin=gate.margin)
    if not final:
        return None
    if rounds:
        return _judged_pairs(gate, progress, rounds, rule, final=True)
    reason = "the time budget was spent before the first round"
    return Verdict(verdict=INCONCLUSIVE, reason=reason, margin=gate.margin, more_runs=rule.looks[0])


def _judged_pairs(
    gate: GateSpec, progress: Progress, rounds: list[tuple[dict[str, Any], dict[str, Any]]], rule: Rule, *, final: bool
) -> Verdict:
    metric, (old, new) = find_metric(gate.metric), values_of(rounds, gate.metric)
    return judge_paired(
        old, new, better=metric.better, margin=gate.margin, at_least=gate.at_least, rule=rule, unit=metric.unit,
        samples=[m["requests"] for pair in rounds for m in pair], quantile=quantile_of(gate.metric), floor=gate.floor, final=final,
        limit=_limit(gate, progress, gate.arm), old_limit=_limit(gate, progress, gate.against),
    )  # fmt: skip


def _reported_pair(gate: GateSpec, old: dict[str, Any], new: dict[str, Any], rule: Rule) -> Verdict:
    (was,), (now,) = values_of([(old, new)], gate.metric)
    return Verdict(
        verdict=INCONCLUSIVE, reason=SMOKE, value=now, baseline=was, change=now / was - 1,
        runs=(now,), baseline_runs=(was,), margin=gate.margin, more_runs=rule.looks[0] - 1,
    )  # fmt: skip


def _judged(gate: GateSpec, progress: Progress, orders: Orders, runs: list[dict[str, Any]], *, final: bool) -> Verdict:
    """The verdict on some runs of the gate, all of which have its metric."""
    metric, base, quantile = find_metric(gate.metric), orders.bases[gate.key], quantile_of(gate.metric)
    if orders.needs[gate.key] == "judge":
        asked = _task(gate, progress).scenario.n_requests
        for known, samples in ((Base(), (asked,)), (base, ())):  # what no run would change, before the first
            if few := too_few_samples(known, samples, quantile=quantile, margin=gate.margin, rule=orders.rule):
                return few
        if not runs:
            reason = "the time budget was spent before the first run"
            return Verdict(verdict=INCONCLUSIVE, reason=reason, margin=gate.margin, more_runs=orders.rule.looks[0])
    return judge(
        base, [m["metrics"][gate.metric] for m in runs], better=metric.better, margin=gate.margin, rule=orders.rule, unit=metric.unit,
        definition=metric.definition, samples=[m["requests"] for m in runs], quantile=quantile, limit=_limit(gate, progress, gate.arm),
        floor=gate.floor, final=final, canary=[m["canary"] for m in runs],
    )  # fmt: skip


def _task(gate: GateSpec, progress: Progress) -> Task:
    return next(t for t in progress.block.tasks if str(t.scenario) == gate.scenario)


def _limit(gate: GateSpec, progress: Progress, name: str) -> Limit | None:
    """What the device cannot exceed with an arm, where it and the model are in the catalogues."""
    arm = next(a for a in progress.block.arms if a.name == name)
    scenario = _task(gate, progress).scenario
    assert isinstance(scenario, Traffic)  # figures of a text are judged otherwise
    return limit_of(gate.metric, scenario, arm, find_model(progress.block.model), progress.environment)


def _recorded(gate: GateSpec, values: list[float], rule: Rule) -> Verdict:
    value = geometric_mean(values) if values else None
    short = "" if len(values) >= rule.record_runs else f"only {len(values)} of {rule.record_runs} runs were made"
    return Verdict(verdict=NO_BASELINE, reason=short, value=value, runs=tuple(values), margin=gate.margin)


ATTACHED = (
    "an attached server is not restarted, so this is one observation: reported, not judged; --kv-restart=COMMAND gives it fresh starts"
)


def _attached(rule: Rule) -> str:
    return f"{ATTACHED}, of which {rule.looks[0]} are the least"


def _reported(gate: GateSpec, values: list[float], base: Base, rule: Rule, *, attached: bool = False) -> Verdict:
    value = geometric_mean(values) if values else None
    if base.runs:
        base = in_unit(base, find_metric(gate.metric).unit) or Base(mismatch=f"it is stored in {base.unit!r}")
    if not base.runs:
        missing = "; ".join(filter(None, (_attached(rule), base.missing or base.mismatch))) if attached else base.missing or base.mismatch
        kind = INCONCLUSIVE if attached else NO_BASELINE
        return Verdict(verdict=kind, reason=missing, value=value, runs=tuple(values), margin=gate.margin)
    stored = geometric_mean(base.runs)
    return Verdict(
        verdict=INCONCLUSIVE, reason=_attached(rule) if attached else SMOKE, value=value, baseline=stored,
        change=value / stored - 1 if value else None, runs=tuple(values), baseline_runs=base.runs, margin=gate.margin,
        more_runs=None if attached else max(1, rule.looks[0] - len(values)),
    )  # fmt: skip

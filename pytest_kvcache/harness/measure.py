"""Measure a block whole: repeated runs with looks, until every gate is settled. Results are JSON from the first run on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.evidence import as_judged
from ..core.gate import (
    INCONCLUSIVE,
    INVALID,
    NO_BASELINE,
    Base,
    Limit,
    Rule,
    Verdict,
    geometric_mean,
    in_unit,
    judge,
    too_few_samples,
)  # fmt: skip
from ..core.metrics import find_metric, measure, quantile_of
from ..core.models import find_model
from ..core.physics import limit_of
from ..core.plan import Block, GateSpec, Task
from ..core.record import OK, Trace
from ..core.resolved import noted
from ..core.spec import Arm, Scenario, UserError
from ..core.validity import Spoiled, trace_problem

ATTEMPTS = 2  # a window that the machine spoiled is measured once more, on another fresh start


class Running(Protocol):
    """A started server."""

    start_s: float

    def measure(self, scenario: Scenario) -> Trace:
        """Drive one scenario; UserError when the server cannot be used."""


class Runner(Protocol):
    """How the runs of a block are made: a real engine, an in-process driver, recorded data."""

    def environment(self, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
        """The fingerprint: identity, subject, context."""

    def workload(self, scenario: Scenario) -> str:
        """Hash of the requests that the scenario stands for."""

    def start(self, arm: Arm, run: int, attempt: int) -> AbstractContextManager[Running]:
        """A fresh server start."""

    def canary(self) -> dict[str, float] | None:
        """What a fixed piece of work takes on the machine itself just now (`ms`, `cores`); None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """How far to measure: the rule, what each gate needs (see `core.baseline.need`), its stored number, the end of time."""

    rule: Rule
    needs: Mapping[str, str]
    bases: Mapping[str, Base]
    deadline: float | None = None


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
        return [m for m in self.measurements if m["valid"] and (m["scenario"], m["arm"]) == (gate.scenario, gate.arm)]

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
    if orders.needs[gate.key] not in ("judge", "report"):
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
    enough = {"record": rule.record_runs, "report": 1, "judge": rule.looks[-1]}[need]
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
    return _reported(gate, values[:enough], orders.bases[gate.key], rule)


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
        definition=metric.definition, samples=[m["requests"] for m in runs], quantile=quantile, limit=_limit(gate, progress),
        floor=gate.floor, final=final, canary_ms=_comparable(runs),
    )  # fmt: skip


def _task(gate: GateSpec, progress: Progress) -> Task:
    return next(t for t in progress.block.tasks if str(t.scenario) == gate.scenario)


def _limit(gate: GateSpec, progress: Progress) -> Limit | None:
    """What the device cannot exceed, where it and the model are in the catalogues."""
    arm = next(a for a in progress.block.arms if a.name == gate.arm)
    return limit_of(gate.metric, _task(gate, progress).scenario, arm, find_model(progress.block.model), progress.environment)


def _comparable(runs: list[dict[str, Any]]) -> list[float | None]:
    """What the canary took beside each run, if all were done by as many cores; None where it is not known."""
    cores = {m["canary"]["cores"] for m in runs if m["canary"]}
    return [m["canary"]["ms"] if m["canary"] and len(cores) == 1 else None for m in runs]


def _recorded(gate: GateSpec, values: list[float], rule: Rule) -> Verdict:
    value = geometric_mean(values) if values else None
    short = "" if len(values) >= rule.record_runs else f"only {len(values)} of {rule.record_runs} runs were made"
    return Verdict(verdict=NO_BASELINE, reason=short, value=value, runs=tuple(values), margin=gate.margin)


def _reported(gate: GateSpec, values: list[float], base: Base, rule: Rule) -> Verdict:
    value = geometric_mean(values) if values else None
    if base.runs:
        base = in_unit(base, find_metric(gate.metric).unit) or Base(mismatch=f"it is stored in {base.unit!r}")
    if not base.runs:
        return Verdict(verdict=NO_BASELINE, reason=base.missing or base.mismatch, value=value, runs=tuple(values), margin=gate.margin)
    stored = geometric_mean(base.runs)
    return Verdict(
        verdict=INCONCLUSIVE, reason="profile smoke takes one run: reported, not judged", value=value, baseline=stored,
        change=value / stored - 1 if value else None, runs=tuple(values), baseline_runs=base.runs, margin=gate.margin,
        more_runs=max(1, rule.looks[0] - len(values)),
    )  # fmt: skip


class BlockMeter:
    """Measures one block. `keep` stores a raw trace for a row, `save` the plain progress after every scenario, `say` tells the user."""

    def __init__(
        self, block: Block, runner: Runner, orders: Orders, *, environment: dict[str, Any], evidence: dict[str, Any],
        keep: Callable[[Trace], dict[str, Any]], save: Callable[[dict[str, Any]], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.block, self.runner, self.orders, self.keep, self.save, self.say = block, runner, orders, keep, save, say
        self.progress = Progress(block=block, environment=environment, evidence=evidence)
        self.began = time.monotonic()

    def measure(self) -> dict[str, Any]:
        """All runs of the block; its plain result. A server that cannot be used makes the open gates invalid."""
        try:
            self._settle_all(final=False)
            run = 0
            while self._open() and not self._out_of_time():
                run += 1
                self._announce(run)
                self._one_run(run)
                self._settle_all(final=False)
            self._settle_all(final=True)
        except UserError as e:
            self.progress.error = str(e)
            for gate in self._gates():
                self.progress.verdicts.setdefault(gate.key, Verdict(verdict=INVALID, reason=str(e), margin=gate.margin))
        self.progress.complete = True
        self.save(self.progress.plain())
        return self.progress.plain()

    def _gates(self) -> Iterator[GateSpec]:
        return (g for t in self.block.tasks for g in t.gates)

    def _open(self, arm: str | None = None) -> list[Task]:
        """Tasks that have an unsettled gate: decided scenarios are not measured again."""
        done = self.progress.verdicts
        return [t for t in self.block.tasks if any(g.key not in done and arm in (None, g.arm) for g in t.gates)]

    def _settle_all(self, *, final: bool) -> None:
        for gate in self._gates():
            if gate.key not in self.progress.verdicts and (verdict := settle(gate, self.progress, self.orders, final=final)):
                self.progress.verdicts[gate.key] = verdict

    def _out_of_time(self) -> bool:
        over = self.orders.deadline is not None and time.monotonic() > self.orders.deadline
        if over:
            self.say("the time budget is spent: judging on the runs made")
        return over

    def _one_run(self, run: int) -> None:
        """One start of every arm, forwards in odd runs and backwards in even ones, so that drift cancels."""
        arms = self.block.arms if run % 2 else self.block.arms[::-1]
        for arm in arms:
            pending = self._open(arm.name)
            for attempt in range(1, ATTEMPTS + 1):
                if pending:
                    pending = self._one_start(arm, run, attempt, pending)

    def _one_start(self, arm: Arm, run: int, attempt: int, tasks: list[Task]) -> list[Task]:
        """Measure `tasks` on one fresh server; those that the machine spoiled and that may be tried again."""
        began, problems, first = time.monotonic(), {}, len(self.progress.measurements)
        before = self.runner.canary()  # while no server of ours lives: it must not feel the thing under test
        try:
            with self.runner.start(arm, run, attempt) as server:
                self.progress.server_start_s.append(round(server.start_s, 3))
                self.progress.note_resolved(arm.name, getattr(server, "resolved", {}))
                problems = self._scenarios(server, arm, run, tasks)
        except Spoiled as e:  # before anything was measured
            problems = dict.fromkeys(tasks, (str(e), True))
        self._note_canary(before, self.progress.measurements[first:])
        share = (time.monotonic() - began) / len(tasks)
        for task in tasks:
            name = str(task.scenario)
            self.progress.spent_s[name] = round(self.progress.spent_s.get(name, 0.0) + share, 3)
        return self._again(arm, attempt, problems)

    def _scenarios(self, server: Running, arm: Arm, run: int, tasks: list[Task]) -> dict[Task, tuple[str, bool] | None]:
        """Each task's problem. A window cut short or a lost server ends the start: what is left is for a fresh one."""
        problems: dict[Task, tuple[str, bool] | None] = {}
        lost = ""
        for task in tasks:
            if lost:
                problems[task] = (lost, True)
                continue
            try:
                problems[task] = self._one_scenario(server, arm, run, task.scenario)
            except Spoiled as e:
                self._keep(arm, run, Trace(**_nothing(task.scenario, arm, run), load=e.seen), (str(e), True))
                problems[task], lost = (str(e), True), str(e)
            except UserError as e:
                problems[task], lost = (str(e), False), f"the server was lost before this scenario: {e}"
            self.save(self.progress.plain())
        return problems

    def _note_canary(self, before: dict[str, float] | None, rows: list[dict[str, Any]]) -> None:
        """The machine's state just before and after the server lived stands beside what was measured between."""
        found = _mean_canary(before, self.runner.canary()) if rows else None
        for row in rows:
            row["canary"] = found
        self.save(self.progress.plain())

    def _again(self, arm: Arm, attempt: int, problems: Mapping[Task, tuple[str, bool] | None]) -> list[Task]:
        """Tasks to measure once more: spoiled by the machine, first attempt. Every other problem breaks the scenario."""
        again = []
        for task, problem in problems.items():
            if problem and problem[1] and attempt < ATTEMPTS:
                self.say(f"  {task.scenario} does not count and is measured once more: {problem[0]}")
                again.append(task)
            elif problem:
                self.progress.broken[str(task.scenario), arm.name] = problem[0]
        return again

    def _one_scenario(self, server: Running, arm: Arm, run: int, scenario: Scenario) -> tuple[str, bool] | None:
        trace = server.measure(scenario)
        problem = trace_problem(trace)
        self._keep(arm, run, trace, problem)
        return problem

    def _keep(self, arm: Arm, run: int, trace: Trace, problem: tuple[str, bool] | None) -> None:
        row = measurement(trace, problem[0] if problem else None)
        metrics = row["metrics"]
        self.progress.traces.append(self.keep(trace))
        self.progress.measurements.append(row)
        shown = (f"{label} {metrics[m]:.4g} {find_metric(m).unit}" for m, label in SHOWN.items() if m in metrics)
        self.say(f"  {trace.scenario}: " + (", ".join(shown) or "no figures") + ("" if problem is None else "  (does not count)"))

    def _announce(self, run: int) -> None:
        fewest, most = self._runs_left(run)
        bound = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        done, left = time.monotonic() - self.began, ""
        if run > 1:
            each = done / (run - 1)
            left = f"; {clock(each * (fewest - run + 1))} left" + (f", at most {clock(each * (most - run + 1))}" if most > fewest else "")
        self.say(f"{self.block.id}: run {run} of {bound}, {len(self._open())} scenario(s) open, starting the server{left}")

    def _runs_left(self, run: int) -> tuple[int, int]:
        """Fewest and most runs in all, as far as the open gates tell."""
        needs = {self.orders.needs[g.key] for t in self._open() for g in t.gates if g.key not in self.progress.verdicts}
        rule = self.orders.rule
        looks = [n for n in rule.looks if n >= run] or [run]
        lows = {"judge": looks[0], "record": rule.record_runs, "report": 1}
        highs = {"judge": looks[-1], "record": rule.record_runs, "report": 1}
        return max(lows[n] for n in needs if n in lows), max(highs[n] for n in needs if n in highs)


def measurement(trace: Trace, problem: str | None) -> dict[str, Any]:
    """A trace in figures; `problem` says why it does not count."""
    from ..core.window import facts, window_of  # numpy: only once something has been measured

    window = window_of(trace)
    return {
        "scenario": trace.scenario, "arm": trace.arm, "run": trace.run, "valid": problem is None, "invalid": problem,
        "metrics": measure(trace, window), "requests": len(trace.records), "failed": sum(r.outcome != OK for r in trace.records),
        "load": trace.load | facts(trace, window), "canary": None,
    }  # fmt: skip


def _nothing(scenario: Scenario, arm: Arm, run: int) -> dict[str, Any]:
    """The fields of a trace of a window that was cut short: nothing in it counts."""
    return {
        "scenario": str(scenario), "arm": arm.name, "run": run, "workload": "", "isl": scenario.isl, "osl": scenario.osl, "records": (),
    }  # fmt: skip


def _mean_canary(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float] | None:
    """The machine's state over a window, from just before and just after it."""
    if before is None or after is None or before["cores"] != after["cores"]:
        return None
    return {"ms": round(geometric_mean([before["ms"], after["ms"]]), 4), "cores": before["cores"]}


SHOWN = {"output_tok_s": "output", "ttft_ms.p50": "TTFT p50", "tpot_ms.p50": "TPOT p50"}


def clock(seconds: float) -> str:
    """A duration for a person: `45 s`, `3 min 20 s`, `1 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"

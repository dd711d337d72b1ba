"""Measure a block whole: repeated runs with looks, until every gate is settled. Results are JSON from the first run on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from ..core.canary import Reading, around
from ..core.gate import INVALID, Verdict
from ..core.measurement import measurement
from ..core.metrics import find_metric
from ..core.plan import Block, Task, runs_range
from ..core.progress import Orders, Progress, settle
from ..core.record import Trace
from ..core.scenarios import Scenario, Text
from ..core.spec import Arm, UserError
from ..core.still import STILL
from ..core.validity import Spoiled, trace_problem

ATTEMPTS = 2  # a window that the machine spoiled is measured once more, on another fresh start
Problem = tuple[str, bool]
"""What was wrong with a window, and whether the machine is to blame."""


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

    def start_anyway(self, arm: Arm, run: int, attempt: int) -> AbstractContextManager[Running]:
        """The same on a machine that stays busy, for what no speed decides. A runner may have none."""

    def in_turns(self, servers: Sequence[Any], scenario: Scenario) -> Sequence[Trace]:
        """A trace of each of several servers that live side by side. A runner without this measures arms one after another."""

    def score(self, scenario: Text, arms: Sequence[Arm]) -> Sequence[Trace]:
        """A trace of each arm on a text; only where the framework has a probe."""

    def canary(self) -> Reading | None:
        """What a fixed piece of work takes on the machine itself just now (`core.canary`); None where there is none."""


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
            while self._open(self.block.arms) and not self._out_of_time():
                run += 1
                self._announce(run)
                self._one_run(run)
                self._settle_all(final=False)
            self._settle_all(final=True)
        except UserError as e:
            self.progress.error = str(e)
            for gate in self.block.gates:
                self.progress.verdicts.setdefault(gate.key, Verdict(verdict=INVALID, reason=str(e), margin=gate.margin))
        self.progress.complete = True
        self.save(self.progress.plain())
        return self.progress.plain()

    def _open(self, arms: Sequence[Arm]) -> list[Task]:
        """Tasks that have an unsettled gate of these arms: decided scenarios are not measured again."""
        done, names = self.progress.verdicts, {a.name for a in arms}
        return [t for t in self.block.tasks if any(g.key not in done and names & {g.arm, g.against} for g in t.gates)]

    def _settle_all(self, *, final: bool) -> None:
        for gate in self.block.gates:
            if gate.key not in self.progress.verdicts and (verdict := settle(gate, self.progress, self.orders, final=final)):
                self.progress.verdicts[gate.key] = verdict

    def _out_of_time(self) -> bool:
        over = self.orders.deadline is not None and time.monotonic() > self.orders.deadline
        if over:
            self.say("the time budget is spent: judging on the runs made")
        return over

    def _one_run(self, run: int) -> None:
        """One start of every arm, forwards in odd runs and backwards in even ones, so that drift cancels."""
        if self.block.text:
            for task in self._open(self.block.arms):
                self._one_text(run, task.scenario)
            return
        arms = self.block.arms if run % 2 else self.block.arms[::-1]
        together = self.block.together and hasattr(self.runner, "in_turns")
        for group in [arms] if together else [(a,) for a in arms]:
            pending = self._open(group)
            for attempt in range(1, ATTEMPTS + 1):
                if pending:
                    pending = self._one_start(group, run, attempt, pending)

    def _one_text(self, run: int, scenario: Scenario) -> None:
        """A text is scored once: what does not count then would not the next time."""
        began = time.monotonic()
        assert isinstance(scenario, Text)
        for trace in self.runner.score(scenario, self.block.arms):
            problem = trace_problem(trace)
            self._keep(next(a for a in self.block.arms if a.name == trace.arm), run, trace, problem)
            if problem:
                self.progress.broken[str(scenario), trace.arm] = problem[0]
        self.progress.spent_s[str(scenario)] = round(time.monotonic() - began, 3)
        self.save(self.progress.plain())

    def _one_start(self, arms: tuple[Arm, ...], run: int, attempt: int, tasks: list[Task]) -> list[Task]:
        """Measure `tasks` on fresh servers of `arms`, which live side by side; those that the machine spoiled and may be tried again."""
        began, first = time.monotonic(), len(self.progress.measurements)
        problems: dict[Task, Problem] = {}
        before = self._canary()  # while no server of ours lives: it must not feel the thing under test
        try:
            with ExitStack() as stack:
                start = getattr(self.runner, "start_anyway", self.runner.start) if self.block.still else self.runner.start
                servers = [(arm, stack.enter_context(start(arm, run, attempt))) for arm in arms]
                for arm, server in servers:
                    self.progress.server_start_s.append(round(server.start_s, 3))
                    self.progress.note_resolved(arm.name, getattr(server, "resolved", {}))
                problems = self._scenarios(servers, run, tasks)
        except Spoiled as e:  # before anything was measured
            problems = dict.fromkeys(tasks, (str(e), True))
        except UserError as e:
            if not self.block.still:
                raise
            problems = dict.fromkeys(tasks, (str(e), False))  # what one arm holds says something without the others
        self._note_canary(before, self.progress.measurements[first:])
        share = (time.monotonic() - began) / len(tasks)
        for task in tasks:
            name = str(task.scenario)
            self.progress.spent_s[name] = round(self.progress.spent_s.get(name, 0.0) + share, 3)
        return self._again(arms, attempt, problems)

    def _scenarios(self, servers: Sequence[tuple[Arm, Running]], run: int, tasks: list[Task]) -> dict[Task, Problem]:
        """The tasks that have a problem. A window cut short or a lost server ends the start: what is left is for a fresh one."""
        problems: dict[Task, Problem] = {}
        lost = ""
        for task in tasks:
            if lost:
                problems[task] = (lost, True)
                continue
            problem, lost = self._one_scenario(servers, run, task.scenario)
            if problem:
                problems[task] = problem
            self.save(self.progress.plain())
        return problems

    def _one_scenario(self, servers: Sequence[tuple[Arm, Running]], run: int, scenario: Scenario) -> tuple[Problem | None, str]:
        """What is wrong with a scenario, and why nothing more can be measured on this start."""
        arm = servers[0][0]
        try:
            if len(servers) == 1:
                traces: Sequence[Trace] = [servers[0][1].measure(scenario)]
            else:
                traces = self.runner.in_turns([server for _, server in servers], scenario)
        except Spoiled as e:
            self._keep(arm, run, Trace(**_nothing(scenario, arm, run), load=e.seen), (str(e), True))
            return (str(e), True), str(e)
        except UserError as e:
            return (str(e), False), f"the server was lost before this scenario: {e}"
        problems = [trace_problem(t) for t in traces]
        worst = next((p for p in problems if p), None)
        for (one, _), trace, problem in zip(servers, traces, problems, strict=True):
            if worst and not problem:
                trace.load["beside"] = worst[0]
                problem = trace_problem(trace)
            self._keep(one, run, trace, problem)
        return worst, ""

    def _canary(self) -> Reading | None:
        """The machine's own state; of no use to gates between arms, which it meets alike, nor to numbers that do not follow it."""
        return None if self.block.still or all(g.against for g in self.block.gates) else self.runner.canary()

    def _note_canary(self, before: Reading | None, rows: list[dict[str, Any]]) -> None:
        """The machine's state just before and after the server lived stands beside what was measured between."""
        found = around(before, self._canary()) if rows else None
        for row in rows:
            row["canary"] = found
        self.save(self.progress.plain())

    def _again(self, arms: Sequence[Arm], attempt: int, problems: Mapping[Task, Problem]) -> list[Task]:
        """Tasks to measure once more: spoiled by the machine, first attempt. Every other problem breaks the scenario of these arms."""
        again = []
        for task, (problem, by_machine) in problems.items():
            if by_machine and attempt < ATTEMPTS:
                self.say(f"  {task.scenario} does not count and is measured once more: {problem}")
                again.append(task)
            else:
                self.progress.broken |= {(str(task.scenario), arm.name): problem for arm in arms}
        return again

    def _keep(self, arm: Arm, run: int, trace: Trace, problem: tuple[str, bool] | None) -> None:
        row = measurement(trace, problem[0] if problem else None)
        metrics = row["metrics"]
        self.progress.traces.append(self.keep(trace))
        self.progress.measurements.append(row)
        shown = (f"{label} {metrics[m]:.4g} {find_metric(m).unit}".rstrip() for m, label in SHOWN.items() if m in metrics)
        name = str(trace.scenario) if len(self.block.arms) == 1 else f"{trace.scenario} {arm.name}"
        self.say(f"  {name}: " + (", ".join(shown) or "no figures") + ("" if problem is None else "  (does not count)"))

    def _announce(self, run: int) -> None:
        if self.block.text:
            return self.say(f"{self.block.id}: scoring the text")
        fewest, most = self._runs_left(run)
        bound = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        done, left = time.monotonic() - self.began, ""
        if run > 1:
            each = done / (run - 1)
            left = f"; {clock(each * (fewest - run + 1))} left" + (f", at most {clock(each * (most - run + 1))}" if most > fewest else "")
        servers = "server" if len(self.block.arms) == 1 else "servers"
        still = len(self._open(self.block.arms))
        self.say(f"{self.block.id}: run {run} of {bound}, {still} scenario(s) open, starting the {servers}{left}")

    def _runs_left(self, run: int) -> tuple[int, int]:
        """Fewest and most runs in all, as far as the open gates tell."""
        done = self.progress.verdicts
        rule = STILL if self.block.still else self.orders.rule
        return runs_range(rule, {self.orders.needs[g.key] for g in self.block.gates if g.key not in done}, run)


def _nothing(scenario: Scenario, arm: Arm, run: int) -> dict[str, Any]:
    """The fields of a trace of a window that was cut short: nothing in it counts. Of lengths that are drawn none was."""
    sizes = {name: size if isinstance(size := getattr(scenario, name, 0), int) else 0 for name in ("isl", "osl")}
    return {"scenario": str(scenario), "arm": arm.name, "run": run, "workload": "", "records": (), **sizes}


SHOWN = {
    "output_tok_s": "output", "ttft_ms.p50": "TTFT p50", "tpot_ms.p50": "TPOT p50",
    "kv_tokens": "holds", "kv_bytes_per_token": "at", "kv_size_ratio": "ratio to arithmetic",
    "ppl": "ppl", "kld.mean": "mean KLD", "kld.p99": "P99", "top1": "same top token",
}  # fmt: skip


def clock(seconds: float) -> str:
    """A duration for a person: `45 s`, `3 min 20 s`, `1 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"

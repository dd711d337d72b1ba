"""What will be measured together: tests become blocks, blocks have a cost. Pure; known at collection.

A block is the arms that are compared with each other, or all single-arm scenarios of one server configuration. It is
measured as one and shares no server start with another block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .gate import Rule
from .lint import gate_problem
from .metrics import find_metric
from .samples import default_margin
from .spec import Arm, ClosedLoop, Framework, Gate, Scenario, SpecError


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """One number to judge: `key` names it in baselines (family / scenario / arm / metric), never a pytest node id."""

    key: str
    family: str
    scenario: str
    arm: str
    metric: str
    margin: float
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What one collected test asks for."""

    framework: str
    model: str
    family: str
    scenario: Scenario
    gates: tuple[Gate, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A scenario and every gate that reads it, whichever tests they come from."""

    scenario: Scenario
    gates: tuple[GateSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    id: str
    framework: str
    model: str
    arms: tuple[Arm, ...]
    tasks: tuple[Task, ...]


def block_id(want: Wanted) -> str:
    arms = "+".join(a.name + "".join(f",{k}={v}" for k, v in a.asked().items()) for a in want.scenario.arms)
    return f"{want.framework}/{want.model}/{arms}"


def as_gate(value: Gate | str) -> Gate:
    """A gate from what a marker may hold: a `Gate` or a metric's name; SpecError otherwise."""
    gate = Gate(value) if isinstance(value, str) else value
    if not isinstance(gate, Gate):
        raise SpecError(f"kv_gates takes metric names and Gate(...), got {value!r}")
    find_metric(gate.metric)
    return gate


def gate_specs(want: Wanted, margin: float) -> tuple[GateSpec, ...]:
    """The gates of one test, one for each arm; `margin` is the device's default. SpecError for what can be no gate."""
    scenario, requests = str(want.scenario), want.scenario.n_requests
    for gate in want.gates:
        if problem := gate_problem(gate, requests):
            raise SpecError(f"{want.family}/{scenario}: Gate({gate.metric!r}): {problem}")
    return tuple(
        GateSpec(
            key=f"{want.family}/{scenario}/{arm.name}/{gate.metric}", family=want.family, scenario=scenario, arm=arm.name,
            metric=gate.metric, margin=gate.margin or default_margin(margin, gate.metric.partition(".")[2], requests), floor=gate.floor,
        )
        for arm in want.scenario.arms
        for gate in want.gates
    )  # fmt: skip


def _place(s: Scenario) -> tuple[Any, ...]:
    return s.isl, s.osl, type(s).__name__, s.concurrency if isinstance(s, ClosedLoop) else 0, str(s)


def make_plan(wanted: Iterable[Wanted], margin: float) -> tuple[Block, ...]:
    """Blocks in the order of their first test. Two tests that claim one key with different margins or floors are an error."""
    work: dict[str, dict[Scenario, dict[str, GateSpec]]] = {}
    heads: dict[str, Wanted] = {}
    for want in wanted:
        head = heads.setdefault(block_id(want), want)
        gates = work.setdefault(block_id(head), {}).setdefault(want.scenario, {})
        for spec in gate_specs(want, margin):
            if gates.setdefault(spec.key, spec) != spec:
                one, two = (f"margin={g.margin:g}, floor={g.floor:g}" for g in (gates[spec.key], spec))
                raise SpecError(f"{spec.key}: two tests claim it, one with {one}, one with {two}")
    return tuple(
        Block(
            id=name, framework=heads[name].framework, model=heads[name].model, arms=heads[name].scenario.arms,
            # In an order of their own, so that the order of tests changes nothing on the server.
            tasks=tuple(Task(scenario=s, gates=tuple(tasks[s].values())) for s in sorted(tasks, key=_place)),
        )
        for name, tasks in work.items()
    )  # fmt: skip


def undeclared(block: Block, framework: Framework) -> str:
    """What an arm asks for that the framework does not have, in words; it would be ignored and measured under that name."""
    for arm in block.arms:
        for what, asked, has in (
            ("kv_dtype", arm.kv_dtype, framework.kv_dtypes),
            ("weight_dtype", arm.weight_dtype, framework.weight_dtypes),
        ):
            if asked not in has:
                return f"{block.id}: {framework.name} has no {what} {asked!r}; it has {', '.join(has)}"
    return ""


# Before a machine has been measured: seconds of a server start and of a scenario, from the embedded default on 2 cores.
START_S = {"cpu": 10.0, "gpu": 110.0}
SCENARIO_S = {"cpu": 9.0, "gpu": 60.0}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a block will take: runs from best to worst case, and their seconds."""

    runs: tuple[int, int]
    starts: tuple[int, int]
    seconds: tuple[float, float]


def cost(block: Block, runs: tuple[int, int], kind: str) -> Cost:
    """The cost of `runs` (fewest, most) runs."""
    one = len(block.arms) * (START_S[kind] + SCENARIO_S[kind] * len(block.tasks))
    starts = (runs[0] * len(block.arms), runs[1] * len(block.arms))
    return Cost(runs=runs, starts=starts, seconds=(runs[0] * one, runs[1] * one))


def runs_range(rule: Rule, needs: Iterable[str]) -> tuple[int, int]:
    """Fewest and most runs of a block, by what its gates need (see `core.baseline.need`)."""
    bounds = {
        "judge": (rule.looks[0], rule.looks[-1]), "record": (rule.record_runs, rule.record_runs), "report": (1, 1), "nothing": (0, 0),
    }  # fmt: skip
    found = [bounds[n] for n in needs]
    return max(low for low, _ in found), max(high for _, high in found)


def plan_row(block: Block, one: Cost) -> dict[str, Any]:
    """A block and its cost as run.json has them."""
    return {
        "id": block.id, "framework": block.framework, "model": block.model, "arms": [a.name for a in block.arms],
        "scenarios": [str(t.scenario) for t in block.tasks], "server_starts": list(one.starts),
        "seconds": [round(s, 1) for s in one.seconds],
    }  # fmt: skip

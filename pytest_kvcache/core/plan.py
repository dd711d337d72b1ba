"""What will be measured together: tests become blocks, blocks have a cost. Pure; known at collection.

A block is the arms that are compared with each other, or all single-arm scenarios of one server configuration. It is
measured as one and shares no server start with another block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .arms import kind_of
from .gate import PAIRED, Rule
from .lengths import longest
from .lint import gate_problem, text_problem
from .metrics import find_metric
from .samples import default_margin
from .scenarios import Capacity, ClosedLoop, OpenLoop, Scenario, Text, Traffic
from .spec import OTHER, Arm, Gate, SpecError


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """One number to judge: `key` names it in baselines (family / scenario / arm / metric), never a pytest node id.

    With `against`, an arm that is measured in turns with it, there is no baseline; `at_least` is the gain that is claimed then, in
    place of a margin. With `limit`, in the metric's own unit, nothing else is asked.
    """

    key: str
    family: str
    scenario: str
    arm: str
    metric: str
    margin: float
    floor: float = 0.0
    against: str = ""
    at_least: float | None = None
    limit: float | None = None

    @property
    def once(self) -> bool:
        """Whether one run decides it and nothing stored is asked: a limit, or a number without spread beside that of another arm."""
        return self.limit is not None or bool(self.against and find_metric(self.metric).drift is not None)


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
    """What is measured as one. `together`: the servers of its two arms live side by side, and short windows alternate between them.

    Only closed loops, and arms that are compared with nothing but each other.
    """

    id: str
    framework: str
    model: str
    arms: tuple[Arm, ...]
    tasks: tuple[Task, ...]
    together: bool = False

    @property
    def text(self) -> bool:
        """Whether texts are scored, which is done once, for all arms at once."""
        return any(isinstance(t.scenario, Text) for t in self.tasks)

    @property
    def still(self) -> bool:
        """Whether its numbers do not vary from run to run: one run of it decides, and the machine's state is no matter."""
        return any(isinstance(t.scenario, Text | Capacity) for t in self.tasks)

    @property
    def gates(self) -> tuple[GateSpec, ...]:
        """Those of all its tasks."""
        return tuple(g for t in self.tasks for g in t.gates)


def block_id(want: Wanted) -> str:
    arms = "+".join(a.name + "".join(f",{k}={v}" for k, v in a.asked().items()) for a in want.scenario.arms)
    return f"{want.framework}/{want.model}/{kind_of(want.scenario)}{arms}"


def as_gate(value: Gate | str) -> Gate:
    """A gate from what a marker may hold: a `Gate` or a metric's name; SpecError otherwise."""
    gate = Gate(value) if isinstance(value, str) else value
    if not isinstance(gate, Gate):
        raise SpecError(f"kv_gates takes metric names and Gate(...), got {value!r}")
    find_metric(gate.metric)
    return gate


def on_two_builds(want: Wanted) -> Wanted:
    """The same on two builds at once: each arm a second time on the other build, and each gate of an arm against that (`--kv-ab`).

    What one arm claims against another stays as it is: a claim on the session's own build.
    """
    own = want.scenario.arms
    others = tuple(dataclasses.replace(a, name=f"{a.name}.{OTHER}", build=OTHER) for a in own)
    gates: list[Gate] = []
    for gate in want.gates:
        names = [] if gate.against else [a.name for a in own if gate.arm in (None, a.name)]
        gates += [dataclasses.replace(gate, arm=name, against=f"{name}.{OTHER}") for name in names] or [gate]
    scenario = dataclasses.replace(want.scenario, arms=own + others)
    return dataclasses.replace(want, scenario=scenario, gates=tuple(gates))


def gate_specs(want: Wanted, margin: float) -> tuple[GateSpec, ...]:
    """The gates of one test, one for each arm that each is of; `margin` is the device's default. SpecError for what can be no gate."""
    scenario, requests = str(want.scenario), want.scenario.n_requests
    names = [a.name for a in want.scenario.arms]
    for gate in want.gates:
        problem = text_problem(gate, want.scenario) or ("" if isinstance(want.scenario, Text | Capacity) else gate_problem(gate, requests))
        for name in (gate.arm, gate.against):
            problem = problem or (f"no arm {name!r}; the scenario has {', '.join(names)}" if name not in (None, *names) else "")
        if problem:
            raise SpecError(f"{want.family}/{scenario}: Gate({gate.metric!r}): {problem}")
    return tuple(
        _gate_spec(want, gate, arm.name, margin, requests)
        for arm in want.scenario.arms
        for gate in want.gates
        if gate.arm in (None, arm.name) and (gate.arm or not arm.build)
    )


def _gate_spec(want: Wanted, gate: Gate, arm: str, device_margin: float, requests: int) -> GateSpec:
    scenario, against = str(want.scenario), gate.against or ""
    drift = find_metric(gate.metric).drift
    usual = drift or default_margin(PAIRED.margin if against else device_margin, gate.metric.partition(".")[2], requests)
    # Builds have no place in a key: it says which number this is. Two arms have one claim each, beside those on baselines.
    place = arm if not against or against == f"{arm}.{OTHER}" else f"{arm}-vs-{against}"
    place += "-limit" if gate.limit is not None else ""
    return GateSpec(
        key=f"{want.family}/{scenario}/{place}/{gate.metric}", family=want.family, scenario=scenario, arm=arm, metric=gate.metric,
        margin=0.0 if gate.at_least or gate.limit is not None else gate.margin or usual, floor=gate.floor, against=against,
        at_least=gate.at_least, limit=gate.limit,
    )  # fmt: skip


def _place(s: Scenario) -> tuple[Any, ...]:
    if not isinstance(s, Traffic):
        return 0, s.n_requests, type(s).__name__, 0, str(s)
    return longest(s.isl), longest(s.osl), type(s).__name__, s.concurrency if isinstance(s, ClosedLoop) else 0, str(s)


def make_plan(wanted: Iterable[Wanted], margin: float, *, side_by_side: bool = False) -> tuple[Block, ...]:
    """Blocks in the order of their first test. Two tests that claim one key with different margins or floors are an error.

    `side_by_side` says that the device can hold two servers at a time: two arms that are compared then alternate in short windows.
    """
    work: dict[str, dict[Scenario, dict[str, GateSpec]]] = {}
    heads: dict[str, Wanted] = {}
    for want in wanted:
        head = heads.setdefault(block_id(want), want)
        gates = work.setdefault(block_id(head), {}).setdefault(want.scenario, {})
        for spec in gate_specs(want, margin):
            if gates.setdefault(spec.key, spec) != spec:
                one, two = (_terms(g) for g in (gates[spec.key], spec))
                raise SpecError(f"{spec.key}: two tests claim it, one with {one}, one with {two}")
    return tuple(_block(name, heads[name], tasks, side_by_side) for name, tasks in work.items())


def _terms(g: GateSpec) -> str:
    if g.limit is not None:
        return f"limit={g.limit:g}"
    return f"at_least={g.at_least:g}" if g.at_least else f"margin={g.margin:g}, floor={g.floor:g}"


def _block(name: str, head: Wanted, tasks: dict[Scenario, dict[str, GateSpec]], side_by_side: bool) -> Block:
    arms, gates = head.scenario.arms, [g for found in tasks.values() for g in found.values()]
    # Only where nothing else is asked of them: a number for a baseline must be measured in the same way in every session, and the
    # bursts of an open loop would never build up its queue.
    alike = all(g.against for g in gates) and all(isinstance(s, ClosedLoop) for s in tasks)
    together = side_by_side and alike and len(arms) == 2
    return Block(
        id=name, framework=head.framework, model=head.model, together=together,
        # Half of what would fit: a large pool takes seconds to touch at every start, and all of memory must not be taken.
        arms=tuple(dataclasses.replace(a, memory_share=0.5 / len(arms)) for a in arms) if together else arms,
        # In an order of their own, so that the order of tests changes nothing on the server.
        tasks=tuple(Task(scenario=s, gates=tuple(tasks[s].values())) for s in sorted(tasks, key=_place)),
    )  # fmt: skip


# Before a machine has been measured: seconds of a server start and of a scenario, from the embedded default on 2 cores.
START_S = {"cpu": 10.0, "gpu": 110.0}
SCENARIO_S = {"cpu": 9.0, "gpu": 60.0}
# Of a text through one cache: the model's loading, a pass, a token of a pass (transformers on 2 cores; vLLM on an H200, a process an arm).
TEXT_S = {"cpu": (5.0, 0.05, 0.004), "gpu": (40.0, 0.03, 0.0)}
CONTROLS, PASSES_OF_TASK = 2, 16  # beside the arms; of one short task


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a block will take: runs from best to worst case, and their seconds."""

    runs: tuple[int, int]
    starts: tuple[int, int]
    seconds: tuple[float, float]


def cost(block: Block, runs: tuple[int, int], kind: str) -> Cost:
    """The cost of `runs` (fewest, most) runs."""
    if block.text:
        text_s = sum(_text_s(t.scenario, kind) for t in block.tasks if isinstance(t.scenario, Text))
        return Cost(runs=runs, starts=(0, 0), seconds=(runs[0] * text_s, runs[1] * text_s))
    loads = sum(_load_s(t.scenario, kind) for t in block.tasks)
    one = len(block.arms) * (START_S[kind] + loads * (2 if block.together else 1))
    starts = (runs[0] * len(block.arms), runs[1] * len(block.arms))
    return Cost(runs=runs, starts=starts, seconds=(runs[0] * one, runs[1] * one))


def _load_s(scenario: Scenario, kind: str) -> float:
    """Seconds of a load on a server that answers; an open loop takes as long as its schedule."""
    if isinstance(scenario, OpenLoop):
        return scenario.n_requests / scenario.rate + SCENARIO_S[kind]
    return SCENARIO_S[kind]


def _text_s(text: Text, kind: str) -> float:
    """Seconds of a text through all its caches, one after another."""
    from .sanity import PROMPTS
    from .tasks import TASKS

    load, one_pass, token = TEXT_S[kind]
    step = text.scheme.step or text.scheme.window
    scored = text.windows * -(-text.scheme.window // step)
    written = text.answer_tokens * len(PROMPTS) + len(TASKS) * text.tasks * PASSES_OF_TASK
    caches = len(text.arms) + CONTROLS
    return caches * (load + scored * (one_pass + step * token)) + len(text.arms) * written * (one_pass + token)


def runs_range(rule: Rule, needs: Iterable[str], run: int = 1) -> tuple[int, int]:
    """Fewest and most runs of a block, by what its gates need (see `core.evidence.Evidence`), seen from before a `run`. `rule` is that of
    its gates on baselines."""
    looks, rounds = ([n for n in r.looks if n >= run] or [run] for r in (rule, PAIRED))
    bounds = {
        "judge": (looks[0], looks[-1]), "record": (rule.record_runs, rule.record_runs), "report": (1, 1), "attached": (1, 1),
        "nothing": (0, 0), "limit": (1, 1),
        "pair": (rounds[0], rounds[-1]),
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

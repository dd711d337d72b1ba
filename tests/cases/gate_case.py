"""A case of kind `gate` on the product: what it stores and what it measures go through look-up and judgement as in a session.

A case has one value a side. It is fed as the fewest runs that are judged, with a spread of 0.1 %, and as if both sides had been
measured together, since a case knows no day. A metric that the product does not have is a row of its table for the while.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.gate import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    MIN_BASE_RUNS,
    MISMATCH,
    NO_BASELINE,
    PASS,
    REGRESSION,
    Rule,
    Verdict,
)
from pytest_kvcache.core.metrics import METRICS, Metric, find_metric
from pytest_kvcache.core.plan import Block, GateSpec, Task
from pytest_kvcache.core.progress import Orders, Progress, settle
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Arm

SCENARIO = ClosedLoop(isl=8, osl=4, concurrency=1, requests=5000)
RULE = Rule(session_prior=0.0)
SPREAD = (1.0, 1.001, 0.999, 1.0005, 0.9995)
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
NAMES = {
    "output_tokens_per_s": "output_tok_s", "total_tokens_per_s": "total_tok_s", "requests_per_s": "req_s",
    **{f"{name}_ms": f"{name}_ms.p50" for name in ("ttft", "ttfa", "tpot", "itl", "e2e")},
    **{f"{name}_{q}_ms": f"{name}_ms.{q}" for name in ("ttft", "ttfa", "tpot", "itl", "e2e") for q in ("p50", "p90", "p95", "p99")},
}  # fmt: skip
HIGHER = re.compile(r"per_s|per_j|tok_s|tok_j|req_s|gb_s|goodput|throughput|rate|capacity|accuracy|top1|score|recall")
DOCUMENTATION = {"expected", "note", "why", "unavailable_reason", "accept"}
SIDES = ("baseline", "current")


def metric_of(name: str) -> tuple[str, Metric]:
    """The product's name and row of a metric of the cases."""
    name = NAMES.get(name, name)
    if name.partition(".")[0] in METRICS:
        return name, find_metric(name)
    better = "higher" if HIGHER.search(name) else "lower"
    return name, Metric(name, "", better, f"{name}.case", total=lambda window: None)


def side(row: Mapping[str, Any], which: str) -> dict[str, Any]:
    """What a row says of one side besides its value, by the name without the side's."""
    return {k.removeprefix(f"{which}_"): v for k, v in row.items() if k.startswith(f"{which}_")}


def document(key: str, metric: Metric, runs: Sequence[Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A baseline with the runs of one gate; without any where the case has no baseline."""
    doc = stored.empty("gpu", "framework", "model")
    if runs:
        doc["sessions"] = {"s": {"started": "2026-01-01T00:00:00Z", "environment": environment(about)}}
        rows = [{"session": "s", "value": v, "n": about.get("n", SCENARIO.n_requests), "failed": 0} for v in runs]
        doc["entries"][key] = {
            "unit": about.get("unit", metric.unit), "better": metric.better, "definition": about.get("definition", metric.definition),
            "workload": str(about.get("workload", "w")), "runs": rows,
        }  # fmt: skip
    return doc


def environment(about: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever is said of a side, and is no property of the number itself, is its identity."""
    own = {"unit", "definition", "workload", "n", "repeats", "ids"}
    identity = {k: v for k, v in about.items() if k not in own}
    return {"identity": identity, "subject": {}, "context": {}}


def spread(value: Any, runs: int) -> list[Any]:
    value = SPECIAL.get(value, value) if isinstance(value, str) else value
    return [value * s if isinstance(value, int | float) else value for s in SPREAD[:runs]]


def judged(row: Mapping[str, Any], policy: Mapping[str, Any]) -> Verdict:
    """The product's verdict on a row (`baseline` and `current`, or their `_repeats`)."""
    name, metric = metric_of(row["metric"])
    repeats = row.get("current_repeats")
    old = row.get("baseline_repeats") or ([] if row.get("baseline") is None else spread(row["baseline"], MIN_BASE_RUNS))
    new = repeats or spread(row.get("current"), RULE.looks[0])
    rule = dataclasses.replace(RULE, looks=(len(new),)) if repeats else RULE
    gate = GateSpec(
        key=f"case/{SCENARIO}/base/{name}", family="case", scenario=str(SCENARIO), arm="base", metric=name,
        margin=row.get("rel", policy.get("rel", RULE.margin)), floor=row.get("abs", policy.get("abs", {}).get(row["metric"], 0.0)),
    )  # fmt: skip
    before, now = (side(row, which) for which in SIDES)
    with patch.dict(METRICS, {metric.name: dataclasses.replace(metric, unit=now.get("unit", metric.unit))}):
        return _settled(gate, document(gate.key, metric, old, before), new, now, rule)


def _settled(gate: GateSpec, doc: Mapping[str, Any], new: Sequence[Any], now: Mapping[str, Any], rule: Rule) -> Verdict:
    block = Block(id="case", framework="f", model="m", arms=(Arm(),), tasks=(Task(scenario=SCENARIO, gates=(gate,)),))
    current = stored.Current(environment=environment(now), workload=str(now.get("workload", "w")))
    base = stored.lookup(doc, gate.key, find_metric(gate.metric), current)
    progress = Progress(block=block, environment=environment(now))
    progress.measurements = [
        {
            "run": run, "scenario": str(SCENARIO), "arm": "base", "valid": True, "requests": now.get("n", SCENARIO.n_requests), "canary": None,
            "metrics": {} if v is None else {gate.metric: v}, "load": {},
        } for run, v in enumerate(new, 1)
    ]  # fmt: skip
    need = "nothing" if base.missing and not progress.measurements else "judge"
    verdict = settle(gate, progress, Orders(rule=rule, needs={gate.key: need}, bases={gate.key: base}), final=True)
    assert verdict is not None
    return verdict


def classes(verdict: Verdict) -> set[str]:
    """What a verdict of the product is called in the cases."""
    found = {
        PASS: {"pass"}, IMPROVEMENT: {"pass", "warn"}, REGRESSION: {"regression"}, NO_BASELINE: {"no_baseline"}, INCONCLUSIVE: {"warn"},
        INVALID: {"invalid"},
    }[verdict.verdict]  # fmt: skip
    words = {
        "missing": "missing", "invalid_baseline": "baseline value", "not_comparable": "differs", "invalid_environment": MISMATCH,
    }  # fmt: skip
    if verdict.verdict == INVALID:
        found |= {name for name, part in words.items() if part in verdict.reason}
        found |= {"not_comparable"} if verdict.reason.startswith(MISMATCH) else set()
    return found | ({"warn"} if verdict.notes else set())


def at_the_margin(row: Mapping[str, Any], policy: Mapping[str, Any]) -> bool:
    """Whether a row lies on its margin, to within the spread that it is fed with: there no verdict can be asked for."""
    old, new = row.get("baseline"), row.get("current")
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return False
    return abs(abs(new / old - 1) - row.get("rel", policy.get("rel", 0.0))) <= 0.002


def row_problem(row: Mapping[str, Any], policy: Mapping[str, Any]) -> str:
    """Why the product's verdict on a row is not the expected one; empty when it is."""
    known = {"metric", *SIDES, "rel", "abs"} | DOCUMENTATION
    if unknown := [k for k in row if k not in known and not k.startswith(("baseline_", "current_"))]:
        return f"this runner does not know {unknown} of a row"
    verdict = judged(row, policy)
    accepted = {row["expected"], *row.get("accept", ())} | ({"pass", "warn"} if at_the_margin(row, policy) else set())
    return "" if classes(verdict) & accepted else f"{row}: {verdict.verdict} ({verdict.reason})"

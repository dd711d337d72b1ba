"""Gates that could never fail, or never pass, are refused at collection. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .metrics import QUANTILES, SIZES, find_metric, too_few
from .samples import floor
from .scenarios import Capacity, Scenario, Text
from .spec import Gate
from .stats import FLOOR

MOST_MARGIN = 0.5  # beyond it half the speed, or half as much again of the latency, would pass
LEAST_GAIN = 0.2  # of an arm beside another: that an offload tier keeps a third of the speed is a claim, that it keeps a tenth is none


def gate_problem(gate: Gate, requests: int) -> str:
    """Why a gate of runs of so many requests is no gate, with what to write instead; empty when it is one."""
    if problem := margin_problem(gate):
        return problem
    quantile = gate.metric.partition(".")[2]
    if not quantile or requests >= (least := floor(QUANTILES[quantile])):
        return ""
    what = "is only their largest value" if too_few(quantile, requests) else "has too few of them beyond it to be certified"
    return f"{gate.metric} of {requests} requests {what}; gate a lower quantile, or ask for more (requests={least})"


def margin_problem(gate: Gate) -> str:
    """Why a margin could never fail, or never pass; empty when it is one."""
    if gate.margin is not None and gate.margin > MOST_MARGIN:
        return f"margin={gate.margin:g} lets a loss of {100 * gate.margin:.3g} % pass, it could hardly ever fail; at most {MOST_MARGIN:g}"
    if gate.margin is not None and gate.margin < FLOOR:
        return f"margin={gate.margin:g} can never be certified: runs resolve {100 * FLOOR:g} %; at least {FLOOR:g}"
    if gate.at_least is not None and gate.at_least < LEAST_GAIN:
        lost = 100 * (1 - gate.at_least)
        return f"at_least={gate.at_least:g} lets a loss of {lost:.3g} % pass, it could hardly ever fail; at least {LEAST_GAIN:g}"
    return ""


LOOSEST = {"ppl_ratio": 1.5, "kld.mean": 1.0, "kld.p99": 6.0, "kld.p999": 12.0, "top1": 0.5}  # beyond it a cache of noise would pass


def text_problem(gate: Gate, scenario: Scenario) -> str:
    """Why a gate has no meaning on a text or on what a cache holds, or a gate of these on a load; empty when it has."""
    metric = find_metric(gate.metric)
    if isinstance(scenario, Capacity) or gate.metric in SIZES:
        return _size_problem(gate, scenario)
    if not isinstance(scenario, Text):
        if metric.drift is not None:
            return "is a figure of a text; parametrize with Text(...)"
        return "limit= is of figures of a text; of a load, write margin= or at_least=" if gate.limit is not None else ""
    if metric.drift is None:
        return "is a figure of a load; a text has ppl, ppl_ratio, kld.mean, kld.p99, kld.p999 and top1"
    if gate.against:
        return f"every arm of a text is compared with {scenario.reference} already; leave against= out"
    if gate.arm in (None, scenario.reference) and gate.metric != "ppl":
        return f"of {scenario.reference} itself it says nothing, it is the reference; name another arm"
    loosest = LOOSEST.get(gate.metric)
    if gate.limit is None or loosest is None:
        return margin_problem(gate)
    beyond = gate.limit > loosest if metric.better == "lower" else gate.limit < loosest
    return f"limit={gate.limit:g} would let a cache of noise pass; {loosest:g} is the loosest" if beyond else ""


MOST_RATIO = 1.25  # a cache that wastes a fifth of its bytes is no claim


def _size_problem(gate: Gate, scenario: Scenario) -> str:
    if not isinstance(scenario, Capacity):
        return "is a figure of what a cache holds; parametrize with Capacity(...)"
    if gate.metric not in SIZES:
        return f"is no figure of what a cache holds; that has {', '.join(SIZES)}"
    if gate.metric == "kv_size_ratio" and gate.limit is not None and gate.limit > MOST_RATIO:
        return f"limit={gate.limit:g} would let a fifth of a cache's bytes be wasted; {MOST_RATIO:g} is the loosest"
    if gate.metric == "kv_size_ratio" and gate.against:
        return f"each arm is compared with its own arithmetic; leave against={gate.against!r} out"
    return margin_problem(gate)


def unclaimed(stored: Iterable[str], claimed: Iterable[str]) -> list[str]:
    """Keys of stored numbers that no gate of a whole suite claims: their tests were renamed, or are gone."""
    return sorted(set(stored) - set(claimed))

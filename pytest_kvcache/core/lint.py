"""Gates that could never fail, or never pass, are refused at collection. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .metrics import QUANTILES, too_few
from .samples import floor
from .spec import Gate
from .stats import FLOOR

MOST_MARGIN = 0.5  # beyond it half the speed, or half as much again of the latency, would pass
LEAST_GAIN = 0.2  # of an arm beside another: that an offload tier keeps a third of the speed is a claim, that it keeps a tenth is none


def gate_problem(gate: Gate, requests: int) -> str:
    """Why a gate of runs of so many requests is no gate, with what to write instead; empty when it is one."""
    if gate.margin is not None and gate.margin > MOST_MARGIN:
        return f"margin={gate.margin:g} lets a loss of {100 * gate.margin:.3g} % pass, it could hardly ever fail; at most {MOST_MARGIN:g}"
    if gate.margin is not None and gate.margin < FLOOR:
        return f"margin={gate.margin:g} can never be certified: runs resolve {100 * FLOOR:g} %; at least {FLOOR:g}"
    if gate.at_least is not None and gate.at_least < LEAST_GAIN:
        lost = 100 * (1 - gate.at_least)
        return f"at_least={gate.at_least:g} lets a loss of {lost:.3g} % pass, it could hardly ever fail; at least {LEAST_GAIN:g}"
    quantile = gate.metric.partition(".")[2]
    if not quantile or requests >= (least := floor(QUANTILES[quantile])):
        return ""
    what = "is only their largest value" if too_few(quantile, requests) else "has too few of them beyond it to be certified"
    return f"{gate.metric} of {requests} requests {what}; gate a lower quantile, or ask for more (requests={least})"


def unclaimed(stored: Iterable[str], claimed: Iterable[str]) -> list[str]:
    """Keys of stored numbers that no gate of a whole suite claims: their tests were renamed, or are gone."""
    return sorted(set(stored) - set(claimed))

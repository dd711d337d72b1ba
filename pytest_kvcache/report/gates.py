"""A verdict as the page shows it: every number written out, its picture, and the causes that failures share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..core.gate import INCONCLUSIVE, REGRESSION, VERDICTS
from . import plots
from .numbers import MINUS, NONE, THIN, digits, finite, finites, interval, number, percent, probability, quantity, share
from .terminal import beside, label, runs, shares_environment

Plain = dict[str, Any]
KINDS = (*VERDICTS[:4], "recorded", *VERDICTS[4:])  # worst first; `recorded`: a baseline stored just now
DOT = " \N{MIDDLE DOT} "


def gate_view(v: Plain, index: int, *, error: str | None, several: bool) -> Plain:
    """`error` is why the gate's block could not be measured; `several` whether its block must be named."""
    unit, n, place = v["unit"], digits(v["metric"]), DOT.join((v["scenario"], v["arm"] + (f" vs {beside(v)}" if beside(v) else "")))
    gate: Plain = {
        "raw": v, "kind": label(v), "failed": v["outcome"] == "failed", "metric": v["metric"], "place": place,
        "where": DOT.join((v["family"], place, *([v["block"]] if several else []))), "unit": unit,
        "better": v["better"],
        "value": quantity(v["value"], unit, n), "baseline": NONE if has_limit(v) else quantity(v["baseline"], unit, n),
        "beside": beside(v), "amount": amount(v),
        "explains": (v["verdict"] == REGRESSION or bool(v["changed"])) and not (shares_environment(v) or has_limit(v)),
        "change": amount(v).removesuffix(" the limit") or NONE if has_limit(v) else percent(v["change"]), "interval": _interval(v),
        "margin": _margin(v),
        "p": probability(v["p_seq"]), "counts": (len(finites(v["runs"])), len(finites(v["baseline_runs"]))),
        "changed": [parse_change(text) for text in v["changed"]], "moved_with": v.get("moved_with") or [],
        "told": bool(error) and v["reason"] == error, "remedy": _remedy(v), "strip": _strip(v, f"strip-{index}", place),
        "card_strip": _strip(v, f"card-{index}", place),
    }  # fmt: skip
    gate["drawn"] = _drawn(gate, v["family"] + (DOT + v["block"] if several else ""))
    return gate


def has_limit(v: Plain) -> bool:
    """Whether a gate is on the figure itself, not on its change."""
    return v.get("limit") is not None


def _margin(v: Plain) -> str:
    if has_limit(v):
        return f"limit {brief_limit(v['limit'], v['unit'])}"
    return f"{v['at_least']:g} times" if v.get("at_least") else share(v["margin"])


def brief_limit(limit: Any, unit: str) -> str:
    """A limit as its author wrote it: 1.005, 0.015 nats."""
    x = finite(limit)
    return NONE if x is None else f"{x:.6g}".replace("-", MINUS) + (f"{THIN}{unit}" if unit else "")


def _interval(v: Plain) -> str:
    """Of a change, or of the figure itself where that has a limit."""
    limit = finite(v.get("limit"))
    if limit is None:
        return interval(v["low"], v["high"])
    ends = [None if (x := finite(v[end])) is None else finite(limit * (1 + x)) for end in ("low", "high")]
    if ends == [None, None]:
        return NONE
    return f"{number(ends[0], digits(v['metric']))} to {quantity(ends[1], v['unit'], digits(v['metric']))}"


def amount(v: Plain) -> str:
    """The change in words, without a sign that could be read either way."""
    change = finite(v["change"])
    if change is None:
        return ""
    if has_limit(v):
        return f"{percent(change)[1:]} {'below' if change < 0 else 'above'} the limit" if change else "at the limit"
    worse = (change < 0) == (v["better"] == "higher")
    return f"{percent(change)[1:]} {'worse' if worse else 'better'}" if change else "unchanged"


def parse_change(text: str) -> tuple[str, str | None, str | None]:
    """`name: old -> new` as its parts; any other text whole."""
    if match := re.fullmatch(r"(.*?): (.*) -> (.*)", text, re.DOTALL):
        return match[1], match[2], match[3]
    return text, None, None


def _remedy(v: Plain) -> list[str]:
    """What would settle an open gate."""
    if v["verdict"] != INCONCLUSIVE:
        return []
    more, margin = v.get("more_runs"), finite(v.get("certifiable"))
    lines = [f"About {number(more)} more {runs(more, v).partition(' ')[2]} would settle it."] if more else []
    return lines + ([] if margin is None else [f"The smallest margin these runs could certify is {share(margin)}."])


def _drawn(gate: Plain, group: str) -> plots.Gate:
    """The gate turned so that + is worse."""
    v = gate["raw"]
    change, low, high = (finite(v[k]) for k in ("change", "low", "high"))
    if v["better"] == "higher":
        change, low, high = (None if x is None else -x for x in (change, high, low))
    return plots.Gate(
        group=group, metric=gate["metric"], place=gate["place"], kind=gate["kind"], word=gate["kind"],
        change=gate["change"], worse=change, low=low, high=high, margin=None if v.get("at_least") else finite(v["margin"]),
    )  # fmt: skip


def _strip(v: Plain, ident: str, place: str) -> str:
    """The picture of the gate's runs; empty when neither side has several, or none that one scale could hold."""
    old = plots.Runs(values=finites(v["baseline_runs"]), mean=finite(v["baseline"]))
    new = plots.Runs(values=finites(v["runs"]), mean=finite(v["value"]))
    drawn = [*old.values, *new.values, *(x for x in (old.mean, new.mean) if x is not None)]
    if max(len(old.values), len(new.values)) < 2 or any(x and not 1e-12 < abs(x) < 1e15 for x in drawn):
        return ""
    margin, limit = finite(v["margin"]), None
    if old.mean is not None and margin is not None:
        higher, gain = v["better"] == "higher", finite(v.get("at_least"))
        limit = old.mean * ((gain if higher else 1 / gain) if gain else 1 - margin if higher else 1 + margin)
    title = f"Runs of {v['metric']}, {place}"
    return plots.strip(ident, title, kind=label(v), unit=v["unit"], old=old, new=new, limit=limit)


def is_remark(gate: Plain) -> bool:
    """Passed, yet worth a look: too weak, or better than its baseline knows, or not compared at all."""
    return not gate["failed"] and gate["kind"] in ("inconclusive", "improvement", "no-baseline")


def grouped(gates: Iterable[Plain]) -> list[list[Plain]]:
    """Gates of one block with the same verdict, reason, cure and changes, to be told once."""
    groups: dict[str, list[Plain]] = {}
    for g in gates:
        v = g["raw"]
        same = [v["block"], g["kind"], v["reason"], v["cure"], v["changed"], v["notes"], v.get("remarks"), g["remedy"]]
        groups.setdefault(json.dumps(same), []).append(g)
    return list(groups.values())


def failures(gates: Iterable[Plain]) -> list[list[Plain]]:
    """A card for each regression; other failures that have one cause share a card."""
    failed = [g for g in gates if g["failed"]]
    alone = [[g] for g in failed if g["kind"] == REGRESSION]
    return alone + grouped(g for g in failed if g["kind"] != REGRESSION)

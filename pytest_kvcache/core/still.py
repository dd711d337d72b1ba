"""Gates on numbers that do not vary from run to run: figures of a text, and what a cache holds. One run of an arm decides. Pure.

Two claims can be made of one. A `limit` says that the figure is good enough, whatever was stored: of a text what is not certain is the
text, of which there could be more, so its bounds by the windows (`core.perplexity.Figure.bounds`) must lie on the limit's good side; a
size is certain. A margin says that it is what it was: nothing but a change of builds moves it, and no spread is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .gate import Base, bad_values, differs, in_unit, missing
from .metrics import Metric, find_metric
from .quality import too_lucky
from .rule import IMPROVEMENT, INCONCLUSIVE, INVALID, NO_BASELINE, PASS, REGRESSION, Rule
from .verdict import FEW_SAMPLES, SMOKE, Verdict

if TYPE_CHECKING:
    from .plan import GateSpec
    from .progress import Orders, Progress

# One run is a baseline and one run is judged.
STILL = Rule(looks=(1,), record_runs=1, record_sessions=1, base_runs=1, session_prior=0.0)
FEWEST_WINDOWS = 4  # of which the spread between windows says anything
UNMEASURED = "the time budget was spent before it was measured"


def of_limit(value: float, bounds: Sequence[float | None], limit: float, metric: Metric, *, windows: int) -> Verdict:
    """Whether a figure keeps a limit. `bounds` as `Figure.bounds`, of so many windows; None is an end that the text does not show."""
    if problem := bad_values([value], "a measured value"):
        return Verdict(verdict=INVALID, reason=problem, margin=0.0)
    told = partial(Verdict, value=value, runs=(value,), baseline=limit, change=value / limit - 1, margin=0.0)
    if windows < FEWEST_WINDOWS:
        return told(verdict=INCONCLUSIVE, reason=f"{FEW_SAMPLES}{windows} windows; {FEWEST_WINDOWS} are the least")
    low, high = (side * math.inf if b is None else b for b, side in zip(bounds, (-1, 1), strict=True))
    worst, best = (high, low) if metric.better == "lower" else (low, high)
    told = partial(told, low=_share(low, limit), high=_share(high, limit))
    if _within(worst, limit, metric.better):
        return told(verdict=PASS)
    if not _within(best, limit, metric.better):
        return told(verdict=REGRESSION, reason=f"the limit is {limit:g}, and other windows of the text would not keep it either")
    if not math.isfinite(worst):
        return told(verdict=INCONCLUSIVE, reason=f"{FEW_SAMPLES}too few tokens lie beyond this quantile: score more windows")
    return told(verdict=INCONCLUSIVE, reason=FEW_SAMPLES + _more(value, worst, limit, metric.better, windows))


def _share(end: float, limit: float) -> float | None:
    return end / limit - 1 if math.isfinite(end) else None


def _within(value: float, limit: float, better: str) -> bool:
    return value < limit if better == "lower" else value > limit


def _more(value: float, worst: float, limit: float, better: str, windows: int) -> str:
    """What would settle an open limit: the bound comes nearer with the square root of the windows."""
    if not _within(value, limit, better):
        return f"the figure of these {windows} windows is beyond the limit of {limit:g}, but those of others may not be"
    needed = math.ceil(windows * ((worst - value) / (limit - value)) ** 2)
    return f"{windows} windows cannot certify the limit of {limit:g}; about {max(needed, windows + 1)} would"


def of_baseline(base: Base, value: float, metric: Metric, *, margin: float, floor: float = 0.0, report: str = "") -> Verdict:
    """Whether a figure is what was stored. A change below `floor`, in the metric's own unit (what the order of the arithmetic alone
    makes of it), is none. `report` is why it is only shown."""
    if verdict := missing(base, [value], margin):
        return verdict
    stored = in_unit(base, metric.unit)
    if (problem := differs(base, metric.better, metric.unit, metric.definition)) or stored is None:
        return Verdict(verdict=INVALID, reason=problem, margin=margin)
    old = stored.runs[-1]
    wide, change = max(margin, floor / old), value / old - 1
    worse = change if metric.better == "lower" else -change
    told = partial(Verdict, value=value, baseline=old, change=change, margin=wide, runs=(value,), baseline_runs=stored.runs)
    if wide > margin:
        told = partial(told, notes=(f"what the order of the arithmetic makes is no change: the margin is {100 * wide:.3g} %",))
    if report:
        return told(verdict=INCONCLUSIVE, reason=report)
    if metric.name == "ppl_ratio" and (why := too_lucky(worse)):
        return told(verdict=INVALID, reason=why)
    return told(verdict=REGRESSION if worse > wide else IMPROVEMENT if worse < -wide else PASS)


def controls_floor(load: Mapping[str, Any], metric: str) -> float:
    """What the order of the arithmetic alone makes of a figure: that of 16 bits in one pass against 16 bits in steps; 0 where it is not
    known."""
    controls = load.get("controls")
    floor = controls.get("floor") if isinstance(controls, Mapping) else None
    if not isinstance(floor, Mapping) or metric not in floor:
        return 0.0
    value = floor[metric][0]
    return float({"ppl_ratio": abs(value - 1), "top1": abs(1 - value)}.get(metric, value if metric.startswith("kld.") else 0.0))


def of_size(value: float, limit: float, metric: Metric) -> Verdict:
    """Whether a figure that has no spread keeps a limit."""
    keeps = value <= limit if metric.better == "lower" else value >= limit
    reason, change = "" if keeps else f"the limit is {limit:g}", value / limit - 1
    return Verdict(
        verdict=PASS if keeps else REGRESSION, reason=reason, value=value, baseline=limit, change=change, runs=(value,), margin=0.0
    )


def beside(old: float, new: float, metric: Metric, *, margin: float, at_least: float | None) -> Verdict:
    """Whether an arm's figure is no worse than another's, or so many times as good as is claimed; neither has a spread."""
    times = old / new if metric.better == "lower" else new / old
    told = partial(Verdict, value=new, baseline=old, change=new / old - 1, runs=(new,), baseline_runs=(old,), margin=margin)
    if at_least is None:
        return told(verdict=PASS if 1 / times - 1 <= margin else REGRESSION)
    reason = f"{times:.3g} times as good, at least {at_least:g} times is claimed"
    return told(verdict=PASS if times >= at_least else REGRESSION, reason=reason)


# -- settling -----------------------------------------------------------------------------------------------------------


def settle_still(gate: GateSpec, progress: Progress, orders: Orders, *, final: bool) -> Verdict | None:
    """As `core.progress.settle`, of a number that does not vary: one run decides, or one round of two arms."""
    need, base = orders.needs[gate.key], orders.bases[gate.key]
    if need == "nothing" and not gate.against:
        return missing(base, (), gate.margin)
    rows = next(iter(progress.rounds(gate)), ()) if gate.against else tuple(progress.runs(gate)[:1])
    if why := _broken(gate, progress, measured=bool(rows)):
        return Verdict(verdict=INVALID, reason=why, margin=gate.margin)
    if not rows:
        return Verdict(verdict=INCONCLUSIVE, reason=UNMEASURED, margin=gate.margin, more_runs=1) if final else None
    values = [row["metrics"].get(gate.metric) for row in rows]
    if None in values:
        return Verdict(verdict=INVALID, reason=_no_figure(gate, rows[values.index(None)]), margin=gate.margin)
    if gate.against:
        old, new = values
        return beside(old, new, find_metric(gate.metric), margin=gate.margin, at_least=gate.at_least)
    return _of_one(gate, rows[0], values[0], need, base)


def _broken(gate: GateSpec, progress: Progress, *, measured: bool) -> str:
    """Why an arm has no run that counts; empty where it has one, or it may still come."""
    if gate.against:
        found = ((arm, progress.broken.get((gate.scenario, arm))) for arm in (gate.arm, gate.against))
        return next((f"{arm}: {why}" for arm, why in found if why), "")
    return "" if measured else progress.broken.get((gate.scenario, gate.arm), "")


def _no_figure(gate: GateSpec, row: Mapping[str, Any]) -> str:
    """Of a run without the figure: why it has none, where that is known."""
    sizes = row["load"].get("capacity")
    why = "the scores of the text" if sizes is None else f"what was measured of {row['arm']}"
    told = (sizes or {}).get("not_told", {}).get(gate.metric)
    return f"{gate.metric} is missing from {why}" + (f": {told}" if told else "")


def _of_one(gate: GateSpec, row: Mapping[str, Any], value: float, need: str, base: Base) -> Verdict:
    metric = find_metric(gate.metric)
    if gate.limit is not None and "capacity" in row["load"]:
        return of_size(value, gate.limit, metric)
    if gate.limit is not None:
        return of_limit(value, row["bounds"][gate.metric], gate.limit, metric, windows=row["load"]["windows"])
    if need == "record":
        return Verdict(verdict=NO_BASELINE, value=value, runs=(value,), margin=gate.margin)
    floor = max(gate.floor, controls_floor(row["load"], gate.metric))
    return of_baseline(base, value, metric, margin=gate.margin, floor=floor, report=SMOKE if need == "report" else "")

"""Gates on numbers that do not vary from run to run: figures of a text. One run of an arm decides. Pure.

Two claims can be made of one. A `limit` says that the figure is good enough, whatever was stored: what is not certain is the text, of
which there could be more, so its bounds by the windows (`core.perplexity.Figure.bounds`) must lie on the limit's good side. A margin says
that it is what it was: the text is the same, so nothing but a change of builds moves it, and no spread is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .gate import MISMATCH, NOTHING_STORED, Base, bad_values, in_unit
from .metrics import Metric
from .rule import IMPROVEMENT, INCONCLUSIVE, INVALID, NO_BASELINE, PASS, REGRESSION, Rule
from .verdict import FEW_SAMPLES, Verdict

# One run is a baseline and one run is judged.
STILL = Rule(looks=(1,), record_runs=1, record_sessions=1, base_runs=1, session_prior=0.0)
FEWEST_WINDOWS = 4  # of which the spread between windows says anything
LUCKY = 0.05  # a ratio of perplexities that is better by more is of another text


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
    problem = base.mismatch and MISMATCH + base.mismatch
    if problem := problem or bad_values(base.runs, "a baseline value") or bad_values([value], "a measured value"):
        return Verdict(verdict=INVALID, reason=problem, margin=margin)
    stored = in_unit(base, metric.unit)
    if base.missing or stored is None or not stored.runs:
        return Verdict(verdict=NO_BASELINE, reason=base.missing or NOTHING_STORED, value=value, runs=(value,), margin=margin)
    if base.definition != metric.definition:
        reason = f"definition differs: baseline {base.definition!r}, measured {metric.definition!r}"
        return Verdict(verdict=INVALID, reason=reason, margin=margin)
    old = stored.runs[-1]
    wide, change = max(margin, floor / old), value / old - 1
    worse = change if metric.better == "lower" else -change
    told = partial(Verdict, value=value, baseline=old, change=change, margin=wide, runs=(value,), baseline_runs=stored.runs)
    if wide > margin:
        told = partial(told, notes=(f"what the order of the arithmetic makes is no change: the margin is {100 * wide:.3g} %",))
    if report:
        return told(verdict=INCONCLUSIVE, reason=report)
    if metric.name == "ppl_ratio" and worse < -LUCKY:
        return told(verdict=INVALID, reason=f"suspicious: {-100 * worse:.3g} % better, so this is not the same test")
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

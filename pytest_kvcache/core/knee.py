"""The knee of a sweep: the load beyond which more load buys latency rather than throughput. Pure.

Definition `knee.v1`: the load at which throughput^2 / load is greatest. By Little's law that is throughput over latency, Kleinrock's
power ("Power and deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979), whose maximum is the
knee of Chiu and Jain (1989, "Analysis of the increase and decrease algorithms for congestion avoidance"). It is the load at which the
growth d ln(throughput) / d ln(load) falls below one half: below it throughput grows in proportion, beyond it no longer.

It is found by a fit of bent lines on log-log axes. There proportional growth is a line of slope 1 whatever the units, noise in per cent is
the same everywhere, and the usual grid of doublings is evenly spaced. The line bends twice: softly, as a step of a + b x batch seconds
makes it (load / (a + b load) bends round a / b), or twice as softly; and sharply, where a batch limit or a full pool ends all growth.
Beyond that it is level, or falls. The knee is the first of the two bends. Both bends are searched on a grid, all else is linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

SATURATES, FALLS, NEVER = "saturates", "falls", "never saturates"

FEWEST_LOADS = 4
DECLINE, DECLINE_P = 0.05, 0.01  # a loss from the knee to the largest load is told from this size on, at this (one-sided) error
SOFT = (1.0, 2.0)  # widths of the soft bend in ln(load): that of load / (a + b load), and twice that
# What is known of the noise before a sweep: runs spread by about 4 % (as good as two degrees of freedom), and no server follows the
# model closer than 1 %, however often a load was measured.
PRIOR_SD, PRIOR_DF, MODEL_SD = 0.04, 2, 0.01
OUTLIER_SDS, NORMAL = 3.5, 1.44  # the sd of normal noise is 1.44 times the median distance from the middle one of three
POINTS = 51  # of each axis of the grid, which is laid twice, the second time over what the first left possible
BEYOND = 2.0  # ln(load) beyond the largest one up to which the soft bend is looked for; then there is none


@dataclass(frozen=True, kw_only=True)
class Knee:
    """What a sweep says of the knee. Loads are in the unit of the sweep (clients, or requests a second), throughput in its own.

    `shape` is SATURATES, FALLS (throughput falls by more than 5 % beyond the knee) or NEVER (growth was not seen to end within the loads
    measured: the knee is above them or may be, and `load` is None); empty where nothing can be said. `reason` says why there is no number.
    `low` and `high` hold the knee with the confidence asked for (loads that an F test does not reject; where throughput falls also the two
    loads measured that the knee lies between); None on a side that the loads measured do not bound. `throughput` is the fitted one at the
    knee, `growth` the fitted d ln(throughput) / d ln(load) between the two largest loads, `decline` the fraction of throughput that is lost
    from the sharp bend to the largest load (None unless it falls). `loads` ascend; `runs` counts all points.
    """

    shape: str = ""
    load: float | None = None
    low: float | None = None
    high: float | None = None
    throughput: float | None = None
    growth: float | None = None
    decline: float | None = None
    loads: tuple[float, ...] = ()
    runs: int = 0
    reason: str = ""


@dataclass(frozen=True)
class _Sweep:
    """Means of ln(throughput) by ln(load), their weights (1 / variance), and degrees of freedom of what is known of the noise."""

    x: Floats
    y: Floats
    w: Floats
    df: int

    def centred(self, a: Floats) -> Floats:
        centred: Floats = a - ((a * self.w).sum(-1) / self.w.sum())[..., None]
        return centred

    def dot(self, a: Floats, b: Floats) -> Floats:
        product: Floats = (a * b * self.w).sum(-1)
        return product


@dataclass(frozen=True)
class _Fits:
    """Bent lines by width, soft bend and sharp bend (ln(load)): misfit (weighted squares) of the level and of the falling one, the latter's
    slope beyond the sharp bend, and the knee."""

    soft: Floats
    sharp: Floats
    level: Floats
    falling: Floats
    slope: Floats
    knee: Floats


def find_knee(points: Iterable[tuple[float, float]], *, confidence: float = 0.95) -> Knee:
    """The knee of points (load, throughput); several runs of a load are as many points, in any order."""
    runs = list(points)
    by_load: dict[float, list[float]] = {}
    for load, throughput in runs:
        if not (0 < load < math.inf and 0 < throughput < math.inf):
            return Knee(runs=len(runs), reason=f"a load of {load} with a throughput of {throughput}: both must be numbers above 0")
        by_load.setdefault(float(load), []).append(math.log(throughput))
    loads = tuple(sorted(by_load))
    if len(loads) < FEWEST_LOADS:
        return Knee(loads=loads, runs=len(runs), reason=f"{len(loads)} loads were measured; {FEWEST_LOADS} are the least that show a knee")
    sweep = _sweep([by_load[load] for load in loads], loads)
    fits = _fits(sweep, *_grid(sweep, sweep.x[0], sweep.x[-1] + BEYOND, sweep.x[0], sweep.x[-1]))
    fits = _fits(sweep, *_grid(sweep, *_possible(sweep, fits, confidence)))
    return _told(sweep, fits, confidence, loads, len(runs))


def latency_load(knee: Knee, share: float = 0.7) -> float | None:
    """The largest load measured at or below `share` of the knee, at which latency is judged; whole where the loads are. None where there is
    none. Of a knee that is above the loads measured, or may be, its lower bound stands for it."""
    at = knee.low if knee.shape == NEVER else knee.load
    found = [] if at is None else [load for load in knee.loads if load <= share * at]
    if not found:
        return None
    return int(found[-1]) if all(load.is_integer() for load in knee.loads) else found[-1]


# -- the fit ------------------------------------------------------------------------------------------------------------


def _sweep(logs: list[list[float]], loads: tuple[float, ...]) -> _Sweep:
    """Means by load, weighted by the runs behind each and by the spread of all runs about the mean of their load."""
    import numpy as np

    logs = _unspoiled(logs)
    means = [math.fsum(ys) / len(ys) for ys in logs]
    within = math.fsum((y - m) ** 2 for ys, m in zip(logs, means, strict=True) for y in ys)
    df = sum(map(len, logs)) - len(logs) + PRIOR_DF
    run_var = (within + PRIOR_DF * PRIOR_SD**2) / df
    variances = np.array([MODEL_SD**2 + run_var / len(ys) for ys in logs])
    return _Sweep(np.log(np.array(loads)), np.array(means), 1 / variances, df)


def _unspoiled(logs: list[list[float]]) -> list[list[float]]:
    """Without runs that lie further from the middle one of their load than noise takes them; of fewer than three none is the middle one."""
    middles = [sorted(ys)[len(ys) // 2] for ys in logs]
    apart = sorted(abs(y - m) for ys, m in zip(logs, middles, strict=True) if len(ys) > 2 for y in ys if y != m)
    most = OUTLIER_SDS * max(PRIOR_SD, NORMAL * apart[len(apart) // 2] if apart else 0.0)
    return [[y for y in ys if abs(y - m) <= most or len(ys) < 3] for ys, m in zip(logs, middles, strict=True)]


def _grid(sweep: _Sweep, soft0: float, soft1: float, sharp0: float, sharp1: float) -> tuple[Floats, Floats]:
    """Places of the soft and the sharp bend; the last of each is none at all."""
    import numpy as np

    return np.append(np.linspace(soft0, soft1, POINTS), math.inf), np.append(np.linspace(sharp0, sharp1, POINTS), sweep.x[-1])


def _fits(sweep: _Sweep, soft: Floats, sharp: Floats) -> _Fits:
    import numpy as np

    widths = np.array(SOFT)[:, None, None, None]
    below = np.minimum(sweep.x, sharp[:, None])
    lost = widths * np.logaddexp(0, (below - soft[:, None, None]) / widths)
    left = sweep.centred(sweep.y - below + lost)
    beyond = sweep.centred(sweep.x - below)
    weight, pull = sweep.dot(beyond, beyond), sweep.dot(beyond, left)
    seen = weight > 1e-9
    slope = np.where(seen, np.minimum(pull / np.where(seen, weight, 1.0), 0.0), 0.0)
    level = sweep.dot(left, left)
    first = np.minimum(soft[:, None], np.where(sharp < sweep.x[-1], sharp, math.inf))
    falling = level - slope * (2 * pull - slope * weight)
    return _Fits(soft, sharp, level, falling, slope, np.broadcast_to(first, level.shape))


def _freedom(sweep: _Sweep, parameters: int) -> int:
    return sweep.df + len(sweep.x) - parameters


def _limit(sweep: _Sweep, misfit: Floats, parameters: int, confidence: float) -> float:
    """The misfit up to which a bent line is not rejected against the best one."""
    from scipy.special import fdtri

    df, best = _freedom(sweep, parameters), float(misfit.min())
    return best + (sweep.df + best) / df * float(fdtri(1, df, confidence))


def _possible(sweep: _Sweep, fits: _Fits, confidence: float) -> tuple[float, float, float, float]:
    """The ranges of the two bends that the first grid leaves, a step wider."""
    import numpy as np

    ranges: list[float] = []
    kept = np.asarray(fits.falling <= _limit(sweep, fits.falling, 4, max(confidence, 0.99)))
    for places, axis in ((fits.soft, 1), (fits.sharp, 2)):
        step = places[1] - places[0]
        of = np.flatnonzero(np.any(kept, axis=tuple({0, 1, 2} - {axis}))[:-1])
        ends = (places[of[0]] - step, places[of[-1]] + step) if len(of) else (places[0], places[-2])
        ranges += [max(float(ends[0]), float(places[0])), min(float(ends[1]), float(places[-2]))]
    return ranges[0], ranges[1], ranges[2], ranges[3]


# -- what it says -------------------------------------------------------------------------------------------------------


def _falls(sweep: _Sweep, fits: _Fits) -> bool:
    """Whether the falling line fits better than the level one by more than chance does, and by a decline worth telling."""
    import numpy as np
    from scipy.special import fdtri

    df, best = _freedom(sweep, 4), float(fits.falling.min())
    gain = (float(fits.level.min()) - best) / ((sweep.df + best) / df)
    at = np.unravel_index(int(fits.falling.argmin()), fits.falling.shape)
    return gain > float(fdtri(1, df, 1 - 2 * DECLINE_P)) and _decline(sweep, fits, at) > DECLINE


def _told(sweep: _Sweep, fits: _Fits, confidence: float, loads: tuple[float, ...], runs: int) -> Knee:
    import numpy as np

    falls, least, most = _falls(sweep, fits), float(sweep.x[0]), float(sweep.x[-1])
    misfit, parameters = (fits.falling, 4) if falls else (fits.level, 3)
    kept = fits.knee[misfit <= _limit(sweep, misfit, parameters, confidence)]
    low, high = float(kept.min()), float(kept.max())
    at = np.unravel_index(int(misfit.argmin()), misfit.shape)
    knee = float(fits.knee[at])
    told: dict[str, Any] = {"loads": loads, "runs": runs, "growth": _growth(sweep, fits, at, falls=falls)}
    if high >= most:
        why = f"throughput was not seen to stop growing: the knee {'is' if knee >= most else 'may be'} above {loads[-1]:g}"
        return Knee(shape=NEVER, low=math.exp(low) if low > least else None, reason=why, **told)
    told |= {"shape": FALLS, "decline": _decline(sweep, fits, at)} if falls else {"shape": SATURATES}
    if falls:  # hardly in a straight line: where it begins between two loads measured is not known
        low, high = min(low, float(sweep.x[sweep.x <= knee].max())), max(high, float(sweep.x[sweep.x >= knee].min()))
    if low <= least:
        why = f"throughput was not seen to grow in proportion: the knee may be at {loads[0]:g} or below"
        return Knee(high=math.exp(high), reason=why, **told)
    throughput = math.exp(_fitted(sweep, fits, at, knee, falls=falls))
    return Knee(load=math.exp(knee), low=math.exp(low), high=math.exp(high), throughput=throughput, **told)


def _fitted(sweep: _Sweep, fits: _Fits, at: Any, x: float, *, falls: bool) -> float:
    """ln(throughput) of a bent line at ln(load) x."""
    import numpy as np

    def line(points: Any) -> Any:
        below = np.minimum(points, fits.sharp[at[2]])
        width = SOFT[at[0]]
        beyond = (fits.slope[at] if falls else 0.0) * (points - below)
        return below - width * np.logaddexp(0, (below - fits.soft[at[1]]) / width) + beyond

    level = sweep.dot(sweep.y - line(sweep.x), np.ones_like(sweep.x)) / sweep.w.sum()
    return float(level + line(x))


def _growth(sweep: _Sweep, fits: _Fits, at: Any, *, falls: bool) -> float:
    last, before = float(sweep.x[-1]), float(sweep.x[-2])
    return (_fitted(sweep, fits, at, last, falls=falls) - _fitted(sweep, fits, at, before, falls=falls)) / (last - before)


def _decline(sweep: _Sweep, fits: _Fits, at: Any) -> float:
    return -math.expm1(float(fits.slope[at]) * float(sweep.x[-1] - fits.sharp[at[2]]))

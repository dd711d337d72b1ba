"""How latency grows with the context: the exponent of TTFT, and what more context adds to the time of a decoded token. Pure.

TTFT = a + b n^k of prompts of n tokens. The constant `a` is what a prompt of any length takes (network, scheduling, a step's own cost); it
bends the line on log-log axes, so that the plain slope there is too small an exponent. Here it is fitted with the others: for an exponent
and a share of the constant all else is a mean of logs, and these two are searched on a grid that is laid again over what the one before
left possible. Noise is in per cent: here logs are fitted, for the cadence relative errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

FEWEST_LENGTHS = 3
K = 1024  # tokens of "1K" of context, as in 4K, 8K, 128K
STEEPEST = 4.0  # where the search for the exponent ends; attention makes 2
PARAMETERS = 3
# Grids of exponents, each laid over what the one before left possible; within each exponent, of shares of the constant, round the best.
EXPONENTS, GRIDS, SHARES, SHARE_GRIDS = 31, 3, 10, 6
NO_SHARE, MOST_SHARE = 1e-4, 1 - 1e-9  # of the constant: as good as none, and the end of the search
REWEIGHTINGS = 3


@dataclass(frozen=True, kw_only=True)
class Growth:
    """TTFT(n) = `constant_ms` + `scale_ms` n^`exponent` with n in tokens. Where `reason` is not empty there is no figure.

    `low` and `high` hold the exponent with the confidence asked for (those that an F test does not reject); an end at a limit of the search
    (0 and 4) is None. `se` is its standard error by linearisation. All three are None where there are no more points than parameters.
    `plain` is the slope of ln(TTFT) on ln(n), lower than the exponent wherever there is a constant, and `plain_se` its standard error.
    `relative_sd` is the spread of the points about the fit, as a fraction.
    """

    exponent: float | None = None
    se: float | None = None
    low: float | None = None
    high: float | None = None
    constant_ms: float | None = None
    scale_ms: float | None = None
    plain: float | None = None
    plain_se: float | None = None
    relative_sd: float | None = None
    lengths: int = 0
    points: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """TPOT = `intercept_ms` + `slope_ms` for each K (1024 tokens) of context, by least squares of relative errors; with standard errors and
    intervals of the confidence asked for (Student's t). Where `reason` is not empty there is no figure."""

    intercept_ms: float | None = None
    intercept_se: float | None = None
    intercept_interval: tuple[float, float] | None = None
    slope_ms: float | None = None
    slope_se: float | None = None
    slope_interval: tuple[float, float] | None = None
    relative_sd: float | None = None
    lengths: int = 0
    points: int = 0
    reason: str = ""


def _problem(points: Sequence[tuple[float, float]]) -> str:
    for length, ms in points:
        if not (0 < length < math.inf and 0 < ms < math.inf):
            return f"a context of {length} tokens with {ms} ms: both must be numbers above 0"
    lengths = len({length for length, _ in points})
    if lengths < FEWEST_LENGTHS:
        return f"{lengths} context lengths were measured; {FEWEST_LENGTHS} are the least that show a growth"
    return ""


# -- TTFT ---------------------------------------------------------------------------------------------------------------


def ttft_growth(points: Sequence[tuple[float, float]], *, confidence: float = 0.95) -> Growth:
    """The growth of points (input tokens, TTFT in ms); several runs of a length are as many points, in any order."""
    import numpy as np

    counted: dict[str, Any] = {"lengths": len({length for length, _ in points}), "points": len(points)}
    if why := _problem(points):
        return Growth(**counted, reason=why)
    logs = np.log(np.array(sorted(points), dtype=float))
    x, y = (logs - logs.mean(0)).T
    k, low, high = _exponent(x, y, confidence)
    misfit, share = (float(found[0]) for found in _profile(x, y, np.array([k])))
    level = math.exp(float((logs[:, 1] - _shape(x, np.array([k]), np.array([[share]]))[0, 0]).mean()))
    told = counted | {
        "exponent": k, "constant_ms": share * level, "scale_ms": (1 - share) * level * math.exp(-k * float(logs[:, 0].mean())),
    } | _plain(x, y)  # fmt: skip
    if (df := len(points) - PARAMETERS) < 1:
        return Growth(**told)
    variance = misfit / df
    return Growth(**told, low=low, high=high, relative_sd=math.sqrt(variance), se=_standard_error(x, k, share, variance))


def _shape(x: Floats, ks: Floats, shares: Floats) -> Floats:
    """ln(share + (1 - share) e^(k x)) by exponent, share (a row for each exponent) and point: a growth whose constant is that share
    of it in the middle of the lengths."""
    import numpy as np

    with np.errstate(divide="ignore"):
        constant, rest = np.log(shares), np.log1p(-shares)
    return np.logaddexp(constant[..., None], rest[..., None] + ks[:, None, None] * x)


def _profile(x: Floats, y: Floats, ks: Floats) -> tuple[Floats, Floats]:
    """For each exponent the least squares that any share of the constant leaves, and that share."""
    import numpy as np

    start, step = np.zeros(len(ks)), MOST_SHARE / SHARES
    for _ in range(SHARE_GRIDS):
        shares = np.clip(start[:, None] + step * np.arange(SHARES + 1), 0.0, MOST_SHARE)
        squares = (y - _shape(x, ks, shares)).var(-1) * len(x)
        best = squares.argmin(1)[:, None]
        misfit, share = np.take_along_axis(squares, best, 1)[:, 0], np.take_along_axis(shares, best, 1)[:, 0]
        start, step = share - step, 2 * step / SHARES
    return misfit, share


def _exponent(x: Floats, y: Floats, confidence: float) -> tuple[float, float | None, float | None]:
    """The exponent of least squares, and the ends of those that an F test does not reject against it."""
    import numpy as np
    from scipy.special import fdtri

    df = max(1, len(x) - PARAMETERS)
    rejected = 1 + float(fdtri(1, df, confidence)) / df
    bottom, top = 0.0, STEEPEST
    for _ in range(GRIDS):
        ks = np.linspace(bottom, top, EXPONENTS)
        misfit, _ = _profile(x, y, ks)
        inside = np.flatnonzero(misfit <= float(misfit.min()) * rejected)
        first, last, at = max(0, int(inside[0]) - 1), min(EXPONENTS - 1, int(inside[-1]) + 1), int(misfit.argmin())
        bottom, top = float(ks[first]), float(ks[last])
    low, high = float(ks[inside[0]]), float(ks[inside[-1]])
    for _ in range(GRIDS):
        ks = np.linspace(ks[max(0, at - 1)], ks[min(EXPONENTS - 1, at + 1)], EXPONENTS)
        at = int(_profile(x, y, ks)[0].argmin())
    k = float(ks[at])
    return k, min(low, k) if low > 0 else None, max(high, k) if high < STEEPEST else None


def _standard_error(x: Floats, k: float, share: float, variance: float) -> float | None:
    """By how the curve changes with the exponent beside the share of the constant; alone where there is as good as none, since it cannot be
    less."""
    import numpy as np

    shape = _shape(x, np.array([k]), np.array([[share]]))[0, 0]
    grown = np.exp(k * x - shape)
    slopes = np.stack([(1 - share) * x * grown, np.exp(-shape) - grown])[: 2 if share > NO_SHARE else 1]
    slopes = slopes - slopes.mean(1, keepdims=True)
    information = slopes @ slopes.T
    if not np.isfinite(information).all() or np.linalg.cond(information) > 1e15:
        return None
    return math.sqrt(variance * float(np.linalg.inv(information)[0, 0]))


def _plain(x: Floats, y: Floats) -> dict[str, float]:
    """The slope of y on x, both centred, and its standard error."""
    slope = float((x * y).sum() / (x * x).sum())
    left = float(((y - slope * x) ** 2).sum()) / (len(x) - 2)
    return {"plain": slope, "plain_se": math.sqrt(left / float((x * x).sum()))}


# -- TPOT ---------------------------------------------------------------------------------------------------------------


def cadence(points: Sequence[tuple[float, float]], *, confidence: float = 0.95) -> Cadence:
    """The line of points (tokens of context, TPOT in ms); several runs of a length are as many points, in any order."""
    import numpy as np
    from scipy.special import stdtrit

    counted: dict[str, Any] = {"lengths": len({length for length, _ in points}), "points": len(points)}
    if why := _problem(points):
        return Cadence(**counted, reason=why)
    context, ms = np.array(sorted(points), dtype=float).T
    lines, weights = np.stack([np.ones_like(context), context / K]), ms**-2.0
    for _ in range(REWEIGHTINGS):  # by the fit: by the points themselves, whose noise is in them, the line would lie too low
        covariance = np.linalg.inv((lines * weights) @ lines.T)
        line = covariance @ (lines * weights) @ ms
        fit = line @ lines
        if (fit <= 0).any():
            return Cadence(**counted, reason="the points lie on no line that is above 0 at every context")
        weights = fit**-2.0
    variance = float((weights * (ms - fit) ** 2).sum()) / (len(ms) - 2)
    se = np.sqrt(variance * np.diag(np.linalg.inv((lines * weights) @ lines.T)))
    half = float(stdtrit(len(ms) - 2, 0.5 + confidence / 2)) * se
    low, high = line - half, line + half
    return Cadence(
        intercept_ms=float(line[0]), intercept_se=float(se[0]), intercept_interval=(float(low[0]), float(high[0])),
        slope_ms=float(line[1]), slope_se=float(se[1]), slope_interval=(float(low[1]), float(high[1])),
        relative_sd=math.sqrt(variance), **counted,
    )  # fmt: skip

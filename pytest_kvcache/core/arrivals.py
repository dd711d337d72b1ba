"""When the requests of an open loop are due: a table of schedules, each fixed by its rates and the state of a generator. Pure.

The first n moments of a schedule do not depend on how many are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from .spec import SpecError

if TYPE_CHECKING:
    import random


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Requests at `rate` a second, by `kind`, one of KINDS.

    `burstiness` is for `gamma`: the coefficient of variation of its gaps is 1/sqrt of it. `to` and `over` are for `ramp` (gaps as even as
    can be) and `ramp-poisson`: the rate rises, or falls, linearly in time from `rate` to `to` a second while `over` requests are due (on
    average, where they are drawn), and stays at `to` from then on. SpecError for what cannot be or has no meaning.
    """

    kind: str = "poisson"
    rate: float
    burstiness: float = 1.0
    to: float | None = None
    over: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"Arrivals: kind={self.kind!r} is none of {', '.join(KINDS)}")
        for name in ("rate", "burstiness", "to"):
            value = getattr(self, name)
            if not _above_0(value) and (name, value) != ("to", None):
                raise SpecError(f"Arrivals: {name}={value!r} must be above 0 and below a million")
        if self.burstiness != 1.0 and self.kind != "gamma":
            raise SpecError(f"Arrivals: burstiness={self.burstiness!r} has no meaning for {self.kind}; use kind='gamma'")
        ramps = self.kind.startswith("ramp")
        if ramps and (self.to is None or isinstance(self.over, bool) or not isinstance(self.over, int) or self.over < 1):
            raise SpecError(f"Arrivals: {self.kind} needs to={self.to!r}, requests a second, and over={self.over!r}, a number of requests")
        if not ramps and (self.to, self.over) != (None, None):
            raise SpecError(f"Arrivals: to={self.to!r} and over={self.over!r} have no meaning for {self.kind}; use kind='ramp'")


def due(arrivals: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    """The moments of the first `n` requests, ascending, in seconds after the start; the first comes one gap after it."""
    return KINDS[arrivals.kind](arrivals, rng, n)


def _poisson(a: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    return tuple(accumulate(rng.expovariate(a.rate) for _ in range(n)))


def _constant(a: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    return tuple(accumulate(1 / a.rate for _ in range(n)))


def _gamma(a: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    return tuple(accumulate(rng.gammavariate(a.burstiness, 1 / (a.burstiness * a.rate)) for _ in range(n)))


def _ramp(a: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    return _risen(a, map(float, range(1, n + 1)))


def _ramp_poisson(a: Arrivals, rng: random.Random, n: int) -> tuple[float, ...]:
    # Where arrivals at one a second are stretched to the rate they have a Poisson process of that rate again, as thinning a faster one
    # gives it too; but each request takes one draw, so that their number is exact. random() alone is promised to stay as it is.
    return _risen(a, accumulate(-math.log(1.0 - rng.random()) for _ in range(n)))


def _risen(a: Arrivals, counts: Iterable[float]) -> tuple[float, ...]:
    """When so many requests are due on average: `rate` t + (`to` - `rate`) t^2 / (2 end) of them by the time t, the ramp ending once
    `over` are due."""
    assert a.to and a.over  # Arrivals sees to it
    to, over = a.to, a.over
    end = 2 * over / (a.rate + to)
    bend = (to + a.rate) * (to - a.rate) / over

    def at(c: float) -> float:
        if c >= over:
            return end + (c - over) / to
        return 2 * c / (a.rate + math.sqrt(max(0.0, a.rate * a.rate + bend * c)))  # a form that holds for equal rates, too

    return tuple(accumulate(map(at, counts), max))  # neither order nor the root's sign may hang on rounding


def _above_0(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < 1e6


KINDS: Mapping[str, Callable[[Arrivals, random.Random, int], tuple[float, ...]]] = {
    "poisson": _poisson,
    "constant": _constant,
    "gamma": _gamma,
    "ramp": _ramp,
    "ramp-poisson": _ramp_poisson,
}

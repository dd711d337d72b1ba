"""How many tokens a request has: one number for all, or one drawn for each. Pure.

A draw is the quantile of a number from 0 to 1, computed without a generator's own distributions, so that a seed gives the same lengths
under every version of Python. What lies beyond `low` or `high` is that bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .spec import SpecError, json_hash

if TYPE_CHECKING:
    import random

SMALLEST = 2.0**-53  # a normal has no quantile of 0 nor of 1


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Each number of tokens from `low` to `high` is as likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _ordered(self, self.low, self.high)

    def quantile(self, p: float) -> int:
        return min(self.high, self.low + int(p * (self.high - self.low + 1)))

    def __str__(self) -> str:
        return f"{self.low}to{self.high}"


@dataclass(frozen=True, kw_only=True)
class LogNormal:
    """The logarithm is normal: half of the requests have `median` tokens or fewer, `sigma` is the standard deviation of the logarithm (0.5:
    two thirds lie within a factor of 1.65, 1.0: of 2.7). None has more than `high`."""

    median: int
    sigma: float
    high: int
    low: int = 1

    def __post_init__(self) -> None:
        _ordered(self, self.low, self.median, self.high)
        if isinstance(self.sigma, bool) or not isinstance(self.sigma, int | float) or not 0 < self.sigma <= 4:
            raise SpecError(f"LogNormal: sigma={self.sigma!r} must be above 0 and at most 4")

    def quantile(self, p: float) -> int:
        from statistics import NormalDist  # half of what the plugin's own import may take

        found = self.median * math.exp(self.sigma * NormalDist().inv_cdf(min(max(p, SMALLEST), 1 - SMALLEST)))
        return min(self.high, max(self.low, round(found)))

    def __str__(self) -> str:
        return f"ln{self.median}x{self.sigma:g}max{self.high}" + ("" if self.low == 1 else f"min{self.low}")


@dataclass(frozen=True, kw_only=True)
class Empirical:
    """Each of `values` (tokens) is as likely: lengths that were seen. `name` and a hash of the values stand for them in ids."""

    name: str
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(map(_whole, self.values)):
            raise SpecError(f"Empirical: {self.name!r} needs values, all whole numbers of at least 1")
        if not (self.name.isascii() and self.name.isalnum()):
            raise SpecError(f"Empirical: name={self.name!r} may hold letters and digits only; it is part of every key")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, p: float) -> int:
        return self.values[min(len(self.values) - 1, int(p * len(self.values)))]

    def __str__(self) -> str:
        return f"{self.name}.{json_hash(self.values)[:6]}"


Length = int | Uniform | LogNormal | Empirical


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _ordered(what: object, *bounds: object) -> None:
    if not all(map(_whole, bounds)) or list(bounds) != sorted(bounds):  # type: ignore[type-var]
        raise SpecError(f"{type(what).__name__}: {what!r}: tokens are whole numbers of at least 1, low before high")


def is_length(value: object) -> bool:
    """Whether a scenario may have it as `isl` or `osl`."""
    return _whole(value) or isinstance(value, Uniform | LogNormal | Empirical)


def drawn(length: Length, rng: random.Random, n: int) -> list[int]:
    """The lengths of `n` requests; of one number nothing is drawn."""
    return [length] * n if isinstance(length, int) else [length.quantile(rng.random()) for _ in range(n)]


def spread(length: Length, n: int) -> list[int]:
    """`n` lengths that cover all: evenly over the quantiles, the longest among them, first."""
    return [length] * n if isinstance(length, int) else [length.quantile(1 - i / n) for i in range(n)]


def shortest(length: Length) -> int:
    """The fewest tokens that can be drawn."""
    return length if isinstance(length, int) else length.quantile(0.0)


def longest(length: Length) -> int:
    """The most tokens that can be drawn."""
    return length if isinstance(length, int) else length.quantile(1.0)


def mean(lengths: Sequence[int]) -> int:
    """Rounded; what stands for many where one number is asked for."""
    return round(sum(lengths) / len(lengths))

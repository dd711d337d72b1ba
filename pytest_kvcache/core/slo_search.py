"""The highest rate that still meets the limits: which rate to measure next, or what is known when there is none. Pure.

A search is a function of the points measured so far, in any order: nothing else is remembered, so that points of an earlier session are as
good as new ones. It goes from a first rate outwards in growing steps until one rate is met and a higher one is not, then by halves. All
rates lie on one geometric grid, the powers of 1 + resolution, whatever the bounds: two searches of one server meet at the same rates.

More load is taken to be no easier. Where a point says otherwise it is measured once more before it is believed: a rate that failed although
a higher one was met, a rate that was both met and failed, one of which nothing could be stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .spec import SpecError

MET, NOT_MET, NOT_STATED = "met", "not met", "not stated"
FOUND, LOWEST_FAILS, NEVER_FAILED, OUT_OF_POINTS = "found", "even the lowest rate fails", "never failed", "out of points"

SLACK = 1e-3  # of the resolution's own step: rates are rounded to five digits
STRIDE = 2.0  # the first step outwards; each next one is the square of the one before
BELIEVED, TIE_BROKEN = 2, 3  # runs that settle a doubt; runs that settle a tie


@dataclass(frozen=True, kw_only=True)
class Search:
    """Where to look for the highest rate, in requests a second: from `low` to `high`, beginning at `start` (a guess; None: the geometric
    middle), until the rates met and not met differ by no more than `resolution` (0.05 is 5 %).

    `points` is the most runs that a search may ask for. `confirm` runs must agree at each end of the interval: with 2 any one wrong run is
    found out, with 1 only one that contradicts another.
    """

    low: float
    high: float
    start: float | None = None
    resolution: float = 0.05
    points: int = 16
    confirm: int = 1

    def __post_init__(self) -> None:
        if not (number(self.low) and number(self.high) and 0 < self.low < self.high < 1e6):
            raise SpecError(f"search: low={self.low!r} must be above 0 and high={self.high!r} above it, both in requests a second")
        if self.start is not None and not (number(self.start) and self.low <= self.start <= self.high):
            raise SpecError(f"search: start={self.start!r} must lie from low={self.low!r} to high={self.high!r}")
        if not (number(self.resolution) and 0.005 <= self.resolution <= 1):
            raise SpecError(f"search: resolution={self.resolution!r} must lie from 0.005 to 1 (0.05 is 5 %)")
        for name, most in (("points", 1000), ("confirm", 9)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SpecError(f"search: {name}={value!r} must be a whole number from 1 to {most}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run: the rate and whether the limits were MET, NOT_MET, or NOT_STATED. One that is `reused` counts towards no limit of points."""

    rate: float
    state: str
    reused: bool = False

    def __post_init__(self) -> None:
        if not (number(self.rate) and 0 < self.rate < math.inf):
            raise SpecError(f"Point: rate={self.rate!r} must be requests a second above 0")
        if self.state not in (MET, NOT_MET, NOT_STATED):
            raise SpecError(f"Point: state={self.state!r} is none of {MET!r}, {NOT_MET!r}, {NOT_STATED!r}")


@dataclass(frozen=True)
class Next:
    """The rate to measure next, and why that one."""

    rate: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search ends with: `lower` the highest rate met below every failure that is believed, `upper` the lowest not met; None where
    there is none. `end` is FOUND, LOWEST_FAILS, NEVER_FAILED or OUT_OF_POINTS, `runs` all points behind it, `notes` what did not fit."""

    lower: float | None
    upper: float | None
    end: str
    runs: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, with what to type where the bounds or the points did not suffice."""
        low, high = (None if rate is None else f"{rate:g} req/s" for rate in (self.lower, self.upper))
        if self.end == LOWEST_FAILS:
            known = f" ({low} was met before)" if low else ""
            text = f"even the lowest rate fails, {high}{known}: lower search.low"
        elif self.end == NEVER_FAILED:
            text = f"never failed up to {low}: raise search.high"
        elif self.end == OUT_OF_POINTS:
            text = f"not narrowed down: {low or 'no rate'} met, {high or 'no rate'} not met: raise search.points"
        else:
            text = f"{low} meets the limits, {high} does not"
        return f"{text} ({self.runs} run{'s' if self.runs != 1 else ''})" + "".join(f"; {note}" for note in self.notes)


@dataclass(frozen=True)
class _Votes:
    met: int = 0
    failed: int = 0
    silent: int = 0

    @property
    def runs(self) -> int:
        return self.met + self.failed + self.silent


@dataclass(frozen=True)
class _Known:
    """The interval that the votes leave; `again` is a rate to be measured once more before anything else."""

    lower: float | None
    upper: float | None
    again: Next | None = None


def step(search: Search, points: Iterable[Point]) -> Next | Found:
    """What to measure next; Found when that is nothing. Of points that were NOT_STATED reuse none whose cause is mended since."""
    points = tuple(points)
    votes = _count(points)
    known = _known(votes)
    wanted = known.again or _wanted(search, votes, known)
    if isinstance(wanted, Next):
        if sum(not p.reused for p in points) < search.points:
            return wanted
        wanted = OUT_OF_POINTS
    return Found(lower=known.lower, upper=known.upper, end=wanted, runs=len(points), notes=_notes(votes, known))


def highest_rate(search: Search, measure: Callable[[float], str], points: Iterable[Point] = ()) -> Found:
    """The whole search: `measure` gives the state of a rate (MET, NOT_MET, NOT_STATED)."""
    seen = list(points)
    while isinstance(now := step(search, seen), Next):
        seen.append(Point(rate=now.rate, state=measure(now.rate)))
    return now


def number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(points: Iterable[Point]) -> dict[float, _Votes]:
    """The votes of each rate, ascending."""
    states: dict[float, list[str]] = {}
    for p in points:
        states.setdefault(float(p.rate), []).append(p.state)
    return {rate: _Votes(*(states[rate].count(s) for s in (MET, NOT_MET, NOT_STATED))) for rate in sorted(states)}


def _known(votes: Mapping[float, _Votes]) -> _Known:
    """The lowest rate whose failure is believed, and the highest one met below it. Doubts are looked at from below, up to that failure:
    what lies above it decides nothing."""
    # A failure seen twice outweighs what was met above it: that speaks for no other rate either.
    settled = min((rate for rate, v in votes.items() if v.failed > v.met and v.runs >= BELIEVED), default=math.inf)
    met = [rate for rate, v in votes.items() if v.met > v.failed and rate < settled]
    top, upper, again = max(met, default=0.0), None, None
    for rate, v in votes.items():
        if v.met > v.failed:
            continue
        doubt = _doubt(v, rate, top)
        if doubt is None:
            continue
        if not doubt:
            upper = rate
            break
        again = again or Next(rate, doubt)
    return _Known(max((rate for rate in met if upper is None or rate < upper), default=None), upper, again)


def _doubt(v: _Votes, rate: float, top: float) -> str | None:
    """Why a rate that was not met by most of its runs is to be measured again; empty where its failure is believed, None where it is
    refuted (`top` is the highest rate met)."""
    if v.failed > v.met:
        return f"it failed although {top:g} was met" if rate < top and v.runs < BELIEVED else ""
    if rate < top:
        return None  # a tie, or nothing stated: the higher rate that was met decides
    if v.met:
        return "it was met and failed" if v.runs < TIE_BROKEN else ""
    return "nothing could be stated" if v.silent < BELIEVED else ""


def _wanted(search: Search, votes: Mapping[float, _Votes], known: _Known) -> Next | str:
    # What is known from outside the bounds does not replace their own rates.
    lower = known.lower if known.lower is not None and known.lower >= search.low else None
    upper = known.upper if known.upper is not None and known.upper <= search.high else None
    if upper is not None and upper <= search.low:
        return _confirmed(search, votes, known, LOWEST_FAILS)
    if lower is not None and lower >= search.high:
        return _confirmed(search, votes, known, NEVER_FAILED)
    if lower is None:
        if upper is None:
            middle = _on_grid(search, math.sqrt(search.low * search.high), search.low, search.high)
            return Next(middle if search.start is None else float(search.start), "the first rate")
        return Next(_outwards(search, [r for r in votes if r >= upper], search.low), f"{upper:g} failed")
    if upper is None:
        return Next(_outwards(search, [r for r in votes if r <= lower][::-1], search.high), f"{lower:g} was met")
    if upper <= lower * (1 + search.resolution) * (1 + SLACK):
        return _confirmed(search, votes, known, FOUND)
    return Next(_on_grid(search, math.sqrt(lower * upper), lower, upper), f"between {lower:g} and {upper:g}")


def _confirmed(search: Search, votes: Mapping[float, _Votes], known: _Known, end: str) -> Next | str:
    """The end, once the rates that it rests on have runs enough."""
    if known.lower is not None and end != LOWEST_FAILS and votes[known.lower].met < search.confirm:
        return Next(known.lower, "to confirm that it is met")
    if known.upper is not None and end != NEVER_FAILED and votes[known.upper].runs - votes[known.upper].met < search.confirm:
        return Next(known.upper, "to confirm that it fails")
    return end


def _outwards(search: Search, alike: list[float], end: float) -> float:
    """A rate beyond `alike[0]`, the outermost of rates that ended alike, towards `end`: the square of the last step away."""
    edge = alike[0]
    up = end > edge
    last = (edge / alike[1] if up else alike[1] / edge) if len(alike) > 1 else math.sqrt(STRIDE)
    factor = max(STRIDE, last**2)
    aim = edge * factor if up else edge / factor
    if aim >= end if up else aim <= end:
        return float(end)
    return _on_grid(search, aim, *((edge, end) if up else (end, edge)))


def _on_grid(search: Search, aim: float, above: float, below: float) -> float:
    """The rate of the grid nearest to `aim` that lies between two others; where none does, `aim`."""
    size = math.log1p(search.resolution)
    k = round(math.log(aim) / size)
    near = sorted((_rounded(math.exp(j * size)) for j in (k - 1, k, k + 1)), key=lambda rate: abs(math.log(rate / aim)))
    return next((rate for rate in near if above < rate < below), _rounded(aim))


def _rounded(rate: float) -> float:
    return float(f"{rate:.5g}")  # the same number in a scenario's id, which has six digits


def _notes(votes: Mapping[float, _Votes], known: _Known) -> tuple[str, ...]:
    upper = known.upper
    if upper is None:
        return ()
    notes = []
    if not votes[upper].failed:
        notes.append(f"nothing could be stated of {upper:g} req/s in {votes[upper].silent} runs, which counts as not met")
    above = [f"{rate:g}" for rate, v in votes.items() if rate > upper and v.met > v.failed]
    if above:
        notes.append(f"{', '.join(above)} req/s met the limits although {upper:g} failed {votes[upper].failed} times")
    return tuple(notes)

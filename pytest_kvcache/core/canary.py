"""The canary: a fixed piece of work with no framework in it, timed beside each run, tells whether the machine itself has changed. Pure.

A reading is JSON-plain: `on`, where it ran (readings from elsewhere are not compared), and `ms`, the milliseconds of each part (`PARTS`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import stats

Reading = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What it is called, within what change (as a log) it repeats itself in one state of the machine, and how much of a larger one a
    server's figures may follow, either way."""

    words: str
    noise: float
    share: float


PARTS: Mapping[str, Part] = {
    # In one state within a few per cent; between two states an engine's figures followed it by 0.33 (one machine).
    "memory": Part(words="memory traffic of the processors", noise=0.05, share=0.35),
    # An engine bound by the one or by the other follows it in full.
    "copy": Part(words="copies within the GPU", noise=0.015, share=1.0),
    "arithmetic": Part(words="arithmetic of the GPU", noise=0.015, share=1.0),
}


@dataclass(frozen=True)
class Shift:
    """How far a part was from its state at the baseline: its change as a log."""

    part: str
    change: float

    @property
    def allowance(self) -> float:
        """How much of a server's change this may have made, as a log."""
        return PARTS[self.part].share * abs(self.change)

    @property
    def words(self) -> str:
        percent = 100 * math.expm1(self.change)
        return f"the machine itself was in another state than at the baseline (canary: {PARTS[self.part].words} took {percent:+.1f} %)"


@dataclass(frozen=True, kw_only=True)
class Canary:
    """What each part took (ms) beside each run of the baseline and beside each new one; a time that is not known is None."""

    old: Mapping[str, Sequence[float]] = field(default_factory=dict)
    new: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def shift(self, runs: int) -> Shift | None:
        """The one that may have made the most, over the first `runs`; None within the noise. A part that is not known beside every run
        tells nothing."""
        shifts = (Shift(part, self._change(part, runs)) for part in PARTS if part in self.old and part in self.new)
        beyond = [s for s in shifts if abs(s.change) > PARTS[s.part].noise]
        return max(beyond, key=lambda s: s.allowance, default=None)

    def _change(self, part: str, runs: int) -> float:
        asked, old = self.new[part][:runs], self.old[part]
        new = [v for v in asked if v]
        if not old or not new or len(new) < len(asked):
            return 0.0
        return stats.mean([math.log(v) for v in new]) - stats.mean([math.log(v) for v in old])


def around(before: Reading | None, after: Reading | None) -> dict[str, Any] | None:
    """The machine's state over a window, from just before and just after it."""
    if before is None or after is None or before["on"] != after["on"]:
        return None
    shared = before["ms"].keys() & after["ms"].keys()
    return {"on": before["on"], "ms": {p: round(math.sqrt(before["ms"][p] * after["ms"][p]), 4) for p in before["ms"] if p in shared}}


def place(readings: Iterable[Reading | None]) -> str | None:
    """Where they all ran; None when that is not one place."""
    found = {r["on"] for r in readings if r}
    return found.pop() if len(found) == 1 else None


def by_part(readings: Sequence[Reading | None]) -> dict[str, tuple[float | None, ...]]:
    """What each part took beside each run; nothing where the runs were not all in one place."""
    if place(readings) is None:
        return {}
    parts = dict.fromkeys(part for r in readings if r for part in r["ms"])
    return {part: tuple(r["ms"].get(part) if r else None for r in readings) for part in parts}

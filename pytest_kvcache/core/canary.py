"""The canary: a fixed piece of work with no framework in it, timed beside each run, tells whether the machine itself has changed. Pure.

A reading is JSON-plain: `on`, where it ran (readings from elsewhere are not compared), and `ms`, the milliseconds of each part (`PARTS`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    # An engine bound by the one or by the other follows it in full. One card repeats itself within 0.2 %.
    "copy": Part(words="copies within the GPU", noise=0.005, share=1.0),
    "arithmetic": Part(words="arithmetic of the GPU", noise=0.005, share=1.0),
}
ANOTHER_MACHINE = math.log(2.5)  # states of one machine lay within 1.8 of each other; this excuses no verdict, it forbids one


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
        percent = 100 * math.expm1(min(self.change, 700.0))
        return f"the machine itself was in another state than at the baseline (canary: {PARTS[self.part].words} took {percent:+.1f} %)"


@dataclass(frozen=True)
class Side:
    """Where the readings of one side were made (empty: not in one place, or not beside every run), and what each part took (ms), run by
    run."""

    on: str = ""
    ms: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The readings beside the runs of a baseline and beside the new ones."""

    old: Side = Side()
    new: Side = Side()

    @cached_property
    def _logs(self) -> dict[str, tuple[float, list[float]]]:
        """The baseline's mean and the new readings of each part, as logs; nothing where the two sides may not be compared."""
        if not self.old.on or self.old.on != self.new.on:
            return {}
        parts = [part for part in PARTS if self.old.ms.get(part) and self.new.ms.get(part)]
        return {p: (stats.mean(list(map(math.log, self.old.ms[p]))), list(map(math.log, self.new.ms[p]))) for p in parts}

    def _shifts(self, runs: int) -> list[Shift]:
        return [Shift(part, stats.mean(new[:runs]) - old) for part, (old, new) in self._logs.items()]

    def shift(self, runs: int) -> Shift | None:
        """The one that may have made the most, over the first `runs`; None within the noise, and where the sides may not be compared."""
        return max((s for s in self._shifts(runs) if abs(s.change) > PARTS[s.part].noise), key=lambda s: s.allowance, default=None)

    def problem(self, runs: int) -> str:
        """Why this is not the machine of the baseline; empty when it is."""
        far = next((s for s in self._shifts(runs) if abs(s.change) > ANOTHER_MACHINE), None)
        return f"{far.words}: that is another machine" if far else ""

    @property
    def note(self) -> str:
        """That the two sides cannot be compared, where the baseline has readings; empty otherwise."""
        if not self.old.on or self.old.on == self.new.on:
            return ""
        return f"judged without the canary: the baseline's ran on {self.old.on}, this one on {self.new.on or 'no one place'}"


def around(before: Reading | None, after: Reading | None) -> dict[str, Any] | None:
    """The machine's state over a window, from just before and just after it."""
    if before is None or after is None or before["on"] != after["on"]:
        return None
    shared = before["ms"].keys() & after["ms"].keys()
    return {"on": before["on"], "ms": {p: round(math.sqrt(before["ms"][p] * after["ms"][p]), 4) for p in before["ms"] if p in shared}}


def side(readings: Sequence[Reading | None]) -> Side:
    """Of the readings beside some runs: those parts that every run has."""
    known = [r for r in readings if r]
    if not known or len(known) < len(readings) or len({r["on"] for r in known}) > 1:
        return Side()
    parts = [part for part in known[0]["ms"] if all(part in r["ms"] for r in known)]
    return Side(known[0]["on"], {part: tuple(float(r["ms"][part]) for r in known) for part in parts})

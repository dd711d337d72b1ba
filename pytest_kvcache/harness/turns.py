"""Measure one scenario on servers that live side by side: in short windows that go back and forth between them.

A machine that changes its speed every few seconds then changes it for all alike, which windows of the scenario's own length do
not achieve: on a 2-core virtual machine two equal servers in windows of 8 s differed by 4 % from round to round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from ..core.record import Trace
from ..core.scenarios import ClosedLoop
from ..core.stitched import stitched
from .running import RunningEngine

LEAST_TURNS = 8  # windows of each server in a round
LEAST_REQUESTS = 2  # of a window


def parts(scenario: ClosedLoop) -> tuple[int, int]:
    """How many windows each server has in a round, an even number, and how many requests a window: each stream sends one."""
    size = max(LEAST_REQUESTS, scenario.concurrency)
    turns = max(LEAST_TURNS, math.ceil(scenario.n_requests / size))
    return turns + turns % 2, size


def in_turns(servers: Sequence[RunningEngine], scenario: ClosedLoop) -> list[Trace]:
    """A trace of each server; every window has requests of its own, the same on all servers. UserError and Spoiled as `measure`."""
    turns, size = parts(scenario)
    windows: list[list[Trace]] = [[] for _ in servers]
    with ExitStack() as stack:
        ready = [stack.enter_context(s.prepared(scenario)) for s in servers]
        for turn in range(turns):
            places = range(len(servers)) if turn % 2 == 0 else reversed(range(len(servers)))
            for i in places:
                windows[i].append(ready[i](f"turn {turn}", size))
    return [stitched(w) for w in windows]

"""Baselines that were outgrown: a gate better by more than its margin, session after session. Counts in, counts out. Pure.

A later loss of the same size would pass: it only leads back to the stored level.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .gate import IMPROVEMENT

SESSIONS = 3  # in a row


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A gate that was compared with its baseline in this session. `stored` marks the runs it was compared with."""

    name: str
    stored: str
    verdict: str


def mark(sessions: Sequence[Sequence[float]]) -> str:
    """A short name for stored runs: others than these have another."""
    return hashlib.sha256(json.dumps([list(s) for s in sessions]).encode()).hexdigest()[:16]


def counted(before: Any, found: Iterable[Compared]) -> dict[str, dict[str, Any]]:
    """Sessions in a row that were improvements, by gate: `{"stored": mark, "sessions": n}`.

    `before` is what this function gave for the session before, or anything: it comes from a file. Any other verdict ends a row, and
    so do other stored runs; a gate that was not compared keeps its count.
    """
    counts = {k: v for k, v in before.items() if _is_count(v)} if isinstance(before, Mapping) else {}
    for gate in found:
        old = counts.pop(gate.name, None)
        if gate.verdict == IMPROVEMENT:
            in_a_row = old["sessions"] if old and old["stored"] == gate.stored else 0
            counts[gate.name] = {"stored": gate.stored, "sessions": in_a_row + 1}
    return counts


def _is_count(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("stored"), str) and type(value.get("sessions")) is int

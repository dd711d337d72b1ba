"""Verdicts as rows: what tests, terminal, JUnit and report show of a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.gate import IMPROVEMENT, INVALID, MISMATCH, NO_BASELINE, REGRESSION, fails
from .core.metrics import find_metric
from .core.plan import GateSpec

if TYPE_CHECKING:
    from .session import KvSession

Rows = dict[tuple[str, str], dict[str, Any]]
"""Verdicts as `row` makes them, by block and key."""


def row(session: KvSession, block: dict[str, Any], spec: GateSpec, test: str) -> dict[str, Any]:
    """One gate's verdict with everything that explains it, JSON-plain (schema: run.schema.json)."""
    metric, found, s = find_metric(spec.metric), dict(block["verdicts"][spec.key]), session.settings
    recorded = bool(s.record) or block["evidence"].get(spec.key, {}).get("need") == "record"  # now, or when a stored run was measured
    failed = fails(found["verdict"], found["reason"], profile=s.profile, strict=s.strict, recording=recorded)
    regressed = found["verdict"] == REGRESSION
    return found | {
        "key": spec.key, "test": test, "block": block["id"], "family": spec.family, "scenario": spec.scenario,
        "arm": spec.arm, "metric": spec.metric, "unit": metric.unit, "better": metric.better,
        "outcome": "failed" if failed else "passed", "cure": None if spec.against or spec.limit is not None else _cure(session, found),
        "changed": list(block["evidence"][spec.key]["changed"]) if regressed else [],
        "moved_with": _moved_with(block, spec.key) if regressed else [], "remarks": [],
        **({"against": spec.against} if spec.against else {}), **({"at_least": spec.at_least} if spec.at_least else {}),
        **({"limit": spec.limit} if spec.limit is not None else {}),
    }  # fmt: skip


def settled(session: KvSession, block: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of every settled gate of a block, for those that no test has read (after an interrupt, say)."""
    specs = {g.key: g for b in session.blocks.values() if b.id == block["id"] for g in b.gates}
    return [row(session, block, specs[k], "") for k in block["verdicts"] if k in specs]


def rerecord(session: KvSession) -> str:
    """The command that stores new runs in place of those that are stored."""
    return f"{session.settings.command} --kv-record=all"


def _cure(session: KvSession, found: dict[str, Any]) -> str | None:
    command = session.settings.command
    if session.settings.replay or session.settings.calibrate:
        return None  # what was measured then is no ground to store anything now
    if found["verdict"] == IMPROVEMENT:
        return f"{rerecord(session)}   (stores the better level, so that losing it again is noticed)"
    stale = found["verdict"] == INVALID and found["reason"].startswith(MISMATCH)
    if stale and session.settings.record != "all":
        return f"{rerecord(session)}   (in place of what is stored of the other)"
    if found["verdict"] == NO_BASELINE and not session.settings.record:
        return f"{command} --kv-record=missing"
    return None


def _moved_with(block: dict[str, Any], key: str) -> list[str]:
    """Other gates of the block that went the wrong way too: their whole interval lies on the worse side."""
    moved = []
    for other, v in block["verdicts"].items():
        better = find_metric(other.rsplit("/", 1)[1]).better
        if other != key and v["low"] is not None and (v["low"] > 0 if better == "lower" else v["high"] < 0):
            moved.append(f"{other.split('/', 1)[1]} {100 * v['change']:+.0f} %")
    return moved[:4]

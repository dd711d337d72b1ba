"""A server's metrics page, asked for before and after a load and once it is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.framework import Framework
from ..core.load import Target
from ..core.readings import NO_DATA, NOT_EXPORTED, READINGS, TOTALS, Readings, grown, nothing, readings
from .asking import ask, opener

TIMEOUT_S = 5.0
UNREACHABLE, UNREADABLE = "unreachable", "unreadable"


def fetch(url: str, target: Target | None = None) -> tuple[str, str]:
    """The text of a page, and why there is none: `http_404`, `unreachable`."""
    try:
        status, text = ask(opener(target), url, limit_s=TIMEOUT_S, headers=target.headers if target else None)
    except (OSError, ValueError):
        return "", UNREACHABLE
    return (text, "") if 200 <= status < 300 else ("", f"http_{status}")


def read(base_url: str, framework: Framework, target: Target | None = None) -> Readings:
    """What a server's page says in common words. No page, or none that can be read, gives the reason: its counters only check what the
    client saw."""
    if not framework.readings:
        return readings("", {}, framework.unsupported)
    page, why = fetch(base_url + framework.metrics, target)
    if why:
        return nothing(why)
    try:
        return readings(page, framework.readings, framework.unsupported)
    except ValueError:
        return nothing(UNREADABLE)


def told(before: Readings, after: Readings) -> dict[str, Any]:
    """Two readings as a trace has them: the counters of both and the tokens between them, or what became of those that only one has
    (`counters_lost`); what else the second one says, and which readings there are none of and why (`not_read`)."""
    found: dict[str, Any] = {}
    counters = [{k: v for k, v in r.values.items() if k in TOTALS} for r in (before, after)]
    if all(counters):
        deltas, _ = grown(before.values, after.values, ("output", "input"))
        found = {"counters": counters, "server_tokens": deltas}
    elif lost := _lost(before, after, *counters):
        found = {"counters_lost": lost}
    now: Mapping[str, float] = {k: v for k, v in after.values.items() if k not in TOTALS}
    reasons: dict[str, list[str]] = {}
    for name, why in after.absent.items():
        reasons.setdefault(why, []).append(name)
    lacking = [f"{'all' if len(names) == len(READINGS) else ', '.join(names)}: {why}" for why, names in reasons.items()]
    odd = {"page_warnings": ", ".join(after.warnings)} if after.warnings else {}
    return found | ({"cache": dict(now)} if now else {}) | ({"not_read": "; ".join(lacking)} if lacking else {}) | odd


def _lost(before: Readings, after: Readings, first: Mapping[str, float], second: Mapping[str, float]) -> str:
    """When a page that has counters was read without them, and why. One that had counted nothing yet has lost nothing."""
    if first:
        return f"after the load: {after.absent.get(next(iter(first)), NO_DATA)}"
    why = before.absent.get(next(iter(second), ""), NO_DATA)
    return "" if why in (NOT_EXPORTED, NO_DATA) else f"before the load: {why}"

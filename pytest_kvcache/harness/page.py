"""A server's metrics page, asked for before and after a load and once it is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.framework import Framework
from ..core.readings import TOTALS, Readings, grown, nothing, readings

TIMEOUT_S = 5.0
UNREACHABLE, UNREADABLE = "unreachable", "unreadable"


def fetch(url: str) -> tuple[str, str]:
    """The text of a page, and why there is none: `http_404`, `unreachable`."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace")), ""
    except urllib.error.HTTPError as e:
        return "", f"http_{e.code}"
    except (OSError, ValueError, http.client.HTTPException):
        return "", UNREACHABLE


def read(base_url: str, framework: Framework) -> Readings:
    """What a server's page says in common words. No page, or none that can be read, gives the reason: its counters only check what the
    client saw."""
    if not framework.readings:
        return readings("", {}, framework.unsupported)
    page, why = fetch(base_url + framework.metrics)
    if why:
        return nothing(why)
    try:
        return readings(page, framework.readings, framework.unsupported)
    except ValueError:
        return nothing(UNREADABLE)


def told(before: Readings, after: Readings) -> dict[str, Any]:
    """Two readings as a trace has them: the counters of both and the tokens between them; what else the second one says. Nothing where
    there is none."""
    found: dict[str, Any] = {}
    counters = [{k: v for k, v in r.values.items() if k in TOTALS} for r in (before, after)]
    if all(counters):
        deltas, _ = grown(before.values, after.values, ("output", "input"))
        found = {"counters": counters, "server_tokens": deltas}
    now: Mapping[str, float] = {k: v for k, v in after.values.items() if k not in TOTALS}
    return found | ({"cache": dict(now)} if now else {})

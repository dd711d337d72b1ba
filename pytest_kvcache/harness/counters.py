"""A server's own counters, read from its metrics page before and after a load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 5.0


def read(url: str, names: Mapping[str, str]) -> dict[str, float]:
    """The named series of a Prometheus page, each summed over its labels; what is missing or no number is absent.

    `names` maps our name to the series'. No page, or none that can be read, gives nothing: a server's counters only check
    what the client saw.
    """
    if not names:
        return {}
    import urllib.request

    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return parse(answer.read().decode(errors="replace"), names)
    except (OSError, ValueError):
        return {}


def parse(page: str, names: Mapping[str, str]) -> dict[str, float]:
    """The same from the text of the page; ValueError when it is no such page."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    ours = {series: name for name, series in names.items()}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = ours.get(sample.name)
            if name and math.isfinite(sample.value):
                found[name] = found.get(name, 0.0) + sample.value
    return found


def told(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Two readings as a trace has them: both, and the tokens between them; nothing where one is missing."""
    if not before or not after:
        return {}
    tokens = {k: after[k] - before[k] for k in ("output", "input") if k in before and k in after}
    return {"counters": [dict(before), dict(after)], "server_tokens": tokens}

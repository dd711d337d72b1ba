"""Cases of kinds `base_url` and `proxy_env`, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvcache.core.address import called, parse, proxy_for
from pytest_kvcache.core.spec import UserError

TESTS = {"expected_error": lambda found, wanted: found is not None, "warnings": lambda found, wanted: set(wanted) <= set(found)}


def rows(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each row as a case of its own, as the catalogue compares them."""
    fields = {
        "base_url": ("expected_url", "expected_error", "shown_as", "expected_metrics_url", "expected_health_url"),
        "proxy_env": ("expected", "warnings"),
    }
    found = []
    for row in case["rows"]:
        expected = {k: row[k] for k in fields[case["kind"]] if k in row}
        unknown = (
            set(row)
            - set(expected)
            - {"base_url", "api", "launcher_host", "port", "env", "url", "accept", "accept_error", "note", "notes", "why"}
        )
        found.append(row | {"expected": expected | {k: row[k] for k in unknown}})
    return found


def address(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the product makes of an address that a user writes, or that a server was told to bind."""
    text = row["base_url"] if "base_url" in row else called(row["launcher_host"], row["port"])
    try:
        one = parse(text)
    except UserError as e:
        return {"expected_url": None, "expected_error": str(e)}
    plain = one.origin + one.endpoint(row["api"])
    scheme, _, rest = plain.partition("://")
    userinfo = text.strip().partition("://")[2].partition("/")[0].rpartition("@")[0]
    return {
        "expected_url": f"{scheme}://{userinfo}@{rest}" if one.headers else plain, "expected_error": None, "shown_as": one.shown(),
        "expected_metrics_url": one.origin + one.at_root("/metrics"), "expected_health_url": one.origin + one.at_root("/health"),
    }  # fmt: skip


def proxy(row: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a request goes by a proxy; a measurement by one is marked in its environment."""
    found = proxy_for(row["url"], row["env"])
    return {"expected": "proxy" if found else "direct", "warnings": ["measured_through_proxy"] if found else []}

"""A server's metrics page, asked for before and after a load and once it is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.framework import Framework
from ..core.load import Target
from ..core.readings import READINGS, TOTALS, Readings, grown, nothing, readings
from .tls import tls_context

TIMEOUT_S = 5.0
UNREACHABLE, UNREADABLE = "unreachable", "unreadable"


def opener(target: Target | None) -> Any:
    """How a server is asked something outside of any load: directly where it is ours, else as `target` says. OSError for certificates
    that cannot be read."""
    import urllib.request

    proxies = {"http": target.proxy, "https": target.proxy} if target and target.proxy else {}

    class Stays(urllib.request.HTTPRedirectHandler):
        """Another address is another server, and a key is for one."""

        def redirect_request(self, *args: Any, **more: Any) -> None:
            return None

    handlers: list[Any] = [urllib.request.ProxyHandler(proxies), Stays()]
    if target and target.base_url.startswith("https"):
        handlers.append(urllib.request.HTTPSHandler(context=tls_context(target)))
    return urllib.request.build_opener(*handlers)


def fetch(url: str, target: Target | None = None) -> tuple[str, str]:
    """The text of a page, and why there is none: `http_404`, `unreachable`."""
    import http.client
    import urllib.error
    import urllib.request

    try:
        asked = urllib.request.Request(url, headers=dict(target.headers) if target else {})
        with opener(target).open(asked, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace")), ""
    except urllib.error.HTTPError as e:
        return "", f"http_{e.code}"
    except (OSError, ValueError, http.client.HTTPException):
        return "", UNREACHABLE


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
    """Two readings as a trace has them: the counters of both and the tokens between them; what else the second one says, and which readings
    there are none of and why (`not_read`)."""
    found: dict[str, Any] = {}
    counters = [{k: v for k, v in r.values.items() if k in TOTALS} for r in (before, after)]
    if all(counters):
        deltas, _ = grown(before.values, after.values, ("output", "input"))
        found = {"counters": counters, "server_tokens": deltas}
    now: Mapping[str, float] = {k: v for k, v in after.values.items() if k not in TOTALS}
    reasons: dict[str, list[str]] = {}
    for name, why in after.absent.items():
        reasons.setdefault(why, []).append(name)
    lacking = [f"{'all' if len(names) == len(READINGS) else ', '.join(names)}: {why}" for why, names in reasons.items()]
    odd = {"page_warnings": ", ".join(after.warnings)} if after.warnings else {}
    return found | ({"cache": dict(now)} if now else {}) | ({"not_read": "; ".join(lacking)} if lacking else {}) | odd

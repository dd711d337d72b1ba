"""Asks a server that is ready what it made of its arguments: its log so far, and its metrics page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.resolved import resolved
from ..core.spec import Framework
from .server import ANSI

LOG_BYTES = 2**22  # a server says it when it starts; what comes later is one line a request
TIMEOUT_S = 5.0


def resolved_configuration(framework: Framework, log: Path, base_url: str) -> dict[str, Any]:
    """`{name: value}` by the patterns of `framework.resolved`; nothing where it has none or nothing can be read."""
    if not framework.resolved:
        return {}
    return resolved(f"{_start_of(log)}\n{_page(base_url + framework.metrics) if framework.metrics else ''}", framework.resolved)


def _start_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            return ANSI.sub("", file.read(LOG_BYTES).decode(errors="replace")).replace("\r", "\n")
    except OSError:
        return ""


def _page(url: str) -> str:
    import http.client
    import urllib.request

    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return ""

"""Asks a server that is ready what it made of its arguments: its log so far, and its metrics page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.framework import Framework
from ..core.resolved import resolved
from .page import fetch
from .server import ANSI

LOG_BYTES = 2**22  # a server says it when it starts; what comes later is one line a request


def resolved_configuration(framework: Framework, log: Path, base_url: str) -> dict[str, Any]:
    """`{name: value}` by the patterns of `framework.resolved` and of what it warns of; nothing where it has none or nothing can be read."""
    patterns = framework.resolved + framework.known_warnings
    if not patterns:
        return {}
    page = fetch(base_url + framework.metrics)[0] if framework.readings else ""
    return resolved(f"{start_of(log)}\n{page}", patterns)


def start_of(log: Path) -> str:
    """The beginning of a server's log, without colours."""
    try:
        with log.open("rb") as file:
            return ANSI.sub("", file.read(LOG_BYTES).decode(errors="replace")).replace("\r", "\n")
    except OSError:
        return ""

"""The folder of a run: what was planned, measured and judged (`run.json`) and its page. Its requests: see `harness.traces`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.spec import UserError
from .files import write_bytes, write_json


def write_run(folder: Path, run: dict[str, Any], html: str | None) -> None:
    """Write `run.json` and, where it could be made, `report.html`; UserError when the disk refuses."""
    try:
        write_json(folder / "run.json", run)
        if html is not None:
            write_bytes(folder / "report.html", html.encode())
    except OSError as e:
        raise UserError(f"{folder}: the report could not be written ({e.strerror or e})") from e

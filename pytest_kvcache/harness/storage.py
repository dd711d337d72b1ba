"""The folder of a run: what was planned, measured and judged (`run.json`) and every request (`records.npz`)."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.record import REQUEST_COLUMNS
from ..core.spec import UserError
from .files import write_bytes, write_json

COLUMNS = {
    "index": "the request's place in the workload",
    "sent_s": "seconds: request sent on an open connection",
    "first_s": "seconds: first token event; NaN where there was none",
    "last_s": "seconds: last token event; NaN where there was none",
    "end_s": "seconds: the stream was closed",
    "input_tokens": "prompt tokens by the server's count; -1 where it gave none",
    "output_tokens": "output tokens by the server's count; -1 where it gave none",
    "first_event_tokens": "tokens in the first token event",
    "events": "token events seen",
    "outcome": "ok, or the class of failure",
    "error": "the failure's first words",
    "trace": "row of `traces` in this file's sibling run.json: block, scenario, arm and run of the request",
}
_INTEGERS = ("index", "input_tokens", "output_tokens", "first_event_tokens", "events")
_TEXTS = ("outcome", "error")


def pack_records(traces: Sequence[Mapping[str, Any]]) -> bytes:
    """All requests of a session as one compressed array per column; plain dtypes, no pickles."""
    import numpy as np

    arrays: dict[str, Any] = {}
    for name in REQUEST_COLUMNS:
        values = [v for t in traces for v in t["columns"][name]]
        if name in _INTEGERS:
            arrays[name] = np.array([-1 if v is None else v for v in values], dtype=np.int64)
        elif name in _TEXTS:
            arrays[name] = np.array(values, dtype=np.str_)
        else:
            arrays[name] = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    arrays["trace"] = np.array([i for i, t in enumerate(traces) for _ in t["columns"]["index"]], dtype=np.int64)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def write_run(folder: Path, run: dict[str, Any], traces: Sequence[Mapping[str, Any]], html: str | None) -> None:
    """Write `records.npz`, `run.json` and, where it could be made, `report.html`; UserError when the disk refuses."""
    try:
        packed = pack_records(traces)
        write_bytes(folder / "records.npz", packed)
        described = {"columns": COLUMNS, "files": {"records.npz": hashlib.sha256(packed).hexdigest()}}
        write_json(folder / "run.json", run | described)
        if html is not None:
            write_bytes(folder / "report.html", html.encode())
    except OSError as e:
        raise UserError(f"{folder}: the report could not be written ({e.strerror or e})") from e

"""What was seen: requests, runs of a scenario. JSON-plain from birth, so that they cross processes and files as they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

OK = "ok"


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds on the run's own monotonic clock; a time that never came is None.

    `sent_s` request sent on an open connection · `first_s`/`last_s` first and last token event · `end_s` stream closed ·
    `input_tokens`/`output_tokens` from the server's usage · `events` token events seen ·
    `outcome` `ok` or a class of failure, `error` its first words.
    """

    index: int
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    first_event_tokens: int = 1
    events: int = 0
    outcome: str = OK
    error: str = ""


REQUEST_COLUMNS = tuple(f.name for f in dataclasses.fields(RequestRecord))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Raw facts of one scenario in one run: the requests and what the machine did meanwhile.

    `load` is what the device watch saw (see `harness.device`); `workload` the hash of the requests asked for.
    """

    scenario: str
    arm: str
    run: int
    workload: str
    isl: int
    osl: int
    records: tuple[RequestRecord, ...]
    load: dict[str, Any] = field(default_factory=dict)


def to_plain(trace: Trace) -> dict[str, Any]:
    """The trace as JSON: request records become columns, `{name: [values]}`."""
    plain = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.name != "records"}
    plain["columns"] = {c: [getattr(r, c) for r in trace.records] for c in REQUEST_COLUMNS}
    return plain


def from_plain(plain: dict[str, Any]) -> Trace:
    """The inverse of `to_plain`."""
    fields = {k: v for k, v in plain.items() if k != "columns"}
    columns = plain["columns"]
    rows = zip(*(columns[c] for c in REQUEST_COLUMNS), strict=True)
    return Trace(**fields, records=tuple(RequestRecord(**dict(zip(REQUEST_COLUMNS, r, strict=True))) for r in rows))

"""Short windows on one server, between which another was measured, as one trace: laid end to end on one clock. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .lengths import mean
from .record import RequestRecord, Trace

SHOWN_FOREIGN = 5
_TIMES = tuple(f.name for f in dataclasses.fields(RequestRecord) if f.name.endswith("_s") and f.name != "connect_s")


def stitched(windows: Sequence[Trace]) -> Trace:
    """One trace of all requests, each window right after the last one's end. Rates and quantiles are then those of all windows,
    with the ends of each, where its streams run dry, among them. `load["turns"]` has of each window the requests and the milliseconds.
    """
    records: list[RequestRecord] = []
    arrivals: dict[int, int] = {}
    turns: list[list[int]] = []
    at_ms = 0
    for w in windows:
        records += [_moved(r, i, at_ms / 1e3) for i, r in enumerate(w.records, len(records))]
        for ms, n in zip(w.arrivals.get("ms", ()), w.arrivals.get("n", ()), strict=True):
            arrivals[ms + at_ms] = arrivals.get(ms + at_ms, 0) + n
        length = math.ceil(1e3 * max((r.end_s or r.sent_s for r in w.records), default=0.0)) + 1
        turns.append([len(w.records), length])
        at_ms += length
    return dataclasses.replace(
        windows[0], records=tuple(records), itl=_counted((w.itl for w in windows), "us"),
        arrivals={"ms": list(arrivals), "n": list(arrivals.values())} if arrivals else {},
        load=_load([w.load for w in windows]) | {"turns": turns}, **_lengths(windows),
    )  # fmt: skip


def _lengths(windows: Sequence[Trace]) -> dict[str, Any]:
    """What was asked of each request, by its new index: the windows may differ in theirs though each has one length for all."""
    asked = [w.asked(r.index) for w in windows for r in w.records]
    if len(set(asked)) < 2:
        return {}
    isl, osl = (list(column) for column in zip(*asked, strict=True))
    return {"isl": mean(isl), "osl": mean(osl), "lengths": {"isl": isl, "osl": osl}}


def windows_of(trace: Trace) -> list[Trace]:
    """The windows that a trace was made of, on its clock and without gaps per token; none of one that was measured in one piece."""
    found, at, at_ms = [], 0, 0
    for n, length in trace.load.get("turns", ()):
        inside = [i for i, ms in enumerate(trace.arrivals.get("ms", ())) if at_ms <= ms < at_ms + length]
        arrivals = {k: [column[i] for i in inside] for k, column in trace.arrivals.items()} if inside else {}
        load = {k: v for k, v in trace.load.items() if k != "turns"}
        found.append(dataclasses.replace(trace, records=trace.records[at : at + n], arrivals=arrivals, itl={}, load=load))
        at, at_ms = at + n, at_ms + length
    return found


def _moved(r: RequestRecord, index: int, by_s: float) -> RequestRecord:
    moved: dict[str, Any] = {name: None if (t := getattr(r, name)) is None else t + by_s for name in _TIMES}
    return dataclasses.replace(r, index=index, **moved)


def _counted(columns: Iterable[Mapping[str, Sequence[Any]]], value: str) -> dict[str, list[Any]]:
    counts: dict[Any, int] = {}
    for c in columns:
        for v, n in zip(c.get(value, ()), c.get("n", ()), strict=True):
            counts[v] = counts.get(v, 0) + n
    return {value: sorted(counts), "n": [counts[v] for v in sorted(counts)]} if counts else {}


def _load(seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the machine and the client did: sums, means by the length of a window, and of the client's own limits the worst."""
    walls = [s.get("wall_s") or 1.0 for s in seen]
    told: dict[str, Any] = {name: value for s in seen for name, value in s.items()}
    for name in ("wall_s", "asked", "throttled_s"):
        if name in told:
            told[name] = _total([s.get(name) for s in seen])
    for name in [n for n in told if n.endswith("_cores") or n == "psi_some"]:
        told[name] = _mean([s.get(name) for s in seen], walls)
    if "foreign" in told:
        told["foreign"] = _foreign(seen, walls)
    # What one window does not tell is not known of the whole.
    for name in [n for n in ("client", "server_tokens", "counters") if not all(s.get(n) for s in seen)]:
        told.pop(name, None)
    if "client" in told:
        told["client"] = _client([s["client"] for s in seen])
    if "server_tokens" in told:
        told["server_tokens"] = {k: _total([s["server_tokens"].get(k) for s in seen]) for k in told["server_tokens"]}
    if "counters" in told:
        told["counters"] = [seen[0]["counters"][0], seen[-1]["counters"][1]]
    return told


def _total(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    total = math.fsum(known)
    if len(known) < len(values):
        return None
    return int(total) if all(isinstance(v, int) for v in known) else round(total, 4)


def _mean(values: Sequence[float | None], walls: Sequence[float]) -> float | None:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    return round(math.fsum(v * w for v, w in zip(known, walls, strict=True)) / math.fsum(walls), 4)


def _foreign(seen: Sequence[Mapping[str, Any]], walls: Sequence[float]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for s, wall in zip(seen, walls, strict=True):
        for p in s.get("foreign", ()):
            entry = found.setdefault(p.get("pid"), {**p, "cores": 0.0})
            entry["cores"] += p["cores"] * wall / math.fsum(walls)
    worst = sorted(found.values(), key=lambda p: -p["cores"])[:SHOWN_FOREIGN]
    return [p | {"cores": round(p["cores"], 4)} for p in worst]


SUMMED = ("cpu_s", "slot_idle_s", "clock_steps", "decode_s")


def _client(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the load client: sums of times, and of every other figure the largest, so that a limit broken in one window shows."""
    found = dict(told[-1])
    for name, value in found.items():
        values = [c.get(name) for c in told]
        if name in SUMMED:
            found[name] = _total(values)
        elif isinstance(value, Mapping):
            keys = {k for v in values if v for k in v}
            found[name] = {k: max(v[k] for v in values if v and v.get(k) is not None) for k in sorted(keys)}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = max(v for v in values if v is not None)
    return found

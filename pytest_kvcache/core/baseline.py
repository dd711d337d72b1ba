"""Stored numbers as values: look one up for a gate, add a session's runs. Append-only: what is replaced is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .fingerprint import identity_differences
from .gate import MIN_BASE_RUNS, Base, Rule
from .metrics import Metric

SCHEMA = "pytest-kvcache/baseline/1"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Current:
    """What a number of this session is a number of: the environment and the requests asked for."""

    environment: Mapping[str, Mapping[str, Any]]
    workload: str
    cores: int | None = None


def empty(gpu: str, framework: str, model: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "gpu": gpu, "framework": framework, "model": model, "sessions": {}, "entries": {}}


def by_session(runs: Sequence[Mapping[str, Any]], field: Callable[[Mapping[str, Any]], T]) -> tuple[tuple[T, ...], ...]:
    """A figure of each run, grouped by session in the order they were recorded."""
    grouped: dict[str, list[T]] = {}
    for run in runs:
        grouped.setdefault(run["session"], []).append(field(run))
    return tuple(map(tuple, grouped.values()))


def canary_of(runs: Sequence[Mapping[str, Any]], cores: int | None) -> tuple[tuple[float, ...], ...]:
    """What the canary took beside each run; empty unless it is known of all and was done by as many cores as now."""
    known = cores is not None and all(run.get("canary", {}).get("cores") == cores for run in runs)
    return by_session(runs, lambda run: float(run["canary"]["ms"])) if known else ()


def _mismatch(doc: Mapping[str, Any], entry: Mapping[str, Any], metric: Metric, now: Current) -> str:
    """Why the stored number is of something else; empty when it may be compared."""
    for session in dict.fromkeys(run["session"] for run in entry["runs"]):
        about = doc["sessions"].get(session)
        if about is None:
            return f"session {session} of its runs is not described in the file"
        if different := identity_differences(about["environment"], now.environment):
            return "; ".join(different)
    if entry["workload"] != now.workload:
        return f"workload: {entry['workload']} -> {now.workload}"
    if entry["definition"] != metric.definition:
        return f"definition: {entry['definition']!r} -> {metric.definition!r}"
    return ""


def lookup(doc: Mapping[str, Any], key: str, metric: Metric, now: Current) -> Base:
    """The stored number for a gate; `missing` or `mismatch` says why there is none to compare with."""
    entry = doc["entries"].get(key)
    if entry is None or not entry["runs"]:
        return Base(missing="no baseline is stored for this gate")
    if problem := _mismatch(doc, entry, metric, now):
        return Base(mismatch=problem)
    return Base(
        sessions=by_session(entry["runs"], lambda run: run["value"]), samples=by_session(entry["runs"], lambda run: run["n"]),
        canary_ms=canary_of(entry["runs"], now.cores), unit=entry["unit"], better=entry["better"], definition=entry["definition"],
    )  # fmt: skip


def need(base: Base, rule: Rule, *, record: str | None, smoke: bool) -> str:
    """What a gate needs from this session.

    `record` runs to store them, `judge` them, `report` one run without judging it (profile smoke), or `nothing`: there
    is no baseline to compare with, and measuring would only delay saying so.
    """
    if record == "all":
        return "record"
    incomplete = len(base.runs) < MIN_BASE_RUNS or (
        len(base.sessions) < rule.record_sessions and len(base.runs) < rule.record_sessions * rule.record_runs
    )
    if record == "missing" and (base.missing or base.mismatch or incomplete):
        return "record"
    if smoke:
        return "report"
    return "nothing" if base.missing or base.mismatch or len(base.runs) < MIN_BASE_RUNS else "judge"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The runs of one gate to store, each as the file has it but for its session: `value`, `n`, `failed`, `canary`."""

    key: str
    metric: Metric
    workload: str
    runs: tuple[Mapping[str, Any], ...]


def merge(
    doc: Mapping[str, Any], recordings: Sequence[Recording], *, session: str, about: Mapping[str, Any], now_iso: str, replace: bool
) -> dict[str, Any]:
    """The document with this session's runs added; nothing is pruned.

    Runs of the same thing are appended. Where `replace` is set or the stored runs are of something else, they move to
    `supersedes` with the reason.
    """
    new: dict[str, Any] = copy.deepcopy(dict(doc))
    new["sessions"][session] = dict(about)
    for r in recordings:
        runs = [{"session": session, **run} for run in r.runs]
        fresh = {"unit": r.metric.unit, "better": r.metric.better, "definition": r.metric.definition, "workload": r.workload, "runs": runs}
        old = new["entries"].get(r.key)
        if old is not None:
            now = Current(environment=about["environment"], workload=r.workload)
            why = _mismatch(new, old, r.metric, now) or ("recorded anew" if replace else "")
            if why:
                gone = {k: old[k] for k in ("definition", "workload", "runs")} | {"replaced": now_iso, "why": why}
                fresh["supersedes"] = [*old.get("supersedes", []), gone]
            else:
                fresh |= {"runs": [*old["runs"], *runs]} | ({"supersedes": old["supersedes"]} if "supersedes" in old else {})
        new["entries"][r.key] = fresh
    return new


def newest_environment(doc: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """The environment that a stored number was last recorded in; differences are shown against it."""
    entry = doc["entries"].get(key)
    sessions = [doc["sessions"][r["session"]] for r in entry["runs"] if r["session"] in doc["sessions"]] if entry else []
    return max(sessions, key=lambda s: s["started"])["environment"] if sessions else None

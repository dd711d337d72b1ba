"""Stored numbers as values: look one up for a gate, add a session's runs. Append-only: what is replaced is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .canary import side
from .fingerprint import identity_differences
from .gate import MIN_BASE_RUNS, Base, Rule
from .metrics import Metric

SCHEMA = "pytest-kvcache/baseline/1"
T = TypeVar("T")
Run = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Current:
    """What a number of this session is a number of: the environment and the requests asked for."""

    environment: Mapping[str, Mapping[str, Any]]
    workload: str


def empty(gpu: str, framework: str, model: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "gpu": gpu, "framework": framework, "model": model, "sessions": {}, "entries": {}}


def by_session(runs: Sequence[Run], field: Callable[[Run], T]) -> tuple[tuple[T, ...], ...]:
    """A figure of each run, grouped by session in the order they were recorded."""
    grouped: dict[str, list[T]] = {}
    for run in runs:
        grouped.setdefault(run["session"], []).append(field(run))
    return tuple(map(tuple, grouped.values()))


def _mismatch(doc: Mapping[str, Any], entry: Mapping[str, Any], metric: Metric, now: Current) -> str:
    """Why the stored number is of something else; empty when it may be compared."""
    for session in dict.fromkeys(run["session"] for run in entry["runs"]):
        about = doc["sessions"].get(session)
        if about is None:
            return f"session {session!r} of its runs is not described in the file"
        if different := identity_differences(about["environment"], now.environment):
            return "; ".join(different)
    if entry["workload"] != now.workload:
        return f"workload: {entry['workload']!r} -> {now.workload!r}"
    if entry["definition"] != metric.definition:
        return f"definition: {entry['definition']!r} -> {metric.definition!r}"
    return ""


def cards_of(environment: Mapping[str, Any]) -> frozenset[str]:
    """UUIDs of the GPUs in an environment; empty where they are not known, as on a CPU."""
    context = environment.get("context")
    uuids = context.get("gpu_uuids") if isinstance(context, Mapping) else None
    return frozenset(uuids) if isinstance(uuids, list) and all(isinstance(u, str) for u in uuids) else frozenset()


def of_cards(doc: Mapping[str, Any], runs: Sequence[Run], environment: Mapping[str, Any]) -> tuple[Sequence[Run], int]:
    """The stored runs that count in this environment, and how many are of other cards of the model.

    Cards differ by more than runs do. So once as many runs of this very card are stored as a baseline needs, only those count;
    until then all do. A card that is not known is taken for this one: that is the stricter of the two.
    """
    here, sessions = cards_of(environment), {r["session"] for r in runs}
    known = {s: cards_of(doc["sessions"][s]["environment"]) for s in sessions}
    elsewhere = {s for s, cards in known.items() if here and cards and cards != here}
    own = [r for r in runs if r["session"] not in elsewhere] if elsewhere else runs
    return (own if len(own) >= MIN_BASE_RUNS else runs), len(runs) - len(own)


def lookup(doc: Mapping[str, Any], key: str, metric: Metric, now: Current) -> Base:
    """The stored number for a gate; `missing` or `mismatch` says why there is none to compare with."""
    entry = doc["entries"].get(key)
    if entry is None or not entry["runs"]:
        return Base(missing="no baseline is stored for this gate")
    if problem := _mismatch(doc, entry, metric, now):
        return Base(mismatch=problem)
    runs, others = of_cards(doc, entry["runs"], now.environment)
    canary = side([run.get("canary") for run in runs])
    return Base(
        sessions=by_session(runs, lambda run: run["value"]), samples=by_session(runs, lambda run: int(run["n"])),
        canary_on=canary.on, canary_ms=canary.ms, unit=entry["unit"], better=entry["better"], definition=entry["definition"],
        others=others, reference=bool(others) and len(runs) == len(entry["runs"]),
    )  # fmt: skip


def usable(base: Base, rule: Rule) -> bool:
    """Whether there is a number to compare with."""
    return not base.missing and not base.mismatch and len(base.runs) >= rule.base_runs


def incomplete(base: Base, rule: Rule) -> bool:
    """Whether a usable baseline still gathers runs, a few a session: until there are enough, of this very card."""
    runs, sessions = len(base.runs), len(base.sessions)
    return base.reference or (sessions < rule.record_sessions and runs < rule.record_sessions * rule.record_runs)


def need(base: Base, rule: Rule, *, record: str | None, smoke: bool) -> str:
    """What a gate needs from this session.

    `record` runs to store them, `judge` them, `report` one run without judging it (profile smoke), or `nothing`: there
    is no baseline to compare with, and measuring would only delay saying so. A usable baseline that is `incomplete` is judged
    first: what is stored of this session depends on its verdict. A number of something else is not missing: only `all` replaces it.
    """
    if record == "all" or (record == "missing" and not usable(base, rule) and not base.mismatch):
        return "record"
    if smoke:
        return "report"
    return "judge" if usable(base, rule) else "nothing"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The runs of one gate to store, each as the file has it but for its session: `value`, `n`, `failed`, `canary`.

    `judged` are the stored values that they were judged against and passed; None where they were not judged.
    """

    key: str
    metric: Metric
    workload: str
    runs: tuple[Run, ...]
    judged: tuple[float, ...] | None = None


def still_wanted(doc: Mapping[str, Any], recording: Recording, environment: Mapping[str, Any]) -> bool:
    """Whether runs that were judged may be added to the document as it is now: their pass holds for the numbers of then, which
    another session may have replaced meanwhile."""
    judged, now = recording.judged, Current(environment=environment, workload=recording.workload)
    return judged is None or lookup(doc, recording.key, recording.metric, now).runs[: len(judged)] == judged


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


def newest_environment(doc: Mapping[str, Any], key: str, now: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The environment of the newest of the stored runs that count in environment `now`; differences are shown against it."""
    entry, sessions = doc["entries"].get(key), doc["sessions"]
    if entry is None or not all(r["session"] in sessions for r in entry["runs"]):
        return None
    counting = [sessions[r["session"]] for r in of_cards(doc, entry["runs"], now)[0]]
    return max(counting, key=lambda s: s["started"])["environment"] if counting else None

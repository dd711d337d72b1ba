"""A server's metrics page in common words: what its KV cache holds, how many requests run and wait, what it has counted. Pure.

Pages differ in names and in how they are split. Of one engine several processes may each show a series (label `pid`), and so may the
ranks of a parallel one: copies of one number, of which the largest is taken, since a process that saw no update shows 0. Engines beside
each other (`engine`, `dp_rank`) share the work: their counts are added, their shares averaged, and the fullest is told too.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARE, COUNT, TOTAL = "share", "count", "total"
"""Kinds of readings: a share from 0 to 1, a number of something now, a counter that only grows."""

READINGS = {
    "kv_usage": SHARE,  # of the KV cache, in use
    "kv_used_tokens": COUNT,
    "kv_capacity_tokens": COUNT,
    "running": COUNT,  # requests
    "waiting": COUNT,
    "output": TOTAL,  # tokens
    "input": TOTAL,
    "prefix_queries": TOTAL,  # tokens
    "prefix_hits": TOTAL,
    "preemptions": TOTAL,
    "offload_stored_bytes": TOTAL,  # written to a tier below the GPU's memory
    "offload_loaded_bytes": TOTAL,  # ... and read back
}
TOTALS = tuple(name for name, kind in READINGS.items() if kind == TOTAL)

PROCESS = {"pid"}  # labels of copies made by processes of one engine
RANK = {"tp_rank", "pp_rank", "ep_rank", "moe_ep_rank", "rank"}  # ... and by the ranks of a parallel one
REPLICA = {"engine", "engine_id", "dp_rank"}  # labels of engines that share the work

NOT_EXPORTED, NO_DATA, RESET = "not_exported", "no_data", "counter_reset"
PER_PROCESS = "per_process_series"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Where a page has a reading: the sample's value, or the product of those of its `labels`, which are numbers then (`block_size`,
    `num_gpu_blocks`). Only samples with the labels of `where` count. The series `plus` is added, then it is multiplied by `times` and
    divided by `over`; without one of those that are named there is no reading."""

    name: str
    labels: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    plus: str = ""
    times: str = ""
    over: str = ""


Places = Mapping[str, tuple[Series, ...]]
"""Where a page has each reading: the first place of those that the page has, today's name before older ones; they may stand side by
side."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line of a page."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What a page says in common words. What it does not say is in `absent` with the reason, and never 0."""

    values: Mapping[str, float]
    absent: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def nothing(reason: str) -> Readings:
    """No reading at all, for one reason: `http_404`, say."""
    return Readings(values={}, absent=dict.fromkeys(READINGS, reason))


def readings(page: str, places: Places, unsupported: Mapping[str, str] | None = None) -> Readings:
    """The common readings of a metrics page (Prometheus text, or a JSON list of iterations of which the last counts).

    `places` says where they are, `unsupported` why a framework has none of some. ValueError when it is neither kind of page.
    """
    samples = parsed(page)
    values, absent = {}, {}
    for name, kind in READINGS.items():
        if name not in places:
            absent[name] = (unsupported or {}).get(name, NOT_EXPORTED)
            continue
        found = next((f for place in places[name] if (f := _per_engine(place, kind, samples))), [])
        if not found:
            absent[name] = NOT_EXPORTED if samples else NO_DATA
            continue
        values[name] = _sum(found) / (len(found) if kind == SHARE else 1)
        if kind == SHARE and len(found) > 1:
            values[f"{name}_max"] = max(found)
    ours = {place.name for each in places.values() for place in each}
    per_process = any(s.name in ours and PROCESS & s.labels.keys() for s in samples)
    return Readings(values=values, absent=absent, warnings=(PER_PROCESS,) if per_process else ())


def parsed(page: str) -> list[Sample]:
    """The samples of a page; ValueError when it is none. Those that are no finite number are left out."""
    try:
        found = _of_json(page) if page.lstrip()[:1] in ("[", "{") else _of_text(page)
        return [s for s in found if math.isfinite(s.value)]
    except (RecursionError, OverflowError) as e:
        raise ValueError(f"no metrics page: {e}") from e


def _of_text(page: str) -> list[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(page if page.endswith("\n") else page + "\n")
    return [Sample(name=s.name, value=float(s.value), labels=s.labels) for family in families for s in family.samples]


def _of_json(page: str) -> list[Sample]:
    """Numbers of the last iteration, named by their path: `kvCacheStats.usedNumBlocks`."""
    document = json.loads(page)
    last = document[-1] if isinstance(document, list) and document else document
    return [Sample(name=name, value=float(value)) for name, value in _paths(last, "")]


def _paths(value: Any, path: str) -> Iterable[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _per_engine(place: Series, kind: str, samples: Sequence[Sample]) -> list[float]:
    """The reading of each engine; empty where the page does not have it."""
    wanted = set(place.where)
    mine = [(s, _value(s, place.labels)) for s in samples if s.name == place.name and wanted <= set(s.labels.items())]
    found = _by_engine(kind, [(s, value) for s, value in mine if value is not None])
    for other, how in ((place.plus, operator.add), (place.times, operator.mul), (place.over, operator.truediv)):
        if not other:
            continue
        second = _by_engine(COUNT, [(s, s.value) for s in samples if s.name == other])
        if set(second) != set(found) or (how is operator.truediv and 0 in second.values()):
            return []
        found = {engine: how(value, second[engine]) for engine, value in found.items()}
    return list(found.values()) if math.isfinite(_sum(found.values())) else []


def _value(sample: Sample, labels: tuple[str, ...]) -> float | None:
    if not labels:
        return sample.value
    numbers = [_number(sample.labels.get(name, "")) for name in labels]
    return math.prod(n for n in numbers if n is not None) if None not in numbers else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _by_engine(kind: str, mine: Iterable[tuple[Sample, float]]) -> dict[tuple[str, ...], float]:
    """Copies of one number become one, then what is left of an engine is added: its series of several models or sources."""
    copies = RANK if kind == TOTAL else RANK | PROCESS  # what a process has counted is its own
    one: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], float] = {}
    for sample, value in mine:
        engine = tuple(f"{k}={sample.labels[k]}" for k in sorted(REPLICA & sample.labels.keys()))
        rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in copies | REPLICA))
        key = (engine, rest)
        one[key] = max(one[key], value) if key in one else value
    found: dict[tuple[str, ...], list[float]] = {}
    for (engine, _), value in one.items():
        found.setdefault(engine, []).append(value)
    return {engine: max(each) if kind == SHARE else _sum(each) for engine, each in found.items()}


def _sum(values: Iterable[float]) -> float:
    """Whatever their order; infinite where `math.fsum` raises."""
    return sum(sorted(values))


def grown(
    before: Mapping[str, float], after: Mapping[str, float], names: Iterable[str] = TOTALS
) -> tuple[dict[str, float], dict[str, str]]:
    """What the counters grew by between two readings, and why some have no difference: one that fell was reset, by a restart of the
    server."""
    names = tuple(names)
    both = [n for n in names if n in before and n in after]
    deltas = {n: after[n] - before[n] for n in both}
    if any(d < 0 for d in deltas.values()):
        return {}, {n: RESET if n in both else NOT_EXPORTED for n in names}
    return deltas, {n: NOT_EXPORTED for n in names if n not in deltas}

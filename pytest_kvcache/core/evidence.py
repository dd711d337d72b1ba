"""What a gate is judged against: kept with the run, so that anybody can judge it again. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import baseline as stored
from .fingerprint import differences
from .gate import Base, Rule
from .metrics import find_metric
from .plan import GateSpec


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """`need` of this session (see `core.baseline.need`), the stored number, and what the environment has changed since it."""

    need: str
    base: Base
    changed: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def gather(
    doc: Mapping[str, Any], gate: GateSpec, now: stored.Current, rule: Rule, *, record: str | None = None, smoke: bool = False
) -> Evidence:
    """From a baseline document, for the environment and workload of `now`."""
    base = stored.lookup(doc, gate.key, find_metric(gate.metric), now)
    return Evidence(need=stored.need(base, rule, record=record, smoke=smoke), base=base)


def changes(doc: Mapping[str, Any], key: str, environment: Mapping[str, Any]) -> list[str]:
    """What differs from the environment in which a gate's baseline was last recorded; known in full when the server has said
    what it made of its arguments."""
    old = stored.newest_environment(doc, key)
    return differences(old, environment) if old and environment else []


def from_plain(value: Mapping[str, Any]) -> Evidence:
    """As it was before it was written to a file; lists are tuples again. TypeError for anything that no session wrote."""
    base = {k: _frozen(v) for k, v in value["base"].items()}
    return Evidence(need=value["need"], base=Base(**base), changed=tuple(value["changed"]))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

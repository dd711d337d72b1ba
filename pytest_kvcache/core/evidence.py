"""What a gate is judged against: kept with the run, so that anybody can judge it again. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import baseline as stored
from .calibration import session_sd
from .fingerprint import differences
from .gate import Base, Rule
from .metrics import find_metric
from .plan import GateSpec
from .still import STILL

# Against another card of the same model: cards differ by more than sessions do (STATISTICS.md, section 7).
REFERENCE_MARGIN = 0.10
REFERENCE_PRIOR = 0.02


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """`need` of this session (see `core.baseline.need`; `pair`: two arms in turns; `limit`: nothing is stored), the stored number, and
    what the environment has changed since it, or what one build has changed that the other has not."""

    need: str
    base: Base
    changed: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def gather(
    doc: Mapping[str, Any], gate: GateSpec, now: stored.Current, rule: Rule, *, record: str | None = None, smoke: bool = False,
    noise: Mapping[str, Any] | None = None, attached: bool = False,
) -> Evidence:  # fmt: skip
    """From a baseline document, for the environment and workload of `now`; a gate between two arms needs no more than these.

    `noise` is a document of the same form, of the sessions that calibrated the machine. A server that is `attached` has no fresh starts:
    one run of it is one observation, whatever is asked.
    """
    if gate.once:
        return Evidence(need="limit", base=Base())
    if gate.against:
        return Evidence(need="report" if smoke or attached else "pair", base=Base())
    metric = find_metric(gate.metric)
    rule = rule_of(gate, rule)
    base = stored.lookup(doc, gate.key, metric, now)
    if noise and base.runs and metric.drift is None:
        known = session_sd(stored.lookup(noise, gate.key, metric, now), metric.better, rule)
        base = dataclasses.replace(base, session_sd=known)
    if attached:
        return Evidence(need="attached", base=base)
    return Evidence(need=stored.need(base, rule, record=record, smoke=smoke), base=base)


def rule_of(gate: GateSpec, rule: Rule) -> Rule:
    """The rule of a gate where that of numbers that vary from run to run is `rule`."""
    return rule if find_metric(gate.metric).drift is None else STILL


def as_judged(gate: GateSpec, base: Base, rule: Rule) -> tuple[GateSpec, Rule, tuple[str, ...]]:
    """The gate and the rule that hold against a stored number, and what a verdict must say of that: a reference allows more.

    The spread between sessions is that of the machine where it was calibrated, in place of the rule's.
    """
    if base.session_sd:
        rule = dataclasses.replace(rule, session_prior=base.session_sd)
    if not base.others:
        return gate, rule, ()
    if not base.reference:
        return gate, rule, (f"{base.others} stored runs of other cards of this model are left aside",)
    margin, prior = max(gate.margin, REFERENCE_MARGIN), max(rule.session_prior, REFERENCE_PRIOR)
    note = (
        f"compared with another card of this model ({base.others} of {len(base.runs)} stored runs): margin {100 * margin:.3g} % "
        f"instead of {100 * gate.margin:.3g} %, session spread {100 * prior:.3g} %; --kv-record=missing adds runs of this card"
    )
    return dataclasses.replace(gate, margin=margin), dataclasses.replace(rule, session_prior=prior), (note,)


def changes(doc: Mapping[str, Any], key: str, environment: Mapping[str, Any]) -> list[str]:
    """What differs from the environment in which a gate's baseline was last recorded; known in full when the server has said
    what it made of its arguments."""
    old = stored.newest_environment(doc, key, environment)
    return differences(old, environment) if old and environment else []


def from_plain(value: Mapping[str, Any]) -> Evidence:
    """As it was before it was written to a file; lists are tuples again. TypeError, with the field, for anything that no session wrote."""
    base = value["base"]
    known = {f.name: str(f.type) for f in dataclasses.fields(Base)}
    if unknown := set(base) - set(known):
        raise TypeError(f"base.{min(unknown)} is unknown")
    for name, field in base.items():
        if not _FITS[known[name]](field):
            raise TypeError(f"base.{name}: {str(field)[:60]!r}")
    return Evidence(need=value["need"], base=Base(**{k: _frozen(v) for k, v in base.items()}), changed=tuple(value["changed"]))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _milliseconds(value: Any) -> bool:
    return (_whole(value) or isinstance(value, float)) and 1e-300 <= value <= 1e300


def _rows(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Numbers by session: no session is empty."""
    return isinstance(value, list | tuple) and all(isinstance(s, list | tuple) and s and all(map(fits, s)) for s in value)


_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "float": lambda v: (_whole(v) or isinstance(v, float)) and 0 <= v <= 10,
    "int": lambda v: _whole(v) and v >= 0,
    "tuple[tuple[float, ...], ...]": lambda v: _rows(v, lambda n: _whole(n) or isinstance(n, float)),
    "Mapping[str, Sequence[float]]": lambda v: isinstance(v, Mapping)
    and all(isinstance(s, list | tuple) and s and all(map(_milliseconds, s)) for s in v.values()),
    "tuple[tuple[int, ...], ...]": lambda v: _rows(v, lambda n: _whole(n) and n >= 1),
}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(v) for key, v in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

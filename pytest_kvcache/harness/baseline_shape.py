"""The schema of a baseline as types: says at once that a document fits, where JSON Schema takes a second for 10,000 runs.

It has no words for one that does not, and decides nothing: what does not fit here is for the schema to judge.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert

from ..core.baseline import SCHEMA

_Positive = Annotated[float, Meta(ge=1e-200, le=1e200)]
_Count = Annotated[int, Meta(ge=1, le=10**12)]
_Name = Annotated[str, Meta(min_length=1)]


class _Environment(Struct, forbid_unknown_fields=True):
    identity: dict[str, Any]
    subject: dict[str, Any]
    context: dict[str, Any]


class _Session(Struct, forbid_unknown_fields=True):
    started: str
    environment: _Environment
    plugin: str | UnsetType = UNSET


class _Canary(Struct, forbid_unknown_fields=True):
    on: _Name
    ms: Annotated[dict[str, _Positive], Meta(min_length=1)]


class _Run(Struct, forbid_unknown_fields=True):
    session: str
    value: _Positive
    n: _Count
    failed: Annotated[int, Meta(ge=0, le=10**12)]
    canary: _Canary | UnsetType = UNSET


class _Superseded(Struct, forbid_unknown_fields=True):
    replaced: str
    why: str
    runs: list[_Run]
    definition: str | UnsetType = UNSET
    workload: str | UnsetType = UNSET


class _Entry(Struct, forbid_unknown_fields=True):
    unit: str
    better: Literal["lower", "higher"]
    definition: str
    workload: str
    runs: list[_Run]
    supersedes: list[_Superseded] | UnsetType = UNSET


class _Baseline(Struct, forbid_unknown_fields=True):
    schema: str
    gpu: _Name
    framework: _Name
    model: _Name
    sessions: dict[str, _Session]
    entries: dict[str, _Entry]


def fits(doc: Any) -> bool:
    """Whether the document surely is as the schema says."""
    try:
        return convert(doc, type=_Baseline).schema == SCHEMA
    except (ValidationError, OverflowError, UnicodeEncodeError):  # the last: a lone surrogate
        return False

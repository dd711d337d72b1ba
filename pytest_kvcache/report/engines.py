"""Engines measured in one session, side by side: what each gives for the same claim. No verdict: none is the other's baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .numbers import digits, percent, quantity

Row = Mapping[str, Any]


def engine(v: Row) -> tuple[str, str]:
    """Framework and model of a gate."""
    framework, model, _ = str(v["block"]).split("/", 2)
    return framework, model


def names(verdicts: Sequence[Row]) -> dict[tuple[str, str], str]:
    """What the engines of some gates are called: by what they differ in, `vllm` or `smollm2-135m`, or `vllm/smollm2-135m`."""
    engines = sorted({engine(v) for v in verdicts})
    by = [len({e[i] for e in engines}) > 1 for i in (0, 1)]
    return {e: "/".join(part for part, differs in zip(e, by, strict=True) if differs) for e in engines}


def table(verdicts: Sequence[Row]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The engines' names, and for each claim that several were measured for what each gives, with the difference to the first that has it.

    Nothing where there is one engine, or no claim that two share.
    """
    called = names(verdicts)
    if len(called) < 2:
        return [], []
    claims: dict[str, dict[tuple[str, str], Row]] = {}
    for v in verdicts:
        if v["value"] is not None and v["verdict"] != "invalid" and not v.get("against"):
            claims.setdefault(v["key"], {})[engine(v)] = v
    rows = [(key, _cells(found, list(called))) for key, found in sorted(claims.items()) if len(found) > 1]
    return (list(called.values()), rows) if rows else ([], [])


def _cells(found: Mapping[tuple[str, str], Row], engines: Sequence[tuple[str, str]]) -> list[str]:
    cells, first = [], None
    for e in engines:
        if e not in found:
            cells.append("")
            continue
        text = quantity(found[e]["value"], found[e]["unit"], digits(found[e].get("metric")))
        if first is None:
            first = found[e]["value"]
        elif first:
            text += f" ({percent(found[e]['value'] / first - 1)})"
        cells.append(text)
    return cells

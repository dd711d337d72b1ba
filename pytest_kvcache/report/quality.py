"""Quality of precisions, as the page shows it: for each text a table of its arms and controls, and the trade in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import trade
from .gates import Plain, amount, brief_limit
from .measured import unique
from .numbers import NONE, THIN, elide, finite, number, quantity
from .scored import FIGURES, Row, Scored, cell, engine_of, figure, in_a_gib, size, texts_of
from .terminal import label

LOADS = {"output_tok_s": "output tok/s", "tpot_ms.p50": "TPOT p50, ms"}
Gates = Mapping[tuple[str, str], list[Plain]]  # of an arm and a metric


def quality_views(run: Plain) -> list[Plain]:
    """A view for each text of a run, in order; none without one."""
    found = [(block, text) for block, what in run["blocks"].items() for text in texts_of(what)]
    return [_view(run, block, text, i) for i, (block, text) in enumerate(found)]


def _view(run: Plain, block: str, text: Scored, index: int) -> Plain:
    gates: dict[tuple[str, str], list[Plain]] = {}
    for v in run["verdicts"]:
        if v["block"] == block and v["scenario"] == text.scenario:
            gates.setdefault((v["arm"], v["metric"]), []).append(v)
    load, gains = _beside(run["verdicts"], block, [row.name for row in text.arms])
    loads = {metric: name for metric, name in LOADS.items() if any(m == metric for _, m in gains)}
    held = _held(run["blocks"], block, [row.name for row in text.arms])
    text = _sized(text, held)
    reference = next((row for row in text.arms if row.reference), None)
    return {
        "engine": engine_of(block), "scenario": text.scenario, "about": _about(text), "note": text.note, "columns": FIGURES,
        "load": load, "loads": loads, "held": bool(held),
        "arms": [
            _row(row, gates, reference)
            | {"loads": [gains.get((row.name, m), NONE) for m in loads], "held": number(held.get(row.name, {}).get("kv_tokens"))}
            for row in text.arms
        ],
        "controls": [_row(row, {}, None) | {"loads": [NONE] * len(loads), "held": NONE} for row in text.controls.values()],
        "problems": [(row.name, row.problem) for row in text.arms if row.problem],
        "answers": _answers(text), "tasks": _tasks(text),
        "picture": _picture(f"trade-{index}", text, gates),
    }  # fmt: skip


ANSWER = 160  # characters shown of a text


def _answers(text: Scored) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """For each prompt what each arm went on to write, and where it leaves the reference."""
    prompts = unique(name for row in text.arms for name in row.answers)
    return [(p, [(row.name, elide(row.answers[p], ANSWER), _parts(row, p)) for row in text.arms if p in row.answers]) for p in prompts]


def _parts(row: Row, prompt: str) -> str:
    if row.reference or prompt not in row.parts_at:
        return ""
    at = finite(row.parts_at[prompt])
    return "as the reference" if at is None else f"another from token {number(int(at) + 1)} on"


def _tasks(text: Scored) -> list[tuple[str, list[str]]]:
    """For each kind of task how many each arm got right."""
    kinds = unique(kind for row in text.arms for kind in row.tasks)
    return [(kind, [_of(row.tasks.get(kind)) for row in text.arms]) for kind in kinds]


def _of(pair: Any) -> str:
    return f"{number(pair[0])} of {number(pair[1])}" if isinstance(pair, list) and len(pair) == 2 else NONE


def _about(text: Scored) -> list[tuple[str, str]]:
    """What was scored, and how."""
    corpus = f"{text.corpus or 'unknown'}{f' ({text.digest})' if text.digest else ''}"
    tokens = f"{number(text.tokens)} in {number(text.windows)} window{'' if text.windows == 1 else 's'}"
    return [("Text", corpus), ("Scheme", text.scheme or "unknown"), ("Tokens scored", tokens)]


def _row(row: Row, gates: Gates, reference: Row | None) -> Plain:
    return {
        "name": row.name, "reference": row.reference, "precision": "" if row.precision == f"kv_dtype={row.name}" else row.precision,
        "invalid": bool(row.problem),
        "cells": [_cell(row, metric, gates.get((row.name, metric), [])) for metric in FIGURES],
        "size": size(row), "in_a_gib": in_a_gib(row), "smaller": _smaller(row, reference),
    }  # fmt: skip


def _cell(row: Row, metric: str, gates: Sequence[Plain]) -> Plain:
    """A figure with its interval, the verdict on its limit, and what a baseline has to say where that is not a pass."""
    limits = [v for v in gates if finite(v.get("limit")) is not None]
    low, high = row.ends(metric)
    told = metric == "kld.mean" and not (row.reference or row.problem) and (low is not None or high is not None)
    return {
        "text": cell(row, metric), "kind": label(limits[0]) if limits else "",
        "interval": f"{figure(metric, low)} to {figure(metric, high)}" if told else "",
        "limits": [f"limit {_limit(metric, v['limit'])}" for v in limits],
        "drift": [(label(v), amount(v) or label(v)) for v in gates if v not in limits and label(v) != "pass"],
    }  # fmt: skip


def _limit(metric: str, limit: Any) -> str:
    return f"{brief_limit(100 * (finite(limit) or 0.0), '')}{THIN}%" if metric == "top1" else brief_limit(limit, "")


def _smaller(row: Row, reference: Row | None) -> str:
    if row.reference or not (reference and reference.bytes_per_token and row.bytes_per_token):
        return NONE
    return f"{number(reference.bytes_per_token / row.bytes_per_token)}×"


def _beside(verdicts: Sequence[Plain], block: str, arms: Sequence[str]) -> tuple[str, dict[tuple[str, str], str]]:
    """What the gates of a load of the same engine say of arms of the same names: the load that knows most of them, and its figures. Of an
    arm that others are measured in turns with, their baseline."""
    loads: dict[str, dict[tuple[str, str], str]] = {}
    for v in verdicts:
        if engine_of(v["block"]) != engine_of(block) or v["block"] == block or v["metric"] not in LOADS or v["verdict"] == "invalid":
            continue
        for arm, value in ((v["arm"], v["value"]), (str(v.get("against")), v["baseline"])):
            if arm in arms and finite(value) is not None:
                loads.setdefault(f"{v['family']}/{v['scenario']}", {}).setdefault((arm, v["metric"]), quantity(value, ""))
    best = max(loads, key=lambda name: len(loads[name]), default="")
    return best, loads.get(best, {})


def _held(blocks: Mapping[str, Plain], block: str, arms: Sequence[str]) -> dict[str, Plain]:
    """The figures of what servers of the same engine hold in arms of the same names, by the capacity scenario that knows most of them."""
    found: dict[str, dict[str, Plain]] = {}
    for name, what in blocks.items():
        for m in what["measurements"] if engine_of(name) == engine_of(block) else ():
            if m["arm"] in arms and m["valid"] and finite(m["metrics"].get("kv_tokens")) is not None:
                found.setdefault(m["scenario"], {})[m["arm"]] = m["metrics"]
    return max(found.values(), key=len, default={})


def _sized(text: Scored, held: Mapping[str, Plain]) -> Scored:
    """With the bytes of a token that its server tells, where the text's own cache does not tell them."""

    def size_of(row: Row) -> float | None:
        told = finite(held.get(row.name, {}).get("kv_bytes_per_token"))
        return row.bytes_per_token or (told if told and told > 0 else None)

    return replace(text, arms=tuple(replace(row, bytes_per_token=size_of(row)) for row in text.arms))


def _picture(ident: str, text: Scored, gates: Gates) -> Plain:
    """The drawing, the verdicts in it, and the arms that have no place in it."""
    points = [_point(row, gates.get((row.name, "kld.mean"), [])) for row in text.arms if row.reference or _divergence(row)]
    levels = [trade.Level(name=row.name, y=y) for row in text.controls.values() if (y := _divergence(row))]
    drawn = {p.name for p in points if trade.drawable(p)}
    return {
        "svg": trade.trade(ident, f"Mean divergence against the size of the cache, {text.scenario}", points, levels),
        "kinds": unique(p.kind for p in points if p.kind), "limits": any(p.limit for p in points),
        "plain": any(p.y and not p.kind for p in points),
        "sized": trade.sized(points), "left_out": [row.name for row in text.arms if row.name not in drawn],
    }  # fmt: skip


def _divergence(row: Row) -> float | None:
    """The mean, where it is above zero."""
    value = finite(row.figures.get("kld.mean"))
    return value if value and value > 0 else None


def _point(row: Row, gates: Sequence[Plain]) -> trade.Point:
    """The limit's verdict before that on the baseline."""
    if row.reference:
        return trade.Point(name=row.name, kind="", x=row.bytes_per_token, y=None)
    first = sorted(gates, key=lambda v: finite(v.get("limit")) is None)[:1]
    low, high = row.ends("kld.mean")
    return trade.Point(
        name=row.name, kind=label(first[0]) if first else "", x=row.bytes_per_token, y=_divergence(row), low=low, high=high,
        limit=finite(first[0].get("limit")) if first else None,
    )  # fmt: skip

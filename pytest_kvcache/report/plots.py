"""Pictures of a session as inline SVG: pure functions from numbers to text, no script, nothing computed but places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from . import numbers, svg
from .svg import Axis

WIDTH, PLACE, LEFT, RIGHT, ROW, TOP = 1060.0, 176.0, 372.0, 940.0, 26.0, 46.0  # of the forest


def tally(counts: Sequence[tuple[str, int]]) -> str:
    """One bar for the session, a piece for each verdict as wide as its share of the gates."""
    total, x, parts = sum(many for _, many in counts), 0.0, []
    for i, (kind, many) in enumerate(counts):
        width = 1000.0 * many / total
        parts.append(svg.rect(x, 0, width - (3 if i < len(counts) - 1 else 0), 10, f"piece v-{kind}"))
        x += width
    desc = ", ".join(f"{many} {kind}" for kind, many in counts)
    stretch = ' preserveAspectRatio="none"'
    return svg.picture("tally", 1000, 10, title="Gates by verdict", desc=desc, parts=parts, kind="tally", extra=stretch)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A gate as the forest draws it. `worse`, `low` and `high` are fractions turned so that + is worse."""

    group: str
    metric: str
    place: str
    kind: str
    word: str
    change: str
    worse: float | None
    low: float | None
    high: float | None
    margin: float | None


def _forest_axis(gates: Sequence[Gate]) -> Axis:
    """Wide enough for margins and intervals, but not wider than six margins: what goes further becomes an arrow."""
    margin = max([g.margin for g in gates if g.margin] or [0.05])
    cap = max(6 * margin, 0.3)
    seen = [x for g in gates for x in (g.worse, g.low, g.high) if x is not None]
    low = min(cap, max([-x for x in seen] + [margin])) * 1.06
    high = min(cap, max([*seen, 1.25 * margin])) * 1.06
    return Axis(-low, high, LEFT, RIGHT)


def _forest_frame(axis: Axis, bottom: float) -> list[str]:
    """Grid, zero line, the two directions."""
    parts = []
    for value in axis.ticks(9)[0]:
        x = axis.at(value)
        parts.append(svg.line(x, TOP - 8, x, bottom, "grid" if value else "zero"))
        parts.append(svg.text(x, bottom + 16, numbers.share(abs(value)), "tick num", "middle"))
    zero, middle = axis.at(0), (LEFT + RIGHT) / 2
    words = "change against the baseline, turned so that right is worse"
    return [
        *parts,
        svg.text(zero - 12, 20, "\N{LEFTWARDS ARROW} better", "dir", "end"),
        svg.text(zero + 12, 20, "worse \N{RIGHTWARDS ARROW}", "dir"),
        svg.text(0, 20, "gate", "head"),
        svg.text(WIDTH, 20, "change", "head", "end"),
        svg.text(middle, bottom + 36, words, "tick", "middle"),
    ]


def _interval(axis: Axis, gate: Gate, y: float) -> list[str]:
    """The bar between both bounds; a bound beyond the picture, or one that is missing, ends in an arrow."""
    if gate.low is None and gate.high is None:
        return []
    low, high = -math.inf if gate.low is None else gate.low, math.inf if gate.high is None else gate.high
    kind = f"bar v-{gate.kind}"
    parts = [svg.line(axis.at(low), y, axis.at(high), y, kind)]
    for value, inward in ((low, 5), (high, -5)):
        x = axis.at(value)
        if axis.low <= value <= axis.high:
            parts.append(svg.line(x, y - 4, x, y + 4, kind))
        else:
            parts.append(svg.polyline([(x + inward, y - 4), (x, y), (x + inward, y + 4)], kind))
    return parts


def _forest_row(axis: Axis, gate: Gate, y: float) -> str:
    """One gate: its mark and name, the zone of its margin, its interval, its change."""
    parts = [
        svg.mark(gate.kind, 9, y, 5),
        svg.text(24, y + 4, numbers.elide(gate.metric, 21), "name"),
        svg.text(PLACE, y + 4, numbers.elide(gate.place, 29), "tick"),
    ]
    limit = axis.at(gate.margin or 0)
    if gate.margin:
        parts.append(svg.rect(axis.at(0), y - ROW / 2, limit - axis.at(0), ROW, "zone"))
        parts.append(svg.line(limit, y - ROW / 2, limit, y + ROW / 2, "limit"))
    parts += _interval(axis, gate, y)
    if gate.worse is None:
        parts.append(svg.text(limit + 10, y + 4, f"not compared: {numbers.elide(gate.word, 20)}", "tick"))
    else:
        parts.append(svg.mark(gate.kind, axis.at(gate.worse), y, 5))
    parts.append(svg.text(WIDTH, y + 4, gate.change, "num", "end"))
    return svg.group(f"{gate.word}: {gate.metric}, {gate.place}, {gate.change}", parts)


def forest(gates: Sequence[Gate]) -> str:
    """All gates of a session in one picture: change, interval and margin, right being worse for every metric."""
    axis, y, rows = _forest_axis(gates), TOP, []
    for i, gate in enumerate(gates):
        if not i or gate.group != gates[i - 1].group:
            y += 8 if i else 0
            rows.append(svg.text(0, y + ROW / 2 + 4, numbers.elide(gate.group, 54), "group"))
            y += ROW
        rows.append(_forest_row(axis, gate, y + ROW / 2))
        y += ROW
    desc = "; ".join(f"{g.metric} {g.place}: {g.word}, change {g.change}" for g in gates)
    parts = [*_forest_frame(axis, y + 4), *rows]
    title = "Change of every gate against its baseline"
    return svg.picture("forest", WIDTH, y + 46, title=title, desc=desc, parts=parts, kind="forest")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Raw values of one side of a gate and their mean, as the gate gave it."""

    values: Sequence[float]
    mean: float | None


def strip(ident: str, title: str, *, kind: str, unit: str, old: Runs, new: Runs, limit: float | None) -> str:
    """Runs of the baseline above, new runs below, on one scale of raw values. `limit` is where the margin ends."""
    shown = [*old.values, *new.values, *(x for x in (old.mean, new.mean, limit) if x is not None)]
    low, high = min(shown), max(shown)
    pad = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
    axis = Axis(low - pad, high + pad, 84, 332)
    parts = []
    if old.mean is not None and limit is not None:
        a, b = sorted((axis.at(old.mean), axis.at(limit)))
        parts += [svg.rect(a, 6, b - a, 56, "zone"), svg.line(axis.at(limit), 6, axis.at(limit), 62, "limit")]
    parts.append(svg.line(axis.start, 62, axis.end, 62, "rule"))
    parts += _lane(axis, 20, "baseline", old, "old") + _lane(axis, 46, "new", new, f"new v-{kind}")
    values, step = axis.ticks(5)
    for value in values:
        x = axis.at(value)
        parts += [svg.line(x, 62, x, 66, "rule"), svg.text(x, 79, _tick(value, step), "tick num", "middle")]
    desc = f"baseline runs {_listing(old.values, unit)}; new runs {_listing(new.values, unit)}"
    return svg.picture(ident, 340, 84, title=title, desc=desc, parts=parts, kind="strip")


def _lane(axis: Axis, y: float, name: str, runs: Runs, kind: str) -> list[str]:
    """A dot for each run, shaken a little up and down so that equal ones stay visible, and a bar for the mean."""
    parts = [svg.text(0, y + 4, name, "tick"), svg.text(72, y + 4, str(len(runs.values)), "tick num", "end")]
    if runs.mean is not None:
        parts.append(svg.line(axis.at(runs.mean), y - 10, axis.at(runs.mean), y + 10, f"centre {kind}"))
    dots = (svg.dot(axis.at(v), y + (i % 3 - 1) * 3, 3.6, f"dot {kind}") for i, v in enumerate(runs.values))
    return [*parts, *dots]


def _tick(value: float, step: float) -> str:
    """A label with as many decimals as its step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 6 or abs(value) >= 1e9:
        return numbers.number(value)
    return f"{value:,.{decimals}f}".replace(",", numbers.THIN)


def _listing(values: Sequence[float], unit: str) -> str:
    return f"{', '.join(map(numbers.number, values))} {unit}" if values else "none"


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one server start gave at each concurrency: (concurrency, value)."""

    name: str
    style: int
    points: tuple[tuple[int, float], ...]


def curves(ident: str, title: str, unit: str, series: Sequence[Series]) -> str:
    """A value against concurrency (log scale, from zero): a line for each server start, so that their spread shows."""
    levels = sorted({c for s in series for c, _ in s.points})
    x = Axis(math.log2(levels[0]), math.log2(levels[-1]), 64, 448)
    y = Axis(0, (max(v for s in series for _, v in s.points) or 1.0) * 1.08, 160, 8)
    parts = [svg.text(x.end, 200, "concurrency", "tick", "end")]
    values, step = y.ticks(5)
    for value in values:
        parts.append(svg.line(x.start - 14, y.at(value), x.end + 6, y.at(value), "grid"))
        parts.append(svg.text(x.start - 22, y.at(value) + 4, _tick(value, step), "tick num", "end"))
    parts += [svg.text(x.at(math.log2(c)), 180, str(c), "tick num", "middle") for c in levels]
    for s in series:
        points = [(x.at(math.log2(c)), y.at(v)) for c, v in s.points]
        parts.append(svg.polyline(points, f"curve s{s.style % 4}"))
        parts += [svg.dot(a, b, 3.2, f"knot s{s.style % 4}") for a, b in points]
    told = (f"{s.name}: " + ", ".join(f"{numbers.number(v)} {unit} at {c}" for c, v in s.points) for s in series)
    return svg.picture(ident, 460, 208, title=title, desc="; ".join(told), parts=parts, kind="curves")


def bars(ident: str, title: str, items: Sequence[tuple[str, float]]) -> str:
    """Where the time went: a bar for each item on one scale."""
    longest = max(seconds for _, seconds in items) or 1.0
    parts = []
    for i, (name, seconds) in enumerate(items):
        y, length = 26.0 * i, 300 * seconds / longest
        parts.append(svg.text(0, y + 17, numbers.elide(name, 34), "tick"))
        parts.append(svg.rect(220, y + 6, length, 14, "length"))
        parts.append(svg.text(228 + length, y + 17, numbers.duration(seconds), "tick num"))
    desc = "; ".join(f"{name}: {numbers.duration(seconds)}" for name, seconds in items)
    return svg.picture(ident, 620, 26.0 * len(items), title=title, desc=desc, parts=parts, kind="bars")

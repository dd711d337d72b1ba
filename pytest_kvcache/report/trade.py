"""The trade of a precision in one picture: bytes of a token in the cache against the divergence that they cost. Places only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import numbers, svg
from .svg import Axis

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1060.0, 430.0, 76.0, 800.0, 18.0, 360.0
SMALLEST, LARGEST = 1e-9, 1e4  # nats: what one logarithmic scale can hold
LINE = 15.0  # of a label
ROOM = 36.0  # below the scale: the reference, which diverges by nothing, has no place on it
_LETTER = 7.2  # wide, so that a guess is never too narrow
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class Point:
    """An arm. `x` are its bytes a token, None where they are not known; `y` the mean divergence, None of the reference."""

    name: str
    kind: str
    x: float | None
    y: float | None
    low: float | None = None
    high: float | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Level:
    """A control: a line across."""

    name: str
    y: float


def _shown(value: float | None) -> bool:
    """Whether the scale can hold a value."""
    return value is not None and SMALLEST <= value <= LARGEST


def drawable(point: Point) -> bool:
    """Whether an arm has a place in the picture."""
    return point.y is None or _shown(point.y)


def sized(points: Sequence[Point]) -> bool:
    """Whether the bytes of all arms are known: without them an arm's place says nothing."""
    return all(p.x and 1e-6 < p.x < 1e12 for p in points if drawable(p))


def trade(ident: str, title: str, points: Sequence[Point], levels: Sequence[Level]) -> str:
    """Empty without an arm that diverges. By bytes where all are known, else in the order of the arms."""
    points, levels = [p for p in points if drawable(p)], [x for x in levels if _shown(x.y)]
    if not any(p.y for p in points):
        return ""
    by_size = sized(points)
    x = Axis(0, 1.08 * max(p.x or 0 for p in points) if by_size else len(points), LEFT, RIGHT)
    y = _scale([v for p in points for v in (p.y, p.low, p.high, p.limit)] + [level.y for level in levels])
    places = [(x.at((p.x or 0) if by_size else i + 0.5), _at(y, p.y) if p.y else BOTTOM) for i, p in enumerate(points)]
    words = "bytes a token takes in the cache" if by_size else "arms in their order (not the sizes of all caches are known)"
    parts = [*_frame(x if by_size else None, y, words), *_levels(y, levels)]
    parts += _labels(points, places, _taken(y, points, places, levels))
    parts += [svg.group(_told(p), _arm(y, p, at)) for p, at in zip(points, places, strict=True)]
    desc = "; ".join([*map(_told, points), *(f"{level.name}: {numbers.number(level.y)} nats" for level in levels)])
    return svg.picture(ident, WIDTH, HEIGHT, title=title, desc=desc, parts=parts, kind="trade")


def _scale(values: Sequence[float | None]) -> Axis:
    """From the logarithm of a value to its height, with room at both ends."""
    logs = [math.log10(v) for v in values if v is not None and _shown(v)]
    low, high = min(logs), max(logs)
    pad = max(0.12 * (high - low), 0.15)
    return Axis(low - pad, high + pad, BOTTOM - ROOM, TOP)


def _at(y: Axis, value: float) -> float:
    return y.at(math.log10(value))


def _frame(x: Axis | None, y: Axis, words: str) -> list[str]:
    parts = [svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, "rule"), svg.text(0, 8, "mean KLD, nats (log scale)", "head")]
    for value in _decades(y):
        at = _at(y, value)
        parts += [svg.line(LEFT, at, RIGHT, at, "grid"), svg.text(LEFT - 10, at + 4, numbers.brief(value), "tick num", "end")]
    for value in x.ticks(8)[0] if x else ():
        at = x.at(value) if x else 0
        parts += [svg.line(at, BOTTOM, at, BOTTOM + 5, "rule"), svg.text(at, BOTTOM + 20, numbers.brief(value), "tick num", "middle")]
    parts.append(svg.text((LEFT + RIGHT) / 2, BOTTOM + 44, words, "tick", "middle"))
    return [*parts, svg.text(LEFT, BOTTOM + 44, "\N{LEFTWARDS ARROW} smaller", "dir")] if x else parts


def _decades(y: Axis) -> list[float]:
    """Powers of ten; 2 and 5 times them too where there are few."""
    span = y.high - y.low
    step, factors = max(1, math.ceil(span / 6)), (1, 2, 5) if span < 2.2 else (1,)
    powers = range(math.floor(y.low / step) * step, math.ceil(y.high) + 1, step)
    return [v for p in powers for f in factors if y.low <= math.log10(v := f * 10.0**p) <= y.high]


def _levels(y: Axis, levels: Sequence[Level]) -> list[str]:
    """The controls, with their names right of the picture and clear of each other."""
    parts, below = [], math.inf
    for level in sorted(levels, key=lambda level: level.y):
        at = _at(y, level.y)
        words = below = min(at - 4, below - 2 * LINE - 4)
        parts.append(svg.line(LEFT, at, RIGHT, at, "level"))
        parts.append(svg.polyline([(RIGHT, at), (RIGHT + 12, words + 4), (RIGHT + 18, words + 4)], "lead"))
        parts.append(svg.text(RIGHT + 24, words, level.name, "name"))
        parts.append(svg.text(RIGHT + 24, words + LINE, f"{numbers.number(level.y)} nats", "tick"))
    return parts


def _arm(y: Axis, p: Point, at: tuple[float, float]) -> list[str]:
    """Its bounds as a bar, its limit as a tick above, its verdict's shape."""
    px, py = at
    if p.y is None:
        return [svg.line(px, BOTTOM, px, BOTTOM - 10, "zero"), svg.dot(px, BOTTOM, 5, "dot old")]
    kind, parts = f"bar v-{p.kind}" if p.kind else "bar ungated", []
    if _shown(p.limit):
        limit = _at(y, p.limit or 0)
        parts += [svg.line(px, py, px, limit, "lead"), svg.line(px - 9, limit, px + 9, limit, "cap")]
    if p.low is not None or p.high is not None:
        ends = [(_end(y, p.low, y.start), 5, p.low), (_end(y, p.high, y.end), -5, p.high)]
        parts.append(svg.line(px, ends[0][0], px, ends[1][0], kind))
        for end, away, value in ends:
            closed = [(px - 6, end), (px + 6, end)]
            beyond = [(px - 4, end - away), (px, end), (px + 4, end - away)]
            parts.append(svg.polyline(closed if _shown(value) else beyond, kind))
    return [*parts, svg.mark(p.kind, px, py, 5) if p.kind else svg.dot(px, py, 5, "piece ungated")]


def _end(y: Axis, value: float | None, edge: float) -> float:
    return _at(y, value) if value is not None and _shown(value) else edge


def _told(p: Point) -> str:
    limit = "" if p.limit is None else f", limit {numbers.number(p.limit)}"
    size = "" if p.x is None else f", {numbers.brief(p.x)} bytes a token"
    return f"{p.name}: {_value(p)}{limit}{size}" + (f", {p.kind}" if p.kind else "")


def _value(p: Point) -> str:
    return "the reference" if p.y is None else f"{numbers.number(p.y)} nats"


def _taken(y: Axis, points: Sequence[Point], places: Sequence[tuple[float, float]], levels: Sequence[Level]) -> list[Box]:
    """Where no label may stand: marks, bars, limits, the lines of the controls."""
    boxes = [(LEFT, _at(y, level.y) - 1, RIGHT, _at(y, level.y) + 1) for level in levels]
    for p, (px, py) in zip(points, places, strict=True):
        boxes.append((px - 8, py - 8, px + 8, py + 8))
        if p.y is None:
            continue
        boxes += [(px - 7, _end(y, p.high, TOP), px + 7, _end(y, p.low, y.start))] if p.low is not None or p.high is not None else []
        boxes += [(px - 10, _at(y, p.limit) - 3, px + 10, _at(y, p.limit) + 3)] if p.limit and _shown(p.limit) else []
    return boxes


def _labels(points: Sequence[Point], places: Sequence[tuple[float, float]], taken: list[Box]) -> list[str]:
    """A name and a figure beside each mark, at the nearest place that is free; one far away gets a line to its mark."""
    parts = []
    for p, (px, py) in zip(points, places, strict=True):
        name, value = numbers.elide(p.name, 24), _value(p)
        width = _LETTER * max(len(name), len(value)) + 4
        free = next(_free(px, py, width, taken), None)
        if free is None:
            continue  # its mark is told by its title, and by the table
        left, top, far = free
        taken.append((left, top, left + width, top + 2 * LINE))
        edge, anchor = (left, "start") if left > px else (left + width, "end")
        if far:
            parts.append(svg.line(px, py, edge + (-3 if left > px else 3), top + LINE, "lead"))
        parts += [svg.text(edge, top + 11, name, "name", anchor), svg.text(edge, top + 11 + LINE, value, "tick", anchor)]
    return parts


_AWAY = sorted(((out, up) for out in (15, 40, 80, 140, 220, 320) for up in range(-320, 321, 5)), key=lambda at: (at[0] + abs(at[1]), at))


def _free(px: float, py: float, width: float, taken: Sequence[Box]) -> Iterator[tuple[float, float, bool]]:
    """Places for a label from the nearest on, right of the mark before left of it; whether one is far."""
    for out, up in _AWAY:
        for left in (px + out, px - out - width):
            top = py - LINE + up
            inside = left >= LEFT + 4 and left + width <= RIGHT - 4 and top >= TOP - 4 and top + 2 * LINE <= BOTTOM - 2
            if inside and not any(left < r and left + width > a and top < b and top + 2 * LINE > t for a, t, r, b in taken):
                yield left, top, abs(up) > LINE or out > 15

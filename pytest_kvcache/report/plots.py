"""Pictures of a session as inline SVG: pure functions from numbers to text, no script, colours by the page's classes.

Every verdict has its own shape as well as its own colour, so that nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from . import numbers

SHAPES = {
    "regression": '<path d="M0-1.3 1.3 0 0 1.3-1.3 0z"/>',
    "invalid": '<path d="M-.62-1 0-.38.62-1 1-.62.38 0 1 .62.62 1 0 .38-.62 1-1 .62-.38 0-1-.62z"/>',
    "no-baseline": '<circle r=".82" class="hollow"/>',
    "inconclusive": '<circle r=".82" class="hollow"/><path d="M0-.82a.82.82 0 0 1 0 1.64z"/>',
    "improvement": '<path d="M-.36-1.05h.72v.69h.69v.72h-.69v.69h-.72v-.69h-.69v-.72h.69z"/>',
    "pass": '<circle r=".98"/>',
}


def _n(x: float) -> str:
    """A coordinate: at most two decimals, so that equal pictures are equal text."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(0.0, width))}" height="{_n(height)}" class="{kind}"/>'


def _svg(ident: str, width: float, height: float, title: str, desc: str, body: Sequence[str], kind: str) -> str:
    """A figure with a name and a description for those who do not see it."""
    names = f"<title id={quoteattr(ident + '-t')}>{escape(title)}</title><desc id={quoteattr(ident + '-d')}>{escape(desc)}</desc>"
    head = f'<svg class="{kind}" viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-labelledby={quoteattr(ident + "-t")}'
    return f"{head} aria-describedby={quoteattr(ident + '-d')}>{names}{''.join(body)}</svg>"


def mark(kind: str, x: float, y: float, radius: float) -> str:
    """A verdict's shape at a place in a picture."""
    return f'<g class="mark v-{kind}" transform="translate({_n(x)} {_n(y)}) scale({_n(radius)})">{SHAPES[kind]}</g>'


def glyph(kind: str) -> str:
    """A verdict's shape beside its word in the text."""
    return f'<svg class="glyph" viewBox="-1.4 -1.4 2.8 2.8" aria-hidden="true"><g class="mark v-{kind}">{SHAPES[kind]}</g></svg>'


def tally(counts: Sequence[tuple[str, int]]) -> str:
    """One bar for the session, a piece for each verdict as wide as its share of the gates."""
    total, x, parts = sum(n for _, n in counts), 0.0, []
    for kind, n in counts:
        width = 1000.0 * n / total
        parts.append(_rect(x, 0, width - 3, 10, f"piece v-{kind}"))
        x += width
    words = ", ".join(f"{n} {kind}" for kind, n in counts)
    svg = _svg("tally", 1000, 10, "Gates by verdict", words, parts, "tally")
    return svg.replace("<svg ", '<svg preserveAspectRatio="none" ', 1)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A gate as drawn. `worse`, `low` and `high` are fractions turned so that + is worse."""

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


WIDTH, LEFT, RIGHT, ROW, TOP = 1060.0, 372.0, 940.0, 26.0, 46.0


@dataclass(frozen=True)
class Axis:
    """A linear map from values to places, with what lies outside held at the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)


def _step(span: float, ticks: int) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that gives at most `ticks` steps in `span`."""
    rough = span / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)


def _forest_axis(gates: Sequence[Gate]) -> Axis:
    """Wide enough for every margin and interval, but no wider than six margins: what goes further is drawn as an arrow."""
    margin = max([g.margin for g in gates if g.margin] or [0.05])
    cap = max(6 * margin, 0.3)
    seen = [x for g in gates for x in (g.worse, g.low, g.high) if x is not None]
    low = min(cap, max([-x for x in seen] + [margin])) * 1.06
    high = min(cap, max([*seen, 1.25 * margin])) * 1.06
    return Axis(-low, high, LEFT, RIGHT)


def _forest_frame(axis: Axis, bottom: float) -> list[str]:
    """Grid, zero line and the two directions."""
    step = _step(axis.high - axis.low, 9)
    parts = []
    for i in range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1):
        x = axis.at(i * step)
        parts.append(_line(x, TOP - 8, x, bottom, "zero" if i == 0 else "grid"))
        parts.append(_text(x, bottom + 16, numbers.share(abs(i * step)), "tick num", "middle"))
    zero = axis.at(0)
    parts.append(_text(zero - 12, 20, "\N{LEFTWARDS ARROW} better", "dir", "end"))
    parts.append(_text(zero + 12, 20, "worse \N{RIGHTWARDS ARROW}", "dir"))
    parts.append(_text(0, 20, "gate", "head"))
    parts.append(_text(WIDTH, 20, "change", "head", "end"))
    parts.append(_text((LEFT + RIGHT) / 2, bottom + 36, "change against the baseline, turned so that right is worse", "tick", "middle"))
    return parts


def _interval(axis: Axis, gate: Gate, y: float) -> list[str]:
    """The bar between both bounds; a bound beyond the picture, or missing, ends in an arrow."""
    parts = []
    low, high = (axis.low - 1 if gate.low is None else gate.low), (axis.high + 1 if gate.high is None else gate.high)
    if gate.low is not None or gate.high is not None:
        a, b = axis.at(low), axis.at(high)
        parts.append(_line(a, y, b, y, f"bar v-{gate.kind}"))
        for x, value, way in ((a, low, -1), (b, high, 1)):
            if axis.low <= value <= axis.high:
                parts.append(_line(x, y - 4, x, y + 4, f"bar v-{gate.kind}"))
            else:
                parts.append(f'<path d="M{_n(x - 5 * way)} {_n(y - 4)} {_n(x)} {_n(y)} {_n(x - 5 * way)} {_n(y + 4)}" class="bar open v-{gate.kind}"/>')
    return parts


def _forest_row(axis: Axis, gate: Gate, y: float) -> str:
    """One gate: its mark and name, the zone of its margin, its interval, its change."""
    parts = [f"<title>{escape(f'{gate.word}: {gate.metric}, {gate.place}, {gate.change}')}</title>", mark(gate.kind, 9, y, 5)]
    metric = numbers.elide(gate.metric, 22)
    parts.append(_text(24, y + 4, metric, "name"))
    parts.append(_text(176, y + 4, numbers.elide(gate.place, 30), "tick"))
    if gate.margin:
        parts.append(_rect(axis.at(0), y - ROW / 2, axis.at(gate.margin) - axis.at(0), ROW, "zone"))
        parts.append(_line(axis.at(gate.margin), y - ROW / 2, axis.at(gate.margin), y + ROW / 2, "limit"))
    parts += _interval(axis, gate, y)
    if gate.worse is None:
        parts.append(_text(axis.at(gate.margin or 0) + 10, y + 4, f"not compared: {gate.word}", "tick"))
    else:
        parts.append(mark(gate.kind, axis.at(gate.worse), y, 5))
    parts.append(_text(WIDTH, y + 4, gate.change, "num", "end"))
    return f"<g>{''.join(parts)}</g>"


def forest(gates: Sequence[Gate]) -> str:
    """All gates of a session in one picture: change, interval and margin, right being worse for every metric."""
    axis, y, rows, group = _forest_axis(gates), TOP, [], None
    for gate in gates:
        if gate.group != group:
            group = gate.group
            y += 8 if rows else 0
            rows.append(_text(0, y + ROW / 2 + 4, numbers.elide(group, 56), "group"))
            y += ROW
        rows.append(_forest_row(axis, gate, y + ROW / 2))
        y += ROW
    desc = "; ".join(f"{g.metric} {g.place}: {g.word}, change {g.change}" for g in gates)
    body = [*_forest_frame(axis, y + 4), *rows]
    return _svg("forest", WIDTH, y + 46, "Change of every gate against its baseline", desc, body, "forest")


def _strip_axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
    return Axis(low - pad, high + pad, start, end)


def _dots(axis: Axis, values: Sequence[float], y: float, kind: str) -> list[str]:
    """A dot a run, in the order of the runs, shaken a little up and down so that equal ones stay visible."""
    return [f'<circle cx="{_n(axis.at(v))}" cy="{_n(y + (i % 3 - 1) * 3)}" r="3.6" class="{kind}"/>' for i, v in enumerate(values)]


def strip(
    ident: str, title: str, *, kind: str, unit: str, old: Sequence[float], new: Sequence[float],
    baseline: float | None, value: float | None, limit: float | None,
) -> str:  # fmt: skip
    """Runs of the baseline above, new runs below, on one scale of raw values. `limit` is where the margin ends."""
    ends = [x for x in (baseline, value, limit) if x is not None]
    axis = _strip_axis([*old, *new, *ends], 84, 332)
    parts = [_line(axis.start, 62, axis.end, 62, "rule")]
    if baseline is not None and limit is not None:
        a, b = sorted((axis.at(baseline), axis.at(limit)))
        parts += [_rect(a, 6, b - a, 56, "zone"), _line(axis.at(limit), 6, axis.at(limit), 62, "limit")]
    for y, name, runs, centre, colour in ((20, "baseline", old, baseline, "old"), (46, "new", new, value, f"new v-{kind}")):
        parts.append(_text(0, y + 4, name, "tick"))
        parts.append(_text(72, y + 4, str(len(runs)), "tick num", "end"))
        if centre is not None:
            parts.append(_line(axis.at(centre), y - 10, axis.at(centre), y + 10, f"centre {colour}"))
        parts += _dots(axis, runs, y, f"dot {colour}")
    step = _step(axis.high - axis.low, 3)
    for i in range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1):
        parts += [_line(axis.at(i * step), 62, axis.at(i * step), 66, "rule"), _text(axis.at(i * step), 79, _tick(i * step, step), "tick num", "middle")]
    desc = f"baseline runs {_listing(old, unit)}; new runs {_listing(new, unit)}"
    return _svg(ident, 340, 84, title, desc, parts, "strip")


def _tick(value: float, step: float) -> str:
    """A label with as many decimals as its step needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}".replace(",", numbers.THIN) if decimals < 7 and abs(value) < 1e9 else numbers.number(value)


def _listing(values: Sequence[float], unit: str) -> str:
    return f"{', '.join(map(numbers.number, values))} {unit}" if values else "none"


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one server start gave at each concurrency: (concurrency, value)."""

    name: str
    style: int
    points: tuple[tuple[int, float], ...]


def _curve_frame(x: Axis, y: Axis, levels: Sequence[int]) -> list[str]:
    step = _step(y.high, 5)
    parts = [_text(x.end, 200, "concurrency", "tick", "end")]
    for i in range(math.floor(y.high / step) + 1):
        parts += [_line(x.start - 14, y.at(i * step), x.end + 6, y.at(i * step), "grid"), _text(x.start - 22, y.at(i * step) + 4, _tick(i * step, step), "tick num", "end")]
    parts += [_text(x.at(math.log2(c)), 180, str(c), "tick num", "middle") for c in levels]
    return parts


def curves(ident: str, title: str, unit: str, series: Sequence[Series]) -> str:
    """A value against concurrency (log scale, from zero): a line for each server start, so that their spread shows."""
    levels = sorted({c for s in series for c, _ in s.points})
    top = max([v for s in series for _, v in s.points] + [0.0]) or 1.0
    x = Axis(math.log2(levels[0]), math.log2(levels[-1]), 64, 448)
    y = Axis(0, top * 1.08, 160, 8)
    parts = _curve_frame(x, y, levels)
    for s in series:
        places = [(x.at(math.log2(c)), y.at(v)) for c, v in s.points]
        path = " ".join(f"{_n(a)},{_n(b)}" for a, b in places)
        parts.append(f'<polyline points="{path}" class="curve s{s.style % 4}"/>')
        parts += [f'<circle cx="{_n(a)}" cy="{_n(b)}" r="3.2" class="knot s{s.style % 4}"/>' for a, b in places]
    desc = "; ".join(f"{s.name}: " + ", ".join(f"{numbers.number(v)} {unit} at {c}" for c, v in s.points) for s in series)
    return _svg(ident, 460, 208, title, desc, parts, "curves")


def bars(ident: str, title: str, items: Sequence[tuple[str, float]]) -> str:
    """Where the time went: a bar for each item, longest scale shared."""
    longest = max([v for _, v in items] + [0.0]) or 1.0
    parts = []
    for i, (name, seconds) in enumerate(items):
        y = 26.0 * i
        parts += [_text(228, y + 17, numbers.elide(name, 36), "tick", "end"), _rect(240, y + 6, 300 * seconds / longest, 14, "length")]
        parts.append(_text(248 + 300 * seconds / longest, y + 17, numbers.duration(seconds), "tick num"))
    desc = "; ".join(f"{name}: {numbers.duration(seconds)}" for name, seconds in items)
    return _svg(ident, 640, 26.0 * len(items), title, desc, parts, "bars")

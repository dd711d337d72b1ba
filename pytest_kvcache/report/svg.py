"""The drawing kit: elements of inline SVG as text, colours left to the classes of the page.

Every verdict has its own shape as well as its own colour, so that nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Drawn around the origin with a radius of about 1. The kinds are the verdicts, and a baseline that was stored just now.
SHAPES = {
    "regression": '<path d="M0-1.3 1.3 0 0 1.3-1.3 0z"/>',
    "invalid": '<path d="M-.62-1 0-.38.62-1 1-.62.38 0 1 .62.62 1 0 .38-.62 1-1 .62-.38 0-1-.62z"/>',
    "no-baseline": '<circle r=".82" class="hollow"/>',
    "inconclusive": '<circle r=".82" class="hollow"/><path d="M0-.82a.82.82 0 0 1 0 1.64z"/>',
    "recorded": '<circle r=".82" class="hollow"/><circle r=".38"/>',
    "improvement": '<path d="M-.36-1.05h.72v.69h.69v.72h-.69v.69h-.72v-.69h-.69v-.72h.69z"/>',
    "pass": '<circle r=".98"/>',
}


def n(x: float) -> str:
    """A coordinate: at most two decimals, so that equal pictures are equal text."""
    short = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{n(x)}" y="{n(y)}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{n(x1)}" y1="{n(y1)}" x2="{n(x2)}" y2="{n(y2)}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{n(x)}" y="{n(y)}" width="{n(max(0.0, width))}" height="{n(height)}" class="{kind}"/>'


def dot(x: float, y: float, radius: float, kind: str) -> str:
    return f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" class="{kind}"/>'


def polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{n(x)},{n(y)}" for x, y in points)}" class="{kind}"/>'


def group(title: str, parts: Iterable[str]) -> str:
    """Parts that belong together, with a title to show when pointed at."""
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def picture(ident: str, width: float, height: float, *, title: str, desc: str, parts: Iterable[str], kind: str, extra: str = "") -> str:
    """A whole figure, with a name and a description for those who do not see it. `ident` is unique on the page."""
    named = f'role="img" aria-labelledby="{ident}-t" aria-describedby="{ident}-d"'
    words = f'<title id="{ident}-t">{escape(title)}</title><desc id="{ident}-d">{escape(desc)}</desc>'
    head = f'<svg class="{kind}" viewBox="0 0 {n(width)} {n(height)}" {named}{extra}>'
    return f"{head}{words}{''.join(parts)}</svg>"


def mark(kind: str, x: float, y: float, radius: float) -> str:
    """A verdict's shape at a place in a picture."""
    where = f"translate({n(x)} {n(y)}) scale({n(radius)})"
    return f'<g class="mark v-{kind}" transform="{where}">{SHAPES[kind]}</g>'


def glyph(kind: str) -> str:
    """A verdict's shape beside its word in the text."""
    shape = f'<g class="mark v-{kind}">{SHAPES[kind]}</g>'
    return f'<svg class="glyph" viewBox="-1.4 -1.4 2.8 2.8" aria-hidden="true">{shape}</svg>'


@dataclass(frozen=True)
class Axis:
    """A linear map from values to coordinates; what lies outside is held at the edge."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int) -> tuple[list[float], float]:
        """At most about `most` round values on the axis, and the step between them: 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [i * step for i in range(first, last + 1)], step

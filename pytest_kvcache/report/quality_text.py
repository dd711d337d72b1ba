"""What precisions cost in quality, for the end of a session in a terminal: a table for each text. Formats only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.text import one_line
from .numbers import number
from .scored import FIGURES, Row, Scored, cell, engine_of, size, texts_of
from .terminal import plain

SHOWN = {m: FIGURES[m].removeprefix("KLD ").removeprefix("ppl ") for m in ("ppl", "ppl_ratio", "kld.mean", "kld.p99", "top1")}
LONGEST_NAME = 32


def quality_table(blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of all texts of some blocks; none without a text."""
    found = [(str(block["id"]), text) for block in blocks for text in texts_of(block)]
    engines = {engine_of(name) for name, _ in found}
    return [line for name, text in found for line in _table(text, engine_of(name) if len(engines) > 1 else "")]


def _table(text: Scored, engine: str) -> list[str]:
    windows = f"{number(text.windows)} window{'' if text.windows == 1 else 's'}"
    what = ", ".join((text.corpus or "text unknown", windows, f"{number(text.tokens)} tokens scored"))
    head = f"{engine + ': ' if engine else ''}{text.scenario} ({what})"
    rows = [["arm", *SHOWN.values(), "bytes/token"], *map(_cells, text.arms), *map(_cells, text.controls.values())]
    cells = [[one_line(plain(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  " + "  ".join(_padded(row, widths)).rstrip() for row in cells]
    for place, arm in enumerate(text.arms, 1):
        lines[place] += f"  invalid: {arm.problem.partition(chr(10))[0]}" if arm.problem else ""
    note = [f"  KLD {text.note}"] if text.note else []
    return [one_line(plain(line)) for line in (head, *lines, *note)]


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, figures to the right."""
    return [f"{row[0]:{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]


def _cells(row: Row) -> list[str]:
    name = row.name if len(row.name) <= LONGEST_NAME else row.name[: LONGEST_NAME - 3] + "..."
    return [name, *(cell(row, metric) for metric in SHOWN), size(row)]

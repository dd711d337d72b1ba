"""Copies of servers' logs for a report: nothing secret in them, and in little memory, since a log may have 100 MB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ..core.masking import Span, cut, known_spans, spans
from ..core.spec import UserError

PIECE = 2**20  # characters that are looked at together
HELD_BACK = 2**16  # characters on either side of a border that are looked at with what is beyond it: a secret may lie across


def copy_masked(source: Path, target: Path, known: Sequence[str]) -> None:
    """Every file below `source` to the same place below `target`, without the `known` values and whatever else is secret.

    Bytes that are not UTF-8 stay as they are. UserError when a log cannot be read or its copy not be written.
    """
    for log in sorted(p for p in source.rglob("*") if p.is_file()):
        copy = target / log.relative_to(source)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with (
                log.open(encoding="utf-8", errors="surrogateescape", newline="") as old,
                copy.open("w", encoding="utf-8", errors="surrogateescape", newline="") as new,
            ):
                new.writelines(_masked(old, known))
        except OSError as e:
            raise UserError(f"{copy}: the server's log could not be copied ({e.strerror or e})") from e


def _masked(log: IO[str], known: Sequence[str]) -> Iterator[str]:
    """The text in parts. What was given away last is looked at again before what follows: a name there may announce a secret here."""
    text, given, more = "", 0, True
    while more:
        piece = log.read(PIECE)
        text, more = text + piece, bool(piece)
        if more and len(text) - given <= 2 * HELD_BACK:
            continue
        found = sorted([*known_spans(text, known), *spans(text)])
        border = _border(text, given, found) if more else len(text)
        yield cut(text[given:border], [(max(begin, given) - given, end - given) for begin, end in found if given < end <= border])
        text, given = text[max(0, border - HELD_BACK) :], min(border, HELD_BACK)


def _border(text: str, given: int, found: Sequence[Span]) -> int:
    """Up to where a text can be given away: to the end of a line if it can be, never inside one of the secrets `found` (in order)."""
    last = len(text) - HELD_BACK
    border = text.rfind("\n", given, last) + 1 or last
    for begin, end in reversed(found):
        border = begin if begin < border < end else border
    if border <= given:  # secrets from the beginning on
        border = last
        for begin, end in found:
            border = end if begin < border < end else border
    return border

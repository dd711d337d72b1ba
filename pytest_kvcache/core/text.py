"""Text of unknown origin (a log, a file, another process) as it may be shown to a person. Pure."""

from __future__ import annotations

import unicodedata


def one_line(text: str) -> str:
    """Every character that is not itself on a line of a terminal (line ends, escapes, marks that turn the direction) as its escape.

    Tabs and other widths of space become spaces.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    return " " if c == "\t" or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()

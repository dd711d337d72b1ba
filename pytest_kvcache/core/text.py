"""Text of unknown origin (a log, a file, another process) as it may be shown to a person. Pure."""

from __future__ import annotations

import unicodedata


def escaped(text: str) -> str:
    """Every character that does not show itself on one line as its escape, so that two texts that differ look different."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def one_line(text: str) -> str:
    """Every character that is not itself on a line of a terminal (line ends, escapes, marks that turn the direction) as its escape.

    Tabs and other widths of space become spaces.
    """
    return text if text.isprintable() else escaped("".join(" " if c == "\t" or unicodedata.category(c) == "Zs" else c for c in text))


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode()

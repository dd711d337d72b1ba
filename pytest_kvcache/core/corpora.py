"""The text that perplexity is computed on, the rows of files that hold one, and WikiText-2 in both its published forms. Pure.

Published figures score two texts under one name. llama.cpp's perplexity tool scores the file `wiki.test.raw` as it is. GPTQ and who follows
it (AWQ, QServe; `get_wikitext2` in datautils.py of IST-DASLab/gptq) join the rows of the Hugging Face data set by an empty line; such a row
is a line of the file with its line end, or "" for a line of blanks (`_generate_examples` in the data set's wikitext.py). Rows made so of
the file are as many (4,358) and as large (1,305,088 bytes with an offset of 4 each) as the data set's card says of its test split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .text import one_line

FIELD = "text"  # what holds the text of a row unless another field is named
MAX_BYTES = 256 * 2**20  # of a file, and of the text in it: 200 times WikiText-2, and days of scoring
SEPARATOR = "\n\n"
WIKITEXT2 = "wikitext2"
WIKITEXT2_DIGEST = "sha256:173c87a53759e020"  # of wiki.test.raw (1,290,590 bytes), as discussions 288 and 334 of ik_llama.cpp record it
_BLANK = " \n"  # every line of blanks in the WikiText files
_SHOWN = 5  # fields of a row that a message names


class UnfitCorpus(Exception):
    """What is asked gives no text; the message is one line for the user, without what was asked."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text to score and what it is called."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """Which text it is: the first 64 bits of the SHA-256 of its UTF-8."""
        return "sha256:" + hashlib.sha256(self.text.encode()).hexdigest()[:16]


def wikitext_rows(raw: str) -> list[str]:
    """The rows that the Hugging Face data set has of a WikiText file: its lines with their ends, "" for a line of blanks."""
    lines = raw.split("\n")  # not splitlines(): it also splits at characters that are text here
    whole = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    return [line if line.strip() else "" for line in whole]


def wikitext_raw(rows: Iterable[str]) -> str:
    """The WikiText file that has these rows: the inverse of `wikitext_rows`."""
    return "".join([row or _BLANK for row in rows])


def as_rows(raw: str) -> str:
    """The text that GPTQ's protocol scores, from a WikiText file: its rows joined by an empty line."""
    return SEPARATOR.join(wikitext_rows(raw))


def text_of(content: bytes) -> str:
    """UTF-8, strictly and as it stands: line ends are text, a BOM is none. UnfitCorpus with the offset of the first byte of neither."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        raise UnfitCorpus(f"not UTF-8 text ({e.reason} at byte {e.start})") from e


def rows_of_lines(text: str, field: str) -> list[str]:
    """The texts of JSON lines: objects with a field (FIELD where none is named), or plain strings. Empty lines are none."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_row(_parsed(line, number), field, f"line {number}"))
    return found


def rows_of_array(text: str, field: str) -> list[str]:
    """The texts of a JSON array, whose items are as in `rows_of_lines`."""
    parsed = _parsed(text, 1)
    if not isinstance(parsed, list):
        raise UnfitCorpus("no JSON array, but " + _kind(parsed))
    return [_row(value, field, f"item {number}") for number, value in enumerate(parsed, 1)]


def row_text(value: object, where: str) -> str:
    """A value that must be text; UnfitCorpus saying where it is not."""
    if not isinstance(value, str):
        raise UnfitCorpus(f"{where} is no text, but {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise UnfitCorpus(f"{where} has half of a surrogate pair at character {e.start}, which is no text") from e
    return value


def joined(rows: Iterable[str]) -> str:
    """One text of many, an empty line between them. UnfitCorpus once it grows beyond MAX_BYTES: packed rows may be any size."""
    found, size = [], 0
    for row in rows:
        size += len(row) + len(SEPARATOR)  # characters: at most as many as bytes
        if size > MAX_BYTES:
            raise UnfitCorpus(too_large())
        found.append(row)
    return SEPARATOR.join(found)


def too_large() -> str:
    return f"more than {MAX_BYTES // 2**20} MiB, which would take days to score; name a part of it"


def no_field(where: str, field: str, others: Iterable[str]) -> UnfitCorpus:
    """The complaint about a row or a table without a field, with the cure where there is one."""
    names = [one_line(name[:40]) for name in others]
    has = f" but {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}; name one by PATH#NAME" if names else ""
    return UnfitCorpus(f"{where} has no {one_line(field)}{has}")


def _parsed(text: str, first: int) -> Any:
    """The JSON value of a text whose first line has this number in its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise UnfitCorpus(f"line {first + e.lineno - 1} is no JSON ({e.msg} at column {e.colno})") from e
    except RecursionError as e:
        raise UnfitCorpus(f"the JSON from line {first} on is nested too deep") from e
    except ValueError as e:  # a number of thousands of digits
        raise UnfitCorpus(f"the JSON from line {first} on cannot be read ({one_line(str(e)[:80])})") from e


def _row(value: object, field: str, where: str) -> str:
    name = field or FIELD
    if isinstance(value, dict):
        if name not in value:
            raise no_field(where, name, value)
        return row_text(value[name], f"{one_line(name)} of {where}")
    if field and isinstance(value, str):
        raise UnfitCorpus(f"{where} is a string, which has no fields; leave #{one_line(field)} out")
    return row_text(value, where)


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    known = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return known.get(type(value), type(value).__name__)

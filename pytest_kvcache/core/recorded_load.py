"""Traffic that was recorded: public traces as rows, and requests of the same lengths, moments and shared prefixes. Pure.

Two formats, told apart by content: JSON lines as Mooncake publishes them (`timestamp` in ms, `input_length`, `output_length`, and in all
lines or in none `hash_ids`, one for each block of 512 tokens of the prompt), and Azure's CSV of 2023 (`TIMESTAMP`, `ContextTokens`,
`GeneratedTokens`). They are read strictly: what is damaged, negative or out of order is refused with its line, never mended.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from .conversations import Ids, Wording, worded
from .spec import SpecError, UserError
from .text import one_line

if TYPE_CHECKING:
    from .workload import Request

BLOCK = 512  # tokens that one hash of a Mooncake trace stands for
MOST_TOKENS = 10**8  # of a prompt or an answer; more is damage
LAST_MS = 2**53  # whole ms are exact up to here
MOONCAKE = ("timestamp", "input_length", "output_length")
HASHES = "hash_ids"
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_DIGITS = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A recorded request: seconds after the first arrival (to a microsecond), tokens of its prompt and its answer, and the hashes of the
    prompt's blocks of BLOCK tokens, the last of which may not be full; () where the trace has none."""

    at_s: float
    isl: int
    osl: int
    hashes: tuple[int, ...] = ()


class _Damage(Exception):
    """What is wrong with a line."""


_Line = tuple[int, int, int, tuple[int, ...] | None]  # arrival in microseconds, input and output tokens, hashes


# -- reading ------------------------------------------------------------------------------------------------------------


def rows(text: str, name: str) -> tuple[Row, ...]:
    """The requests of a trace in their order. UserError (`name: line N: what`) for a text that is no whole trace of either format."""
    lines = [(n, line) for n, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1) if line.strip()]
    found: list[_Line] = []
    read: Callable[[str], _Line] | None = None
    for number, line in lines:
        try:
            if read is None:
                read, is_head = _format(line)
                if is_head:
                    continue
            found.append(read(line))
            if len(found) > 1:
                _follows(found[-1], found[-2])
        except _Damage as e:
            raise UserError(f"{one_line(name)}: line {number}: {e}") from e
    if not found:
        raise UserError(f"{one_line(name)}: no request in it")
    return tuple(Row(at_s=(at - found[0][0]) / 1e6, isl=isl, osl=osl, hashes=hashes or ()) for at, isl, osl, hashes in found)


def _format(first: str) -> tuple[Callable[[str], _Line], bool]:
    """How the lines of a trace are read, and whether the first is a head."""
    if first.lstrip().startswith("{"):
        return _mooncake, False
    head = [cell.strip() for cell in _cells(first)]
    if not set(AZURE) <= set(head):
        raise _Damage(f"neither a JSON object with {', '.join(MOONCAKE)} nor the CSV head {','.join(AZURE)}: {_shown(first.strip())}")
    at, isl, osl = map(head.index, AZURE)

    def read(line: str) -> _Line:
        cells = _cells(line)
        if len(cells) != len(head):
            raise _Damage(f"{len(cells)} values where the head has {len(head)}: {_shown(line.strip())}")
        return _microseconds(cells[at].strip()), _number(cells[isl], AZURE[1]), _number(cells[osl], AZURE[2]), None

    return read, True


def _follows(line: _Line, before: _Line) -> None:
    if line[0] < before[0]:
        # Times that jump back are of two recordings, or of one with lines lost: an order made here would hide it.
        raise _Damage("arrives before the request above it; sort the trace by time if that is meant")
    if (line[3] is None) != (before[3] is None):
        raise _Damage(f"has {'no ' if line[3] is None else ''}{HASHES}, unlike the lines above it")


def _not_finite(name: str) -> NoReturn:
    raise _Damage(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_not_finite)


def _mooncake(line: str) -> _Line:
    try:
        row = _DECODER.decode(line.strip())
    except json.JSONDecodeError as e:
        raise _Damage(f"no JSON ({e.msg} at column {e.colno})") from e
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, a deep nest
        raise _Damage(f"no JSON that can be read ({one_line(str(e)[:80])})") from e
    if not isinstance(row, dict):
        raise _Damage(f"no JSON object: {_shown(row)}")
    if missing := [field for field in MOONCAKE if field not in row]:
        raise _Damage(f"has no {missing[0]}")
    at, isl, osl = (row[field] for field in MOONCAKE)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < LAST_MS:
        raise _Damage(f"timestamp is {_shown(at)}, no time in ms from 0 on")
    tokens = _tokens(isl, MOONCAKE[1])
    return round(at * 1000), tokens, _tokens(osl, MOONCAKE[2]), _hashes(row[HASHES], tokens) if HASHES in row else None


def _hashes(value: Any, tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(h) is not int or h < 0 for h in value):
        raise _Damage(f"{HASHES} is no list of whole numbers from 0 on: {_shown(value)}")
    if len(value) != -(-tokens // BLOCK):
        raise _Damage(f"{len(value)} {HASHES} where {tokens} tokens are {-(-tokens // BLOCK)} blocks of {BLOCK}")
    return tuple(value)


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r")], strict=True))
    except csv.Error as e:
        raise _Damage(f"no CSV ({one_line(str(e))}): {_shown(line.strip())}") from e


def _number(cell: str, field: str) -> int:
    digits = cell.strip()
    return _tokens(int(digits) if _DIGITS.fullmatch(digits) else digits, field)


def _tokens(value: Any, field: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise _Damage(f"{field} is {_shown(value)}, no number of tokens from 0 to {MOST_TOKENS}")
    return value


def _microseconds(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)  # digits beyond the microsecond are cut off
    except ValueError as e:
        raise _Damage(f"{AZURE[0]} is {_shown(text)}, no date and time") from e
    return (at.replace(tzinfo=None) - datetime(1970, 1, 1) - (at.utcoffset() or timedelta())) // timedelta(microseconds=1)


def _shown(value: Any) -> str:
    shown = repr(value)
    return one_line(shown if len(shown) <= 60 else shown[:57] + "...")


# -- choosing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Which part of a trace is sent, and how fast: `rows` requests (None: all) from row `start` on, counted from 0, `speed` times as fast
    as they came. Requests of more than `most` tokens, prompt and answer together, are left out: cut short they would be others, and what
    they share would be, too. So are those without a token to send or to wait for. The others keep their moments."""

    start: int = 0
    rows: int | None = None
    speed: float = 1.0
    most: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("rows", 1), ("most", 2)):
            value = getattr(self, name)
            whole = type(value) is int and value >= least
            if not whole and (value is not None or name == "start"):
                raise SpecError(f"Excerpt: {name}={value!r} must be a whole number of at least {least}")
        if isinstance(self.speed, bool) or not isinstance(self.speed, int | float) or not 1e-6 < self.speed < 1e6:
            raise SpecError(f"Excerpt: speed={self.speed!r} must be above 0 (2: twice as fast as recorded)")

    def __str__(self) -> str:
        parts = {"from": self.start or None, "n": self.rows, "x": None if self.speed == 1 else f"{self.speed:g}", "max": self.most}
        return "-".join(f"{name}{value}" for name, value in parts.items() if value is not None) or "all"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The rows of an excerpt, seconds counted from the first of them, and how many among them were left out: longer than `most` tokens, or
    without any."""

    rows: tuple[Row, ...]
    too_long: int
    empty: int


def taken(recorded: Sequence[Row], excerpt: Excerpt, name: str) -> Taken:
    """What an excerpt takes of the trace called `name`. UserError when that is nothing, or fewer rows than asked for."""
    kept: list[Row] = []
    too_long = empty = 0
    for row in recorded[excerpt.start :]:
        if len(kept) == excerpt.rows:
            break
        if not (row.isl and row.osl):
            empty += 1
        elif excerpt.most is not None and row.isl + row.osl > excerpt.most:
            too_long += 1
        else:
            kept.append(row)
    if len(kept) < (excerpt.rows or 1):
        asked = f"{excerpt.rows} are asked for" if excerpt.rows else "none can be sent"
        left_out = f"{too_long} longer than {excerpt.most} tokens, {empty} without any"
        have = f"{len(kept)} of {len(recorded)} requests from row {excerpt.start} on ({left_out})"
        raise UserError(f"{one_line(name)}: {have}; {asked}")
    zero = kept[0].at_s
    return Taken(rows=tuple(replace(row, at_s=(row.at_s - zero) / excerpt.speed) for row in kept), too_long=too_long, empty=empty)


# -- requests -----------------------------------------------------------------------------------------------------------


def prompts(recorded: Sequence[Row], vocabulary: int, *, seed: int, part: str = "measured") -> Iterator[Ids]:
    """A prompt for each row, as word ids: each block the text of its hash, the last cut to length; without hashes the text of the row's
    own number. So two prompts are alike as far as their hashes are, and differ from the next word on (see `Wording`). `part` sets them
    apart from others of the same seed on one server."""
    of_hash, of_row = (Wording(vocabulary, (name, part, seed)) for name in ("block", "row"))
    to_come, texts = Counter(h for row in recorded for h in row.hashes), dict[int, Ids]()
    for number, row in enumerate(recorded):
        said: list[int] = []
        for h in row.hashes:
            text = texts.get(h) or of_hash.ids(h, BLOCK)
            to_come[h] -= 1
            if to_come[h]:  # most blocks are of one prompt only, and all of a trace are hundreds of megabytes
                texts[h] = text
            else:
                texts.pop(h, None)
            said += text[: row.isl - len(said)]
        yield tuple(said) if row.hashes else of_row.ids(number, row.isl)


def requests_of(recorded: Sequence[Row], words: Sequence[str], *, seed: int, part: str = "measured") -> tuple[Request, ...]:
    """The rows as requests."""
    return worded(prompts(recorded, len(words), seed=seed, part=part), words, (row.osl for row in recorded))


def due_times(recorded: Sequence[Row]) -> tuple[float, ...]:
    """When each row is due, in seconds after the start: the first at once."""
    return tuple(row.at_s for row in recorded)


def warm_up_rows(recorded: Sequence[Row], n: int) -> tuple[Row, ...]:
    """`n` rows of lengths that cover all, evenly spread, the longest first, without hashes: nothing is shared."""
    by_length = sorted(recorded, key=lambda row: (-row.isl, -row.osl))
    return tuple(replace(by_length[i * len(by_length) // n], at_s=0.0, hashes=()) for i in range(n))


def block_keys(recorded: Sequence[Row], block: int) -> Iterator[tuple[Hashable, ...]]:
    """Of each row's prompt the full blocks of `block` tokens (an engine's), each as a key that stands for it and all before it: equal
    where the hashes say that the tokens are. `core.prefixes.Asked` takes them."""
    numbers: dict[Hashable, int] = {}
    for number, row in enumerate(recorded):
        starts, before, keys = range(0, row.isl - block + 1, block), 0, list[Hashable]()
        for start in starts:
            end = start + block
            parts = row.hashes[start // BLOCK : -(-end // BLOCK)] or (number,)
            before = numbers.setdefault((before, start, parts, bool(row.hashes)), len(numbers) + 1)
            keys.append(before)
        yield tuple(keys)

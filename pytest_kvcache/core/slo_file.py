"""A file of service levels (TOML) as values; what is wrong with it in one line, `file: what @ $.path`. Pure.

    [[level]]
    name = "chat"
    isl = {median = 400, sigma = 0.8, high = 4096}
    osl = {low = 50, high = 300}
    rate = 4
    limits = [
      {metric = "ttft_ms", percentile = 99, limit = 500},
      {metric = "tpot_ms", percentile = 95, limit = 50},
      {metric = "error_share", limit = 0.01},
    ]

`schemas/slo.schema.json` describes the same form for editors; what it accepts and is refused here compares two values of a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from .lengths import Empirical, Length, LogNormal, Uniform
from .slo import Level, Limit
from .slo_search import Search
from .spec import SpecError, UserError
from .text import one_line

SHOWN = 80  # characters of what a file holds that a message quotes
LENGTHS = (Uniform, LogNormal, Empirical)
SHAPES = "{low, high}, {median, sigma, high} or {name, values}"


class _Wrong(Exception):
    """What is wrong, and where."""

    def __init__(self, what: str, path: str) -> None:
        super().__init__(f"{what} @ {path}")


@dataclass(frozen=True)
class _Form:
    """The keys of a table: what makes a value of each, and which may not be missing."""

    what: str
    keys: Mapping[str, Callable[[Any, str], Any]]
    required: tuple[str, ...]


def read(text: str, file: str) -> tuple[Level, ...]:
    """The levels of a file's text; UserError `file: what` where it is no TOML, or as `parse`."""
    try:
        doc = tomllib.loads(text.removeprefix("\ufeff"))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as e:  # the last: a whole number of thousands of digits
        why = one_line(str(e)) if not isinstance(e, RecursionError) else "it is nested too deep"
        raise UserError(f"{file}: not valid TOML: {why[:200]}; mend that line") from e
    return parse(doc, file)


def parse(doc: Mapping[str, Any], file: str) -> tuple[Level, ...]:
    """The levels of a parsed file, in its order; UserError `file: what @ $.path` for what cannot be right."""
    try:
        levels: tuple[Level, ...] = _table(doc, "$", _FILE)["level"]
        names = [level.name for level in levels]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise _Wrong(f"a second level is called {name!r}: name it otherwise", f"$.level[{i}].name")
    except _Wrong as e:
        raise UserError(f"{file}: {e}") from e
    return levels


def _table(value: Any, path: str, form: _Form) -> dict[str, Any]:
    """The values of a table's keys, each made by its own function."""
    if not isinstance(value, Mapping):
        raise _Wrong(f"{form.what} is a table, not {_shown(value)}", path)
    for key in value:
        if key not in form.keys:
            near = get_close_matches(str(key), form.keys, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"its keys are {', '.join(form.keys)}"
            raise _Wrong(f"{form.what} has no key {_shown(key)}: {hint}", path)
    for key in form.required:
        if key not in value:
            raise _Wrong(f"{form.what} has no {key}: add {key} = {_EXAMPLES[key]}", path)
    return {key: form.keys[key](v, f"{path}.{key}") for key, v in value.items()}


def _shown(value: Any) -> str:
    text = one_line(repr(value))
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _made(make: Callable[..., Any], found: Mapping[str, Any], path: str) -> Any:
    try:
        return make(**found)
    except SpecError as e:
        raise _Wrong(one_line(str(e))[:300], path) from e


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e200:
        raise _Wrong(f"{_shown(value)} is no {'finite ' if isinstance(value, float) else ''}number", path)
    return float(value) if isinstance(value, float) else value


def _whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**12:
        raise _Wrong(f"{_shown(value)} is no whole number of at least 1", path)
    return int(value)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{_shown(value)} is no text: put it in quotes", path)
    return value


def _each(one: Callable[[Any, str], Any], what: str) -> Callable[[Any, str], tuple[Any, ...]]:
    def make(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise _Wrong(f"{_shown(value)} is no list of {what}", path)
        return tuple(one(v, f"{path}[{i}]") for i, v in enumerate(value))

    return make


def _length(value: Any, path: str) -> Length:
    if not isinstance(value, Mapping):
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Wrong(f"{_shown(value)} is no length: write a whole number of tokens, or {SHAPES}", path)
        return _whole(value, path)
    # The keys say which distribution is meant; those that no distribution has do not count.
    told = {f.name: [kind for kind in LENGTHS if f.name in {g.name for g in fields(kind)}] for kind in LENGTHS for f in fields(kind)}
    own = [kinds[0] for key in value if len(kinds := told.get(str(key), [])) == 1]
    kind = own[0] if own else Uniform
    return _made(kind, _table(value, path, _LENGTH_FORMS[kind]), path)  # type: ignore[no-any-return]


def _limit(value: Any, path: str) -> Any:
    return _made(Limit, _table(value, path, _LIMIT), path)


def _search(value: Any, path: str) -> Any:
    return _made(Search, _table(value, path, _SEARCH), path)


def _level(value: Any, path: str) -> Any:
    return _made(Level, _table(value, path, _LEVEL), path)


_EXAMPLES = {
    "level": "a table [[level]]", "name": '"chat"', "isl": "512", "osl": "128", "metric": '"ttft_ms"', "limit": "500 (ms, or a share)",
    "limits": '[{metric = "ttft_ms", percentile = 99, limit = 500}]', "low": "1", "high": "64", "median": "256", "sigma": "0.8",
    "values": "[128, 512]",
}  # fmt: skip
_REQUIRED = {Uniform: ("low", "high"), LogNormal: ("median", "sigma", "high"), Empirical: ("name", "values")}
_LENGTH_FORMS = {
    Uniform: _Form(f"a length ({SHAPES})", {"low": _whole, "high": _whole}, _REQUIRED[Uniform]),
    LogNormal: _Form("a log-normal length", {"median": _whole, "sigma": _number, "high": _whole, "low": _whole}, _REQUIRED[LogNormal]),
    Empirical: _Form("an empirical length", {"name": _text, "values": _each(_whole, "lengths")}, _REQUIRED[Empirical]),
}
_LIMIT = _Form("a limit", {"metric": _text, "percentile": _number, "limit": _number}, ("metric", "limit"))
_SEARCH = _Form("a search", {
    "low": _number, "high": _number, "start": _number, "resolution": _number, "points": _whole, "confirm": _whole,
}, ("low", "high"))  # fmt: skip
_LEVEL = _Form("a level", {
    "name": _text, "limits": _each(_limit, "limits"), "isl": _length, "osl": _length, "rate": _number, "concurrency": _whole,
    "search": _search, "arrivals": _text, "burstiness": _number, "requests": _whole,
}, ("name", "limits", "isl", "osl"))  # fmt: skip
_FILE = _Form("the file", {"level": _each(_level, "levels")}, ("level",))

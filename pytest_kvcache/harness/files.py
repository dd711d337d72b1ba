"""Files that must never be half written or silently wrong: atomic writes, strict JSON, schema errors in one line."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from io import BufferedRandom
from pathlib import Path
from typing import Any

from ..core.spec import UserError
from ..core.text import one_line

SHOWN = 200  # characters of what a file holds that a message quotes
MAX_DEPTH = 32  # of a document: what is written here has at most 10


def _refuse(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal[:80]} is no finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} stands twice in one object")
    return found


def _deeper(value: Any, levels: int) -> bool:
    """Whether containers lie in one another more than so many times."""
    if isinstance(value, dict | list):
        return not levels or any(_deeper(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON with sorted keys and a newline at the end; the old file stays whole until the new one is.

    Raises OSError (a full disk, say) with the old file intact and no leftover.
    """
    text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic, as `replacing`."""
    with replacing(path) as f:
        f.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BufferedRandom]:
    """A file to write into that becomes `path` when the block ends: a temporary one beside it, flushed to the disk, renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def read_json(path: Path, what: str, cure: str) -> Any:
    """Parsed strict JSON: finite numbers, no name twice in an object, no deep nest; UserError `file: what; cure` for anything else.

    A BOM is harmless.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path}: {what} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: {what} is not UTF-8 text; {cure}") from e
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
        deep = _deeper(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    except ValueError as e:
        raise UserError(f"{path}: {what} is {_diagnosis(text, e)}; {cure}") from e
    if deep:
        raise UserError(f"{path}: {what} is nested more than {MAX_DEPTH} deep, nothing that was written here; {cure}")
    return value


def _diagnosis(text: str, error: ValueError) -> str:
    if not text.strip():
        return "empty"
    if text.startswith("version https://git-lfs"):
        return "a Git LFS pointer (run: git lfs pull)"
    if any(mark in text for mark in ("<<<<<<< ", ">>>>>>> ")):
        return "in the middle of a merge conflict"
    if text.lstrip().startswith("<"):
        return "a web page, not JSON"
    return f"not valid JSON ({error})"


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """A schema of the package: `baseline`, `run`."""
    text = resources.files("pytest_kvcache.schemas").joinpath(f"{name}.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def schema_problem(value: Any, name: str) -> str:
    """The most telling schema violation as `what @ $.path`, or an empty string."""
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema(name)).iter_errors(value))
    return f"{one_line(error.message[:SHOWN])} @ {one_line(error.json_path[:SHOWN])}" if error else ""

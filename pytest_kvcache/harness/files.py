"""Files that must never be half written or silently wrong: atomic writes, strict JSON, schema errors in one line."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from io import BufferedRandom
from pathlib import Path
from typing import Any

from ..core.spec import UserError


def _refuse(literal: str) -> Any:
    raise ValueError(f"{literal} is no JSON number")


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
    """Parsed strict JSON; UserError `file: what; cure` for anything else. A BOM is harmless."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path}: {what} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: {what} is not UTF-8 text; {cure}") from e
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError as e:
        raise UserError(f"{path}: {what} is {_diagnosis(text, e)}; {cure}") from e


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
    return f"{error.message[:200]} @ {error.json_path}" if error else ""

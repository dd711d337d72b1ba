"""Baseline files: find, read with every check, write atomically. Only the controller writes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.baseline import SCHEMA, empty
from ..core.spec import UserError
from .baseline_shape import fits
from .files import SHOWN, read_json, schema_problem, write_json

CURE = "restore it, or move it away and record anew with --kv-record=missing"


def baseline_path(folder: Path, gpu: str, framework: str, model: str) -> Path:
    return folder / gpu / framework / f"{model}.json"


def load_baseline(folder: Path, gpu: str, framework: str, model: str) -> dict[str, Any]:
    """The stored document, or an empty one where there is none; UserError naming the file when it is bad."""
    path = baseline_path(folder, gpu, framework, model)
    if not path.exists():
        return empty(gpu, framework, model)
    doc = read_json(path, "this baseline", CURE)
    version = doc.get("schema", doc.get("schema_version")) if isinstance(doc, dict) else None
    if version is not None and version != SCHEMA:
        what = f"written for schema {repr(version)[:SHOWN]}, this plugin reads {SCHEMA!r} @ $.schema"
        raise UserError(f"{path}: {what}: install the one that wrote it, or {CURE}")
    if problem := _problem(doc):
        raise UserError(f"{path}: {problem}; {CURE}")
    for field, asked in (("gpu", gpu), ("framework", framework), ("model", model)):
        if doc[field] != asked:
            other = f"{field} is {repr(doc[field])[:SHOWN]}, not {asked!r} @ $.{field}"
            raise UserError(f"{path}: {other}: the file lies in the wrong place; {CURE}")
    return dict(doc)


def _problem(doc: Any) -> str:
    """As `schema_problem`, which is slow and asked only where it may find something."""
    return "" if fits(doc) else schema_problem(doc, "baseline")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer of this folder at a time; UserError when the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise UserError(f"{folder}: baselines cannot be written there ({e.strerror})") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def save_baseline(folder: Path, doc: dict[str, Any]) -> Path:
    """Write the document to its place; UserError when that fails, with the old file intact."""
    path = baseline_path(folder, doc["gpu"], doc["framework"], doc["model"])
    if problem := _problem(doc):
        raise UserError(f"{path}: not written, the new document would be invalid: {problem}")
    try:
        write_json(path, doc)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"{path}: the baseline could not be written ({reason}); the old one is unchanged") from e
    return path

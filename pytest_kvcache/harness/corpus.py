"""Find and read the text of `--kv-corpus`: a file, WikiText-2 where this machine has it, or the texts of pydoc. Nothing is downloaded."""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.corpora import (
    FIELD,
    MAX_BYTES,
    SEPARATOR,
    WIKITEXT2,
    WIKITEXT2_DIGEST,
    Corpus,
    UnfitCorpus,
    joined,
    no_field,
    row_text,
    rows_of_array,
    rows_of_lines,
    text_of,
    too_large,
    wikitext_raw,
)
from ..core.spec import UserError
from ..core.text import one_line

RAW_FILE = "wiki.test.raw"
_DATASETS = ("datasets--Salesforce--wikitext", "datasets--wikitext")  # where the hub's cache has it: now, and by its name before 2024
_SPLIT = "snapshots/*/wikitext-2-raw-v1/test-*.parquet"
_JSON_LINES = (".jsonl", ".ndjson")
_BATCH = 1024  # rows of a packed file in memory at a time, beside the text


def load_corpus(asked: str) -> Corpus:
    """The text that `--kv-corpus` asks for: "" is the texts of pydoc, `wikitext2` the raw test split, all else PATH or PATH#FIELD.

    Rows of JSON and parquet are joined by an empty line. Raises UserError, one line, for all that gives no text.
    """
    try:
        corpus = _pydoc() if not asked else _wikitext2() if asked == WIKITEXT2 else _named(asked)
        if not corpus.text.strip():
            raise UnfitCorpus("it has no text")
    except UnfitCorpus as e:
        raise UserError(f"--kv-corpus{'=' * bool(asked)}{one_line(asked)}: {e}") from e
    return corpus


def _pydoc() -> Corpus:
    """English prose that every Python has, another one in each version: its digest tells which."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:  # some distributions leave it out
        raise UnfitCorpus("this Python has no pydoc_data, the text without one named; name a text: --kv-corpus=PATH") from e
    return Corpus(name="pydoc_topics", text=SEPARATOR.join([text for _, text in sorted(topics.items())]))


def _named(asked: str) -> Corpus:
    path, field = _split(asked)
    content, kind = _content(path), path.suffix.lower()
    if kind == ".parquet":
        return Corpus(name=path.name, text=joined(_column(content, field or FIELD)))
    text = text_of(content)
    if kind in _JSON_LINES:
        text = joined(rows_of_lines(text, field))
    elif kind == ".json":
        text = joined(rows_of_array(text, field))
    elif field:
        raise UnfitCorpus(f"a plain text has no fields; leave #{one_line(field)} out")
    return Corpus(name=path.name, text=text)


def _split(asked: str) -> tuple[Path, str]:
    """The path and the field, which is empty where none is named. A file whose name has a # is that file."""
    path, mark, field = asked.rpartition("#")
    if not path or os.path.exists(asked):
        return Path(asked), ""
    if mark and not field:
        raise UnfitCorpus("no field is named after the #; name one or leave it out")
    return Path(path), field


def _content(path: Path) -> bytes:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES:
            content = path.read_bytes()
            if content.startswith(b"version https://git-lfs"):
                raise UnfitCorpus("a Git LFS pointer, not the text (run: git lfs pull)")
            return content
    except FileNotFoundError as e:
        raise UnfitCorpus("no such file") from e
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        raise UnfitCorpus(f"it cannot be read: {one_line(getattr(e, 'strerror', None) or str(e))}") from e
    if stat.S_ISDIR(found.st_mode):
        raise UnfitCorpus("a folder; name a file in it")
    raise UnfitCorpus(too_large() if stat.S_ISREG(found.st_mode) else "no regular file; write the text into one")


def _column(content: bytes, column: str) -> Iterator[str]:
    """The texts of a column of a parquet file."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise UnfitCorpus("a parquet file needs pyarrow: pip install 'pytest-kvcache[parquet]'") from e
    try:
        with parquet.ParquetFile(arrow.BufferReader(content)) as file:
            if column not in (names := file.schema_arrow.names):
                raise no_field("the table", column, names)
            batches = file.iter_batches(batch_size=_BATCH, columns=[column])
            for number, value in enumerate((v for batch in batches for v in batch.column(0).to_pylist()), 1):
                yield row_text(value, f"{one_line(column)} of row {number}")
    except (arrow.ArrowException, OSError, ValueError) as e:  # ValueError: bytes of a string that are not UTF-8
        raise UnfitCorpus(f"not a readable parquet file ({one_line(str(e)[:120])})") from e


def _wikitext2() -> Corpus:
    """The raw test split, and no other text under its name: figures are compared by it."""
    named = os.environ.get("KV_WIKITEXT2", "")
    hub = _hub_cache()
    if named:
        path = os.path.expanduser(named)
        files = [Path(path, RAW_FILE) if os.path.isdir(path) else Path(path)]
    else:
        files = next((found for name in _DATASETS if (found := _newest(hub / name))), [])
    if not files:
        looked = f"looked in KV_WIKITEXT2 (not set) and {' and '.join([str(hub / name) for name in _DATASETS])}"
        raise UnfitCorpus(f"not on this machine; {one_line(looked)}; nothing is downloaded, so name it: --kv-corpus=PATH/{RAW_FILE}")
    where = ("KV_WIKITEXT2=" if named else "") + one_line(str(files[0]))
    try:
        packed = files[0].suffix == ".parquet"
        text = wikitext_raw([row for file in files for row in _column(_content(file), FIELD)]) if packed else text_of(_content(files[0]))
    except UnfitCorpus as e:
        raise UnfitCorpus(f"{where}: {e}; or name the text: --kv-corpus=PATH/{RAW_FILE}") from e
    corpus = Corpus(name=WIKITEXT2, text=text)
    if corpus.digest != WIKITEXT2_DIGEST:
        raise UnfitCorpus(f"{where}: another text ({corpus.digest}, not {WIKITEXT2_DIGEST}); score it by its own name: --kv-corpus=PATH")
    return corpus


def _newest(dataset: Path) -> list[Path]:
    """The files of the split in the snapshot that was made last; none where the cache has none."""
    files = sorted(dataset.glob(_SPLIT))
    snapshots = sorted({file.parent for file in files}, key=lambda folder: (folder.stat().st_mtime, folder))
    return [file for file in files if file.parent == snapshots[-1]]


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it has (its constants.py); a variable that is empty counts as not set."""
    env = {name: value for name, value in os.environ.items() if value}
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))

"""Raw traces on disk: compressed arrays without pickles, one file for each trace when it is measured, all in one at the end.

Both are an `.npz`, readable by `numpy.load`: an array for each field of a request (see COLUMNS), the counts of gaps and
arrivals, and `about`, JSON in bytes: `traces`, which trace each request belongs to, and `texts`, what the codes stand for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.columns import DTYPES, TEXTS, Array, Columns, records_of
from ..core.record import REQUEST_COLUMNS, TRACE_NAMES, Trace
from ..core.spec import UserError
from .files import replacing

COLUMNS = {
    "index": "the request's place in the workload",
    "sent_s": "seconds: request sent on an open connection",
    "scheduled_s": "seconds: when an open loop meant to send it; NaN in a closed loop",
    "connect_s": "seconds that opening its connection took before it was sent; 0 where one was open",
    "first_s": "seconds: first token event; NaN where there was none",
    "answer_s": "seconds: first token of answer text, after any reasoning; NaN where there was none",
    "last_s": "seconds: last token event; NaN where there was none",
    "end_s": "seconds: the stream was closed; NaN where it never was",
    "input_tokens": "prompt tokens by the server's count; -1 where it gave none",
    "output_tokens": "output tokens by the server's count; -1 where it gave none",
    "first_event_tokens": "tokens in the first token event",
    "events": "token events seen",
    "status": "HTTP status; -1 where none came",
    "outcome": "ok, or the class of failure: its place in texts.outcome of `about`",
    "error": "the failure's first words: their place in texts.error of `about`",
    "notes": "what is odd about an answer that counts: its place in texts.notes of `about`",
    "trace": "row of `traces` in this file's sibling run.json: block, scenario, arm and run of the request",
    "itl_us": "microseconds per token between two token events, each value once a trace",
    "itl_n": "tokens that came after such a gap",
    "itl_trace": "row of `traces` of the gap",
    "arrivals_ms": "a millisecond in which tokens came",
    "arrivals_n": "tokens that came in it",
    "arrivals_trace": "row of `traces` of the millisecond",
    "tokens_nll": "nats: negative log-likelihood of a scored token of a text",
    "tokens_base_nll": "nats: the same of the 16-bit reference",
    "tokens_kld": "nats: divergence of the arm's probabilities from the reference's where the token was predicted",
    "tokens_same": "1 where both had the same likeliest token",
    "tokens_chunk": "the window of the text that the token lies in",
    "tokens_trace": "row of `traces` of the scored token",
    "lengths_isl": "input tokens asked of a request, by its index, where requests differ in length",
    "lengths_osl": "output tokens asked of it",
    "lengths_trace": "row of `traces` of that request",
    "about": "JSON in bytes: `traces` has what else is known of each, `blocks` the block of each, `texts` what the codes stand for",
}
_I8, _F8 = np.dtype("<i8"), np.dtype("<f8")
# Fields of a trace that are arrays of one length, by the last part of their names.
GROUPS: dict[str, dict[str, np.dtype[Any]]] = {
    "itl": {"us": _I8, "n": _F8},
    "arrivals": {"ms": _I8, "n": _F8},
    "tokens": {"nll": _F8, "base_nll": _F8, "kld": _F8, "same": np.dtype("u1"), "chunk": np.dtype("<i4")},
    "lengths": {"isl": np.dtype("<i4"), "osl": np.dtype("<i4")},
}
FAST = 1  # measured times are noise to a compressor: more effort takes three times as long and saves nothing
_LENGTHS = ("requests", *GROUPS)
_PLACES = ("trace", *(f"{name}_trace" for name in GROUPS))
_GROUP_ARRAYS = {f"{name}_{key}": dtype for name, keys in GROUPS.items() for key, dtype in keys.items()}
_DTYPES = {**DTYPES, **_GROUP_ARRAYS, "about": np.dtype("u1"), **dict.fromkeys(_PLACES, np.dtype("<i4"))}
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ArithmeticError, LookupError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One trace on its way from or to a file: everything but arrays, its texts, and how to get an array."""

    about: Mapping[str, Any]
    texts: Mapping[str, Sequence[Any]]
    array: Callable[[str], Array]

    def trace(self) -> Trace:
        fields: dict[str, Any] = {k: v for k, v in self.about.items() if k not in _LENGTHS}
        fields |= {name: self._group(name) for name in GROUPS}
        return Trace(**fields, records=records_of(self.array, self.texts))

    def _group(self, name: str) -> dict[str, list[Any]]:
        """Whole numbers of tokens are integers again."""
        if self.about[name] is None:
            return {}
        found = {key: self.array(f"{name}_{key}").tolist() for key in GROUPS[name]}
        return found | {"n": [int(v) if v.is_integer() else v for v in found["n"]]} if "n" in found else found


def part_of(trace: Trace) -> Part:
    columns = Columns(trace.records)
    about: dict[str, Any] = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace) if f.name not in ("records", *GROUPS)}
    about["requests"] = len(columns)
    about |= {name: len(next(iter(group.values()))) if (group := getattr(trace, name)) else None for name in GROUPS}

    def array(name: str) -> Array:
        if name in REQUEST_COLUMNS:
            return columns[name]
        field, _, key = name.partition("_")
        return np.array(getattr(trace, field).get(key, ()), dtype=_DTYPES[name])

    return Part(about, {name: columns.texts(name) for name in TEXTS}, array)


# -- writing ----------------------------------------------------------------------------------------------------------


def write(path: Path, parts: Sequence[Part | None], blocks: Sequence[str] = ()) -> str:
    """All parts in one file, whole or not at all; its SHA-256. None is a trace whose requests are lost. OSError as it comes.

    `blocks` names the block of the run that each is of.

    Arrays are taken one at a time, so that no more than one trace's column is held.
    """
    with replacing(path) as f:
        with zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED, compresslevel=FAST) as z:
            _write_arrays(z, parts, blocks)
        f.seek(0)
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write_arrays(z: zipfile.ZipFile, parts: Sequence[Part | None], blocks: Sequence[str]) -> None:
    present = [(i, p) for i, p in enumerate(parts) if p]
    texts, places = _tables([p for _, p in present])
    about = {"traces": [p and dict(p.about) for p in parts], "texts": texts, "blocks": list(blocks)}
    encoded = json.dumps(about).encode()
    _write_array(z, "about", len(encoded), [np.frombuffer(encoded, dtype="u1")])
    for name in REQUEST_COLUMNS:
        arrays = (places[name][k][p.array(name)] if name in TEXTS else p.array(name) for k, (_, p) in enumerate(present))
        _write_array(z, name, sum(p.about["requests"] for _, p in present), arrays)
    _write_array(z, "trace", sum(p.about["requests"] for _, p in present), _repeated(present, "requests"))
    for name, keys in GROUPS.items():
        n = sum(p.about[name] or 0 for _, p in present)
        for array in (f"{name}_{key}" for key in keys):
            _write_array(z, array, n, (p.array(array) for _, p in present))
        _write_array(z, f"{name}_trace", n, _repeated(present, name))


def _repeated(present: Sequence[tuple[int, Part]], length: str) -> Iterator[Array]:
    return (np.full(p.about[length] or 0, i, dtype="<i4") for i, p in present)


def _tables(parts: Sequence[Part]) -> tuple[dict[str, list[Any]], dict[str, list[Array]]]:
    """The texts of all parts in one table a field, and for each part the new place of each of its codes."""
    texts, places = {}, {}
    for name in TEXTS:
        table: dict[Any, int] = {}
        places[name] = [np.array([table.setdefault(t, len(table)) for t in p.texts[name]], dtype=DTYPES[name]) for p in parts]
        texts[name] = list(table)
    return texts, places


def _write_array(z: zipfile.ZipFile, name: str, n: int, arrays: Iterator[Array] | Sequence[Array]) -> None:
    dtype = _DTYPES[name]
    with z.open(f"{name}.npy", "w", force_zip64=True) as out:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
        np.lib.format.write_array_header_1_0(out, header)
        for array in arrays:
            out.write(np.ascontiguousarray(array, dtype=dtype).data)


# -- reading ----------------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    """The SHA-256 of a file of requests; UserError where it cannot be read."""
    with _faults(path, "file"), path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read(path: Path) -> list[Trace | None]:
    """The traces of a file, exactly as they were; None where the requests of one are lost. UserError for a damaged file."""
    about = _about(path)
    arrays = {name: _array(path, name) for name in (*REQUEST_COLUMNS, *about["arrays"])}
    with _faults(path, "about"):
        return [p.trace() if p else None for p in _sliced(about, arrays)]


def _sliced(about: dict[str, Any], arrays: Mapping[str, Array]) -> Iterator[Part | None]:
    """Each trace's piece of all arrays: they follow each other."""
    at = dict.fromkeys(_LENGTHS, 0)
    for row in about["traces"]:
        pieces = {}
        for name, array in arrays.items():
            length = "requests" if name in REQUEST_COLUMNS else name.partition("_")[0]
            pieces[name] = array[at[length] : at[length] + ((row and row[length]) or 0)]
        yield None if row is None else Part(row, about["texts"], pieces.__getitem__)
        at = {length: n + ((row and row[length]) or 0) for length, n in at.items()}


def blocks_of(path: Path) -> list[str]:
    """The block of each trace of a file of many. UserError for a damaged file."""
    about = _about(path)
    with _faults(path, "about"):
        return list(map(str, about["blocks"]))


def part_at(path: Path) -> Part:
    """The trace of a file of one, all of it looked at; its arrays are read whenever they are asked for. UserError for a damaged file."""
    about = _about(path)
    with _faults(path, "about"):
        (row,) = about["traces"]
        lengths = {name: row["requests"] for name in REQUEST_COLUMNS} | {name: row[name.partition("_")[0]] or 0 for name in about["arrays"]}
    for name, length in lengths.items():
        _array(path, name, length)
    return Part(row, about["texts"], lambda name: _array(path, name, lengths[name]) if name in lengths else np.empty(0, _DTYPES[name]))


def _about(path: Path) -> dict[str, Any]:
    with _faults(path, "about"):
        about: dict[str, Any] = json.loads(_array(path, "about").tobytes())
        # One of an earlier day may know less of its traces.
        known = {name for row in about["traces"] if row for name in row}
        about["arrays"] = [array for array in _GROUP_ARRAYS if array.partition("_")[0] in known]
        about["traces"] = [row and dict.fromkeys(GROUPS) | row for row in about["traces"]]
        about["texts"] = {name: [tuple(t) if isinstance(t, list) else t for t in about["texts"][name]] for name in TEXTS}
        return about


def _array(path: Path, name: str, length: int | None = None) -> Array:
    """One array, read whole so that the archive's check sum is looked at."""
    with _faults(path, name):
        with zipfile.ZipFile(path) as z:
            data = io.BytesIO(z.read(f"{name}.npy"))
        np.lib.format.read_magic(data)
        (n,), _, dtype = np.lib.format.read_array_header_1_0(data)
        if dtype != _DTYPES[name] or length not in (None, n):
            raise ValueError(f"{n} of {dtype}")
        return np.frombuffer(data.getbuffer(), dtype, n, data.tell())


@contextmanager
def _faults(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UserError(f"{path}: the requests of a run cannot be read ({e.strerror or e})") from e
    except _DAMAGE as e:
        raise UserError(f"{path}: the requests of a run are damaged ({' '.join(str(e).split()) or type(e).__name__}) @ {name}") from e


# -- what a session does with them ------------------------------------------------------------------------------------


def keep(folder: Path, name: str, trace: Trace) -> dict[str, Any]:
    """Store a trace as `name`-N.npz; the row that stands for it in a block's result. A full disk costs its requests, nothing else."""
    row: dict[str, Any] = {k: getattr(trace, k) for k in TRACE_NAMES}
    row |= {"requests": len(trace.records) or len(trace.tokens.get("nll", ())), "file": None, "lost": None}
    path = folder / f"{name}-{sum(1 for _ in folder.glob(f'{name}-*.npz'))}.npz"
    try:
        write(path, [part_of(trace)])
        return row | {"file": path.name}
    except OSError as e:
        return row | {"lost": f"{path}: the requests of {trace.scenario} could not be written ({e.strerror or e})"}


def merge(path: Path, sources: Sequence[Path | None], blocks: Sequence[str] = ()) -> tuple[str, dict[int, str]]:
    """The traces of all files in one: its SHA-256, and for each file that could not be read why. None is one that never was."""
    lost: dict[int, str] = {}
    parts: list[Part | None] = []
    for i, source in enumerate(sources):
        try:
            parts.append(part_at(source) if source else None)
        except UserError as e:
            parts.append(None)
            lost[i] = str(e)
    try:
        return write(path, parts, blocks), lost
    except OSError as e:
        raise UserError(f"{path}: the requests could not be written ({e.strerror or e})") from e

"""Requests as arrays, one a field: what figures are computed from and what files hold. Pure, on numpy.

Times are float64, NaN where there was none; counts int64, NONE where there was none. The texts of a field repeat: they are
int32 places in a table of what occurs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

import numpy as np

from .record import OK, REQUEST_COLUMNS, RequestRecord

Array = np.ndarray[Any, np.dtype[Any]]

NONE = -1
_TYPES = {f.name: str(f.type) for f in dataclasses.fields(RequestRecord)}
DTYPES = {name: np.dtype({"float": "<f8", "int": "<i8"}.get(kind.split(" ")[0], "<i4")) for name, kind in _TYPES.items()}
TEXTS = tuple(name for name, dtype in DTYPES.items() if dtype == np.int32)


class Columns:
    """The arrays of some requests, each built when it is first asked for."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self._records = records
        self._arrays: dict[str, Array] = {}
        self._codes: dict[str, tuple[Array, list[Any]]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, name: str) -> Array:
        if name in TEXTS:
            return self._coded(name)[0]
        if name not in self._arrays:
            self._arrays[name] = _numbers(self._values(name), DTYPES[name])
        return self._arrays[name]

    def texts(self, name: str) -> list[Any]:
        """What the codes of a field of TEXTS stand for."""
        return self._coded(name)[1]

    def _values(self, name: str) -> list[Any]:
        return list(map(attrgetter(name), self._records))

    def _coded(self, name: str) -> tuple[Array, list[Any]]:
        if name not in self._codes:
            places: dict[Any, int] = {}
            codes = [places.setdefault(v, len(places)) for v in self._values(name)]
            self._codes[name] = np.array(codes, dtype=DTYPES[name]), list(places)
        return self._codes[name]

    @property
    def ok(self) -> Array:
        """Which requests were answered."""
        codes, table = self._coded("outcome")
        return np.equal(codes, table.index(OK) if OK in table else NONE)

    @property
    def start_s(self) -> Array:
        """As `RequestRecord.start_s`."""
        scheduled = self["scheduled_s"]
        return np.where(np.isnan(scheduled), self["sent_s"], scheduled)


def _numbers(values: list[Any], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "i" and None in values:
        values = [NONE if v is None else v for v in values]
    return np.array(values, dtype=dtype)  # of floats, None becomes NaN


def records_of(column: Callable[[str], Array], texts: Mapping[str, Sequence[Any]]) -> tuple[RequestRecord, ...]:
    """The requests again, exactly."""
    return tuple(starmap(RequestRecord, zip(*(_values(name, column(name), texts) for name in REQUEST_COLUMNS), strict=True)))


def _values(name: str, array: Array, texts: Mapping[str, Sequence[Any]]) -> list[Any]:
    values: list[Any] = array.tolist()
    if name in TEXTS:
        return list(map(texts[name].__getitem__, values))
    if "None" not in _TYPES[name]:
        return values
    missing = np.isnan(array) if array.dtype.kind == "f" else array == NONE
    for i in np.flatnonzero(missing).tolist():
        values[i] = None
    return values

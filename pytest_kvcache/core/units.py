"""Units: a value is converted inside its dimension (ms and s, tok/s and tok/min), never across, never guessed. Pure."""

from __future__ import annotations

_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_ENERGY = {"mJ": 1e-3, "J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3.6e3, "kWh": 3.6e6}
_POWER = {"mW": 1e-3, "W": 1.0, "kW": 1e3}
_TOKENS = {"tok": 1.0, "ktok": 1e3, "Mtok": 1e6}
_SHARE = {"": 1.0, "1": 1.0, "%": 0.01}

# unit -> its dimension and how many of the dimension's first unit it is
_UNITS = {
    unit: (dimension, scale)
    for dimension, scales in enumerate((_TIME, _BYTES, _ENERGY, _POWER, _TOKENS, _SHARE))
    for unit, scale in scales.items()
}


def factor(old: str, new: str) -> float | None:
    """What a value in `old` is multiplied by to be one in `new`; None where the two are not of one dimension.

    `a/b` is converted part by part. A unit that is in no table is only ever equal to itself.
    """
    if old == new:
        return 1.0
    parts = old.split("/"), new.split("/")
    if len(parts[0]) != len(parts[1]):
        return None
    found = 1.0
    for place, (a, b) in enumerate(zip(*parts, strict=True)):
        if a == b:
            continue
        if a not in _UNITS or b not in _UNITS or _UNITS[a][0] != _UNITS[b][0]:
            return None
        ratio = _UNITS[a][1], _UNITS[b][1]
        found *= ratio[1] / ratio[0] if place else ratio[0] / ratio[1]
    return found

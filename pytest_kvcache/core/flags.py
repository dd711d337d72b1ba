"""How a framework is told what an arm asks for, by its version. Pure.

A value that not all versions have, or that has a name of its own in some, has rows of its own in the table: `kv_dtype=nvfp4`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .framework import Flag, Framework
from .scenarios import ClosedLoop, Scenario
from .spec import Arm, UserError

Flags = Mapping[str, tuple[Flag, ...]]
Dtypes = Mapping[str, Mapping[str, str]]
DTYPES = ("kv_dtype", "weight_dtype")
COMMON = ("fp8", "int8", "int4")  # of weights: what not every framework can make of them as it loads them


def told(framework: str, flags: Flags, arm: Arm, version: str, dtypes: Dtypes) -> list[list[str]]:
    """The words for everything that `arm` asks for, a list for each setting, in the order of an arm's fields. `dtypes` gives the
    framework's own words for `kv_dtype` and `weight_dtype`. UserError for a setting that this version cannot be told."""
    found = []
    for name, value in arm.asked().items():
        flag = _of_version(_rows(flags, name, value), version)
        if flag is None:
            raise UserError(f"arm {arm.name}: {_why_not(framework, flags, name, value, version)}")
        found.append(flag.words(dtypes.get(name, {}).get(value, value)))
    return found


def words(framework: str, flags: Flags, arm: Arm, version: str, dtypes: Dtypes) -> list[str]:
    """The same as one command line."""
    return [word for one in told(framework, flags, arm, version, dtypes) for word in one]


def unsupported(framework: Framework, arm: Arm, version: str = "") -> str:
    """What `arm` asks for that the framework, of a version if it is known, does not have; it would be ignored and measured under that
    name."""
    for name, value in arm.asked().items():
        if name in DTYPES and value not in (has := getattr(framework, f"{name}s")):
            return f"{framework.name} has no {name} {value!r}; it has {', '.join(has)}"
        if name == "quantization" and value in COMMON and value not in framework.quantizations:
            return f"{framework.name} makes no weights of {value} as it loads them"
        if _of_version(_rows(framework.flags, name, value), version) is None:
            return _why_not(framework.name, framework.flags, name, value, version)
    return ""


_SAMPLES = {"kv_dtype": "fp8", "weight_dtype": "float16", "quantization": "fp8", "prefix_cache": True, "chunked_prefill": True}


def versions_of(flags: Flags) -> dict[str, str]:
    """Which versions have an argument that not all have, or a key of a file: `--page-size`: `from 0.4.5 on`."""
    found = {}
    for name, rows in flags.items():
        for row in () if "=" in name else rows:
            said = row.words(_SAMPLES.get(name, 1)) if row.since or row.until else []
            if said and (arguments := [w for w in said if w.startswith("--")]):
                found.update(dict.fromkeys((w.partition("=")[0] for w in arguments), f"is there {_range(row)}"))
            elif len(said) > 1:
                found[".".join(said[:-1])] = f"is there {_range(row)}"
    return found


def beyond(framework: Framework, scenario: Scenario) -> str:
    """Why a scenario is beyond a framework, whichever version of it: a setting that it cannot be told, or requests at once; empty when it
    is not."""
    if framework.one_at_a_time and isinstance(scenario, ClosedLoop) and scenario.concurrency > 1:
        return f"{framework.name} answers one request at a time: concurrency={scenario.concurrency} would measure its queue"
    return next(filter(None, (unsupported(framework, arm) for arm in scenario.arms)), "")


def _why_not(framework: str, flags: Flags, name: str, value: Any, version: str) -> str:
    """Why a setting cannot be told, and which version has it."""
    can = " or ".join(filter(None, (_range(row) for row in _rows(flags, name, value))))
    return " ".join(filter(None, (framework, version))) + f" cannot be told {name}={value!r}" + (f"; versions {can} can" if can else "")


def _rows(flags: Flags, name: str, value: Any) -> Sequence[Flag]:
    return flags.get(f"{name}={value}") or flags.get(name, ())


def _range(flag: Flag) -> str:
    return " and ".join(filter(None, (flag.since and f"from {flag.since} on", flag.until and f"before {flag.until}")))


def _of_version(rows: Sequence[Flag], version: str) -> Flag | None:
    """The row for a version; the first, which is today's, when the version is not known."""
    if not version:
        return rows[0] if rows else None
    return next((r for r in rows if not (r.since and before(version, r.since)) and (not r.until or before(version, r.until))), None)


def before(version: str, other: str) -> bool:
    """Whether a version is older than another one. A build of a version (`0.25.1+cu130`, `1.2.0rc4`, a commit) counts as that version,
    what is no version at all as the newest."""
    from packaging.version import InvalidVersion, Version

    try:
        base = Version(Version(version.partition("@")[0]).base_version)
        return base < Version(other) and not (base < Version("0.2") and "dev" in version)  # a build without tags calls itself 0.1.dev1
    except InvalidVersion:
        return False

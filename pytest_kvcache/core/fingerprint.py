"""What changed between two environments, as lines for a person. See `harness.environment` for the fingerprint.

Nothing here fails on what an older or a foreign file holds: a section that is none counts as empty.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .text import escaped

# Readings of the moment: they differ between any two sessions and explain nothing by that.
ALWAYS_DIFFERENT = frozenset(
    {"date", "load_average", "boot_time", "gpu_clock_mhz", "gpu_memory_clock_mhz", "gpu_temperature_c", "gpu_pcie_generation"}
)
FRAMEWORK = "framework"
"""The subject's list of the distributions that are the framework, itself first: tells the order, is no change of its own."""

SHOWN = 80
AROUND = 12

# The order of the changes of a section, by the first pattern that fits the key. People ask for versions first: the framework,
# what it declares to depend on, driver and CUDA; then what the server made of it. The nvidia-* distributions are many and
# follow torch.
_ORDER = (r"driver|cuda_.*", r"resolved:.*|server_argv", r"python|dist:(?!nvidia-).*", r"(?!dist:).*", r".*")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What an upgrade may have varied, then the circumstances: `dist:torch: 2.12.0 -> 2.13.0`."""
    return _section(old, new, "subject") + _section(old, new, "context")


def identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What must match for two numbers to be comparable at all, and does not."""
    return _section(old, new, "identity")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _section(old: Any, new: Any, name: str) -> list[str]:
    was, now = _mapping(_mapping(old).get(name)), _mapping(_mapping(new).get(name))
    first = [f"dist:{d}" for side in (now, was) for d in _texts(side.get(FRAMEWORK))]
    changed = (k for k in {*was, *now} - ALWAYS_DIFFERENT - {FRAMEWORK} if not _same(was.get(k), now.get(k)))
    return [_line(k, was.get(k), now.get(k)) for k in sorted(changed, key=lambda k: (_rank(k, first), k))]


def _texts(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else []


def _rank(key: str, first: list[str]) -> int:
    if key in first:
        return first.index(key)
    return len(first) + next(i for i, pattern in enumerate(_ORDER) if re.fullmatch(pattern, key, re.DOTALL))


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: NaN is itself, true is not 1, and 1 is 1.0."""
    if isinstance(a, bool) is isinstance(b, bool) and a == b:
        return True
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _line(key: str, a: Any, b: Any) -> str:
    if isinstance(a, list) and isinstance(b, list):
        change = _list_change(a, b)
    else:
        before, after = _shown(a), _shown(b)
        if before == after:  # 1 and "1"
            before, after = _plain(a), _plain(b)
        change = " -> ".join(_shortened(before, after))
    return f"{escaped(key)}: {change}"


def _plain(value: Any) -> str:
    return escaped(json.dumps(value, ensure_ascii=False, sort_keys=True))


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return escaped(value) if isinstance(value, str) else _plain(value)


def _shortened(a: str, b: str) -> tuple[str, str]:
    """Two texts that differ, cut around the place where they begin to, so that they still differ."""
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, same - AROUND) if max(len(a), len(b)) > SHOWN else 0
    return _cut(a, begin), _cut(b, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + SHOWN
    return ("…" if begin else "") + text[begin:end] + ("…" if len(text) > end else "")


def _units(words: Iterable[Any]) -> list[str]:
    """Words of a command line, each option joined with its values: `--port 1` changes as one."""
    units: list[str] = []
    open_option = False
    for word in map(_shown, words):
        is_option = re.match(r"--?[A-Za-z]", word) is not None
        if open_option and not is_option:
            units[-1] += " " + word
        else:
            units.append(word)
            open_option = is_option
    return units


def _list_change(old: list[Any], new: list[Any]) -> str:
    units = _units(old), _units(new)
    before, after = map(Counter, units)
    gone, come = list((before - after).elements()), list((after - before).elements())
    if units[0] == units[1]:  # [1] and ["1"]
        return " -> ".join(_shortened(_plain(old), _plain(new)))
    if not gone and not come:
        return "same words in another order"
    shown = [
        f"{what} {', '.join(_beside(unit, others) for unit in changed)}"
        for what, changed, others in (("added", come, gone), ("removed", gone, come))
        if changed
    ]
    return "; ".join(shown)


def _beside(unit: str, others: Iterable[str]) -> str:
    """An option shortened so that it still differs from the one of the same name on the other side."""
    name = re.split(r"[ =]", unit, maxsplit=1)[0]
    other = next((o for o in others if re.split(r"[ =]", o, maxsplit=1)[0] == name), "")
    short, _ = _shortened(unit, other)
    return short if short.startswith(name) else f"{name} {short}"

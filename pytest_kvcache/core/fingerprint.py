"""What changed between two environments, as lines for a person. See `harness.environment` for the fingerprint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

ALWAYS_DIFFERENT = frozenset({"date", "load_average", "boot_time"})


def _units(words: Iterable[Any]) -> list[str]:
    """Words of a command line, each option joined with its values: `--port 1` changes as one."""
    units: list[str] = []
    open_option = False
    for word in map(str, words):
        is_option = re.match(r"--?[A-Za-z]", word) is not None
        if open_option and not is_option:
            units[-1] += " " + word
        else:
            units.append(word)
            open_option = is_option
    return units


def _list_change(old: Iterable[Any], new: Iterable[Any]) -> str:
    before, after = Counter(_units(old)), Counter(_units(new))
    changes = (("added", after - before), ("removed", before - after))
    return "; ".join(f"{what} {', '.join(c.elements())}" for what, c in changes if c) or "same words in another order"


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _section(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> list[str]:
    was, now = old.get(name) or {}, new.get(name) or {}
    lines = []
    for key in sorted({*was, *now} - ALWAYS_DIFFERENT):
        a, b = was.get(key), now.get(key)
        if isinstance(a, list) and isinstance(b, list) and a != b:
            lines.append(f"{key}: {_list_change(a, b)}")
        elif a != b:
            lines.append(f"{key}: {_shown(a)} -> {_shown(b)}")
    return lines


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What an upgrade may have varied, then the circumstances: `dist:torch: 2.12.0 -> 2.13.0`."""
    return _section(old, new, "subject") + _section(old, new, "context")


def identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What must match for two numbers to be comparable at all, and does not."""
    return _section(old, new, "identity")

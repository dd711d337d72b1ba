"""What a server decided itself (attention back end, block size, KV blocks), read from what it says of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .spec import Arm

PREFIX = "resolved:"


def resolved(text: str, patterns: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """`{name: value}` of the patterns that occur in a server's log or metrics page; what is not said is absent.

    A pattern's first group is the value, the last one when it has none that took part; several patterns may have one name.
    `1,823,372` is a number, `True` and `False` are truths, `None` is a text: the server said so. Ranks and engines each
    say their own: different values stand side by side, in the order of the text.
    """
    found: dict[str, dict[str, None]] = {}
    for name, pattern in patterns:
        for match in re.finditer(pattern, text, re.MULTILINE):
            said = next((g for g in match.groups() if g is not None), match[0]).strip()
            if said:
                found.setdefault(name, {})[said] = None
    return {name: _value(next(iter(said))) if len(said) == 1 else " + ".join(said) for name, said in found.items()}


def not_applied(found: Mapping[str, Any], arm: Arm) -> str:
    """How a server says that it did not do what an arm asks for (`found` of its log); empty when it does not say so. What was measured on
    it would stand under the wrong name."""
    instead = found.get("kv_dtype_not_applied")
    return f"kv_dtype={arm.kv_dtype!r} was not applied: the server fell back to {instead}" if instead and arm.kv_dtype != "auto" else ""


def _value(said: str) -> Any:
    if re.fullmatch(r"\d{1,3}(,\d{3})+|\d{1,15}", said):
        return int(said.replace(",", ""))
    return {"True": True, "False": False}.get(said, said)


def noted(subject: Mapping[str, Any], arm: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint's subject with what a server of `arm` resolved: `resolved:block_size`, `resolved:int8:block_size`.

    Starts that resolve differently are told apart: the values of all of them, in the order in which they were seen.
    """
    told = dict(subject)
    for name, value in found.items():
        key = PREFIX + (name if arm == "base" else f"{arm}:{name}")
        before = told.get(key)
        known = before if isinstance(before, list) else [] if before is None else [before]
        if value not in known:
            told[key] = [*known, value] if known else value
    return told

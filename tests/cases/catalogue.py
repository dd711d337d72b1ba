"""Where the cases lie, and what their vocabulary says of an answer that is to be compared.

A folder holds `index.json` and, for each case of it, `<case>.json` with raw bytes beside it. The folder here is `open`;
KV_CASES_DIR names another of the same form. Kinds that nothing here runs are passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOCUMENTATION = {"accept", "why", "note", "notes", "comment", "title"}


def folder() -> Path:
    return Path(os.environ.get("KV_CASES_DIR") or Path(__file__).with_name("open"))


def cases(kind: str) -> list[Any]:
    """The cases of one kind as parameters whose ids say `case` and the name."""
    index = json.loads((folder() / "index.json").read_text(encoding="utf-8"))
    names = [entry["case"] for entry in index["cases"] if entry.get("kind") == kind]
    return [pytest.param(load(name), id=f"case-{name}") for name in names]


def load(name: str) -> dict[str, Any]:
    return json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))


def body(case: Mapping[str, Any]) -> bytes:
    """The raw bytes of a case: the file that is not its sidecar."""
    (name,) = (f for f in case["files"] if not f.endswith(".json"))
    return (folder() / name).read_bytes()


@dataclass(frozen=True)
class Close:
    """Equality of the cases: times within a tolerance, counts and texts exactly, null only with null."""

    tolerance_ms: float
    relative: float = 1e-3

    def __call__(self, key: str, found: Any, wanted: Any) -> bool:
        if isinstance(wanted, list):
            same = isinstance(found, list | tuple) and len(found) == len(wanted)
            return same and all(self(key, f, w) for f, w in zip(found, wanted, strict=True))
        if isinstance(wanted, bool) or not isinstance(wanted, int | float):
            return type(found) is type(wanted) and found == wanted
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        if "_ms" in key:
            return abs(found - wanted) <= self.tolerance_ms
        return found == wanted or (isinstance(wanted, float) and abs(found - wanted) <= self.relative * abs(wanted))


EXACT = Close(0.005)


def contains(found: Any, wanted: Any) -> bool:
    """Whether the words of a failure hold what is wanted; both may be a list of words."""
    wanted = wanted if isinstance(wanted, list) else [wanted]
    return found is not None and all(str(w) in str(found) for w in wanted)


def includes(found: Any, wanted: Any) -> bool:
    """Whether all the wanted warnings are among those found."""
    return set(wanted or ()) <= set(found)


Test = Callable[[Any, Any], bool]


def problems(
    case: Mapping[str, Any], found: Mapping[str, Any], tests: Mapping[str, Test], close: Close, passed_over: Iterable[str] = ()
) -> list[str]:
    """Every field of `expected` that does not hold of what was found, in words. A field that nobody knows is one.

    A field is compared by its test in `tests`, or as a value. `accept` names other right values, some only together with a
    warning. A value that is within the tolerance but is exactly a listed wrong answer is wrong.
    """
    expected = {k: v for k, v in case["expected"].items() if k not in DOCUMENTATION and k not in set(passed_over)}
    accept = case.get("accept") or case["expected"].get("accept") or {}
    wrong = []
    for key, wanted in expected.items():
        if key not in found:
            wrong.append(f"{key}: this runner does not know the field, it expects {wanted!r}")
            continue
        value = found[key]
        test = tests.get(key) or (lambda f, w, key=key: close(key, f, w))
        others = [a["value"] for a in accept.get(key, ()) if _allowed(a, found)]
        cause = "" if any(EXACT(key, value, w) for w in (wanted, *others)) else _known(case, key, value)
        if cause or not any(test(value, w) for w in (wanted, *others)):
            wrong.append(f"{key}: {value!r} instead of {wanted!r}" + "".join(f" or {o!r}" for o in others) + cause)
    return wrong


def _allowed(alternative: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    warning = alternative.get("only_with_warning")
    return warning is None or warning in found["warnings"]


def _known(case: Mapping[str, Any], key: str, value: Any) -> str:
    """The cause of a value that the case lists among the wrong ones."""
    for wrong in case.get("wrong_answers", ()):
        if wrong["field"] == key and EXACT(key, value, wrong["value"]):
            return f" ({wrong['cause']})"
    return ""

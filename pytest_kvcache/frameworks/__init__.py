"""Serving frameworks, found by the entry-point group `pytest_kvcache.frameworks`: ours and third parties' alike.

Whatever an entry point and its adapter call it, a framework has one name here: in options, ini options and folders.
"""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import EntryPoint, entry_points

from ..core.framework import Framework
from ..core.spec import UserError

GROUP = "pytest_kvcache.frameworks"


def normal(name: str) -> str:
    """The name that `my-engine`, `My_Engine` and `my.engine` all are: `my_engine`."""
    return re.sub(r"\W+", "_", name).lower()


def _installed() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(normal(point.name), []).append(point)
    return found


def names() -> list[str]:
    """Names of the installed adapters, sorted; imports none of them."""
    return sorted(_installed())


def load(name: str) -> Framework:
    """The adapter called `name`, which is its own name from here on; UserError with the known names when there is none, when there are
    several, or when it cannot be imported."""
    from difflib import get_close_matches

    key, found = normal(name), _installed()
    if key not in found:
        near = get_close_matches(key, found, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--kv-framework={name}: no such framework. {hint}Known: {', '.join(sorted(found)) or 'none installed'}")
    value, *others = dict.fromkeys(point.value for point in found[key])
    if others:
        raise UserError(f"--kv-framework={name}: {value} and {others[0]} are both called {key}; uninstall one of them")
    try:
        adapter = found[key][0].load()
    except Exception as e:
        raise UserError(f"--kv-framework={name}: its adapter {value} cannot be imported: {e!r}") from e
    if not isinstance(adapter, Framework):
        raise UserError(f"--kv-framework={name}: {value} is {type(adapter).__name__}, not a Framework")
    return adapter if adapter.name == key else dataclasses.replace(adapter, name=key)


def default_name(kind: str) -> str:
    """The framework used when none is named, by kind of device (`cpu` or `gpu`), or for an `endpoint`."""
    return {"cpu": "transformers", "gpu": "vllm", "endpoint": "openai"}[kind]

"""Serving frameworks, found by the entry-point group `pytest_kvcache.frameworks`: ours and third parties' alike."""

from __future__ import annotations

from importlib.metadata import entry_points

from ..core.framework import Framework
from ..core.spec import UserError

GROUP = "pytest_kvcache.frameworks"


def names() -> list[str]:
    """Names of the installed adapters, sorted; imports none of them."""
    return sorted({e.name for e in entry_points(group=GROUP)})


def load(name: str) -> Framework:
    """The adapter called `name`; UserError with the known names when there is none or it cannot be imported."""
    from difflib import get_close_matches

    key = name.lower().replace("-", "_").replace(".", "_")
    found = {e.name: e for e in entry_points(group=GROUP)}
    if key not in found:
        near = get_close_matches(key, found, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--kv-framework={name}: no such framework. {hint}Known: {', '.join(sorted(found)) or 'none installed'}")
    try:
        adapter = found[key].load()
    except Exception as e:
        raise UserError(f"--kv-framework={name}: its adapter {found[key].value} cannot be imported: {e!r}") from e
    if not isinstance(adapter, Framework):
        raise UserError(f"--kv-framework={name}: {found[key].value} is {type(adapter).__name__}, not a Framework")
    return adapter


def default_name(kind: str) -> str:
    """The framework used when none is named, by kind of device (`cpu` or `gpu`), or for an `endpoint`."""
    return {"cpu": "transformers", "gpu": "vllm", "endpoint": "openai"}[kind]

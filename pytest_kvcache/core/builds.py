"""Two builds of a framework beside each other: what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .fingerprint import differences
from .resolved import PREFIX
from .spec import OTHER, Arm

SAME = "no distribution differs by name, version or source"


def distributions(other: Mapping[str, Any], own: Mapping[str, Any], first: Sequence[str] = ()) -> list[str]:
    """`name: other -> own` of every distribution that one interpreter has and the other has not as well, those of `first` first.

    Both are as `harness.interpreter.installed` gives them. The interpreter's own version is one of the lines.
    """
    was, now = ({"python": side["python"], **side["distributions"]} for side in (other, own))
    order = ["python", *first]
    names = sorted({*was, *now}, key=lambda n: (order.index(n) if n in order else len(order), n))
    return [f"{n}: {was.get(n, 'absent')} -> {now.get(n, 'absent')}" for n in names if was.get(n) != now.get(n)]


def changes(other: Mapping[str, Any], own: Mapping[str, Any], arms: Sequence[Arm]) -> list[str]:
    """What differs from the environment of the other build in that of this one; what servers of both resolved stands in `own`."""
    subject, moved = dict(own.get("subject", {})), {}
    for arm in arms:
        if not arm.build:
            continue
        name = arm.name.removesuffix(f".{OTHER}")
        told = f"{PREFIX}{arm.name}:"
        for key in [k for k in subject if k.startswith(told)]:
            moved[PREFIX + ("" if name == "base" else f"{name}:") + key.removeprefix(told)] = subject.pop(key)
    return differences({**other, "subject": {**other.get("subject", {}), **moved}}, {**own, "subject": subject})

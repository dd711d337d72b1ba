"""Scenarios that one run decides: of their arms a framework may have some, and one arm less costs no other. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .scenarios import Capacity, Scenario, Text
from .spec import Arm

# What begins the last part of a block's id: such a scenario is measured in another way, never in one block with a load.
KINDS: Mapping[type[Scenario], str] = {Text: "text:", Capacity: "capacity:"}


def kind_of(scenario: Scenario) -> str:
    """What begins the last part of its block's id; empty for a load."""
    return KINDS.get(type(scenario), "")


def narrowed(scenario: Scenario, has: Callable[[Arm], bool]) -> Scenario:
    """The scenario with those of its arms that there are, and with all where there is none; the reference of a text stays."""
    kept = getattr(scenario, "reference", None)
    arms = tuple(a for a in scenario.arms if a.name == kept or has(a))
    return dataclasses.replace(scenario, arms=arms) if arms else scenario


def stored_arms(plan: Mapping[str, Any], framework: str, model: str, scenario: Scenario) -> frozenset[str]:
    """Which arms of such a scenario a stored run has measured, from its plan."""
    begins = f"{framework}/{model}/{kind_of(scenario)}"
    found = (b for b in plan["blocks"] if b["id"].startswith(begins) and str(scenario) in b["scenarios"])
    return frozenset(name for b in found for name in b["arms"])

"""Which of what was collected can be measured, and with which arms. Knows the settings, imports no pytest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .core.scenarios import Capacity, Scenario, Text, Traffic

if TYPE_CHECKING:
    from .core.framework import Framework
    from .core.spec import Arm, Model
    from .options import Settings


def _framework(s: Settings, name: str) -> Framework:
    return next(e.framework for e in s.engines if e.framework.name == name)


def _model(s: Settings, key: str) -> Model:
    return next(m for m in s.models if m.key == key)


def _beside(s: Settings) -> str:
    """An option beside which nothing is measured that one run decides."""
    options = {"--kv-endpoint": s.endpoint, "--kv-ab": s.ab, "--kv-calibrate": s.calibrate}
    return next((o for o, given in options.items() if given), "")


def beyond(s: Settings, framework: str, model: str, scenario: Scenario, named: Iterable[str]) -> str:
    """Why the framework cannot do in this session what a scenario asks for, of whose arms a test's gates name some; empty when it can."""
    from .core.capacity import unsized
    from .core.checkpoints import as_served, lacking
    from .core.flags import beyond
    from .core.texts import unscored

    found, of = _framework(s, framework), _model(s, model)
    names = frozenset(named)
    decides = scenario.arms if isinstance(scenario, Traffic) else [a for a in scenario.arms if a.name in names]
    if why := next(filter(None, (lacking(found, of, arm) for arm in decides)), ""):
        return why
    told = dataclasses.replace(scenario, arms=tuple(as_served(found, of, arm) for arm in scenario.arms))
    if isinstance(told, Text):
        return unscored(found, told, names, beside=_beside(s), random=of.dummy)
    if isinstance(told, Capacity):
        return unsized(found, told, names, beside=_beside(s))
    if s.endpoint and (asked := next((a for a in scenario.arms if a.asked()), None)):
        return f"a server that runs already cannot be told {', '.join(asked.asked())} of the arm {asked.name}"
    return beyond(found, told)


def with_its_arms(s: Settings, framework: str, model: str, scenario: Scenario) -> Scenario:
    """The scenario with the arms that the framework has, or that the run had which is judged again. A load stays as it is."""
    from .core.arms import kind_of, narrowed, stored_arms
    from .core.checkpoints import as_served, lacking
    from .core.flags import unsupported
    from .core.texts import asks

    if not kind_of(scenario):
        return scenario
    if s.run:
        names = stored_arms(s.run[1]["plan"], framework, model, scenario)
        return narrowed(scenario, lambda arm: arm.name in names)
    found, of = _framework(s, framework), _model(s, model)

    def has(arm: Arm) -> bool:
        told = as_served(found, of, arm)
        can = asks(found, told) is not None if isinstance(scenario, Text) else not unsupported(found, told)
        return can and not lacking(found, of, arm)

    return narrowed(scenario, has)

"""Fixtures `kv_*`: what a scenario test works with. Tests only read verdicts; the plugin has measured before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from .core.spec import ClosedLoop, Framework, Gpu, Model
from .options import Settings
from .report import terminal

SETTINGS = pytest.StashKey[Settings]()
BILL = pytest.StashKey[float]()
VERDICTS = pytest.StashKey[list[dict[str, Any]]]()


@dataclass(frozen=True, kw_only=True)
class KvResult:
    """What was found for one test. `verdicts` are JSON-plain, one a gate and arm; `metrics` has every run's figures."""

    scenario: ClosedLoop
    verdicts: tuple[dict[str, Any], ...]
    metrics: tuple[dict[str, Any], ...] = field(default=())


@pytest.fixture(scope="session")
def kv_gpu(pytestconfig: pytest.Config) -> Gpu:
    """The device under test: its row of the catalogue."""
    return pytestconfig.stash[SETTINGS].gpu


@pytest.fixture(scope="session")
def kv_framework(request: pytest.FixtureRequest) -> Framework:
    """The serving framework under test; parametrized over --kv-framework."""
    settings = request.config.stash[SETTINGS]
    name = getattr(request, "param", settings.engines[0].framework.name)
    return next(e.framework for e in settings.engines if e.framework.name == name)


@pytest.fixture(scope="session")
def kv_model(request: pytest.FixtureRequest) -> Model:
    """The model under test; parametrized over --kv-model."""
    settings = request.config.stash[SETTINGS]
    key = getattr(request, "param", settings.models[0].key)
    return next(m for m in settings.models if m.key == key)


@pytest.fixture
def kv_scenario(request: pytest.FixtureRequest) -> ClosedLoop:
    """The scenario of this test: parametrize it with scenarios (`ids=str`)."""
    scenario = getattr(request, "param", None)
    if not isinstance(scenario, ClosedLoop):
        pytest.fail("parametrize kv_scenario with scenarios, for example ClosedLoop(isl=512, osl=128, concurrency=8)", pytrace=False)
    return scenario


@pytest.fixture
def kv_result(request: pytest.FixtureRequest, kv_framework: Framework, kv_model: Model, kv_scenario: ClosedLoop) -> KvResult:
    """The measured scenario with the verdicts of this test's gates. Never raises for what was measured."""
    impl: Any = request.config.pluginmanager.get_plugin("kvcache-session")
    result: KvResult = impl.result_of(request.node)
    return result


@pytest.fixture
def kv_gate() -> Callable[[KvResult], None]:
    """`kv_gate(kv_result)` fails the test when a gate fails, with the cause and the cure."""

    def gate(result: KvResult) -> None:
        if any(v["outcome"] == "failed" for v in result.verdicts):
            pytest.fail(terminal.failure(result.verdicts), pytrace=False)

    return gate

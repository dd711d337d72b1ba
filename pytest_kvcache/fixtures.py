"""Fixtures `kv_*`: what a scenario test works with. Tests only read verdicts; the plugin has measured before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from .core.framework import Framework
from .core.scenarios import Scenario
from .core.spec import Gpu, Model, UserError
from .options import Settings

PARAMETRIZE = "parametrize kv_scenario with scenarios, for example ClosedLoop(isl=512, osl=128, concurrency=8)"
SETTINGS = pytest.StashKey[Settings]()
BILL = pytest.StashKey[float]()


@dataclass(frozen=True, kw_only=True)
class KvResult:
    """What was found for one test. `verdicts` are JSON-plain, one a gate and arm; `metrics` has every run's figures."""

    scenario: Scenario
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
def kv_scenario(request: pytest.FixtureRequest) -> Scenario:
    """The scenario of this test: parametrize it with scenarios (`ids=str`)."""
    scenario = getattr(request, "param", None)
    if not isinstance(scenario, Scenario):
        pytest.fail(PARAMETRIZE, pytrace=False)
    return scenario


@pytest.fixture
def kv_result(request: pytest.FixtureRequest, kv_framework: Framework, kv_model: Model, kv_scenario: Scenario) -> KvResult:
    """The measured scenario with the verdicts of this test's gates. Never raises for what was measured."""
    impl: Any = request.config.pluginmanager.get_plugin("kvcache-session")
    result: KvResult = impl.result_of(request.node)
    return result


@pytest.fixture
def kv_gate() -> Callable[[KvResult], None]:
    """`kv_gate(kv_result)` fails the test when a gate fails, with the cause and the cure."""

    def gate(result: KvResult) -> None:
        from .report import terminal

        if any(v["outcome"] == "failed" for v in result.verdicts):
            pytest.fail(terminal.failure(result.verdicts), pytrace=False)

    return gate


@pytest.fixture
def kv_endpoint(request: pytest.FixtureRequest, kv_framework: Framework, kv_model: Model) -> Iterator[Any]:
    """A server of the framework with the model, alone on the device while the test runs: measure by hand on it.

    Its `server.base_url` takes any client; `measure(scenario)` gives a Trace.
    """
    impl: Any = request.config.pluginmanager.get_plugin("kvcache-session")
    with ExitStack() as stack:
        yield _invalid_is_a_failure(lambda: stack.enter_context(impl.session.by_hand(kv_framework.name, kv_model.key)))


@pytest.fixture
def kv_drive(request: pytest.FixtureRequest, kv_framework: Framework, kv_model: Model) -> Iterator[Callable[[Scenario], dict[str, float]]]:
    """`kv_drive(scenario)` measures on a server of its own, started at the first call, and gives the metrics.

    A server that does not start and a run that is invalid fail the test, in the call.
    """
    impl: Any = request.config.pluginmanager.get_plugin("kvcache-session")
    started: list[Any] = []
    with ExitStack() as stack:

        def drive(scenario: Scenario) -> dict[str, float]:
            if not started:
                server = impl.session.by_hand(kv_framework.name, kv_model.key)
                started.append(_invalid_is_a_failure(lambda: stack.enter_context(server)))
            from .core.metrics import measure
            from .core.validity import trace_problem
            from .report import terminal

            trace = _invalid_is_a_failure(lambda: started[0].measure(scenario))
            if problem := trace_problem(trace):
                pytest.fail(terminal.told(f"invalid: {problem[0]}"), pytrace=False)
            return measure(trace)

        yield drive


def _invalid_is_a_failure(step: Callable[[], Any]) -> Any:
    from .core.validity import Spoiled
    from .report import terminal

    try:
        return step()
    except (UserError, Spoiled) as e:
        pytest.fail(terminal.told(f"invalid: {e}"), pytrace=False)

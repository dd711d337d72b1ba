"""Hooks of pytest-kvcache. Mark your implementations `optionalhook=True`, so that they are harmless without it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookspec(firstresult=True)
def pytest_kv_runner(config: pytest.Config, framework: str, model: str) -> Any:
    """Make the runs of an engine and a model yourself: an in-process driver, a remote bench, recorded data.

    Return an object like `pytest_kvcache.harness.measure.Runner` (`environment`, `workload`, `start`, `canary`), or None for the
    framework's own server. With `--kv-ab`, arms whose `build` is `other` are to run on the other build. A runner with `in_turns`
    can measure servers that live side by side; without it arms follow each other::

        @pytest.hookimpl(optionalhook=True)
        def pytest_kv_runner(config, framework, model):
            return RecordedRunner("runs/") if framework == "transformers" else None
    """


def pytest_kv_verdict(config: pytest.Config, record: dict[str, Any]) -> None:
    """Observe each verdict on the controller, JSON-plain as it stands in run.json::

    @pytest.hookimpl(optionalhook=True)
    def pytest_kv_verdict(config, record):
        send_to_dashboard(record["key"], record["verdict"], record["value"])
    """

"""The rule about other load on the machine: one line that names who took the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvcache.core.validity import load_problem

BURNER = {"pid": 4711, "name": "python", "cmdline": "python burn.py", "cores": 0.971}


def seen(**changes: Any) -> dict[str, Any]:
    return {"cores": 2, "foreign_cores": 0.02, "steal_cores": 0.0, "foreign": [], **changes}


def test_quiet_machine_is_no_problem() -> None:
    assert load_problem(seen()) is None


def test_other_processes_are_named() -> None:
    assert load_problem(seen(foreign_cores=0.98, foreign=[BURNER])) == (
        "other processes used 0.98 of 2 cores (allowed 0.3): pid 4711 python burn.py 0.97"
    )


def test_a_process_without_command_line_or_pid_goes_by_its_name() -> None:
    rows = [
        {"pid": 7, "name": "kworker/0:1", "cmdline": "", "cores": 0.4},
        {"pid": None, "name": "processes outside this container", "cmdline": "", "cores": 0.2},
    ]
    problem = load_problem(seen(foreign_cores=0.6, foreign=rows))
    assert problem is not None
    assert problem.endswith(": pid 7 kworker/0:1 0.40, processes outside this container 0.20")


def test_steal_is_a_reason_of_its_own_and_adds_to_the_other() -> None:
    assert load_problem(seen(steal_cores=0.52)) == "the hypervisor took 0.52 of 2 cores (allowed 0.3)"
    both = load_problem(seen(steal_cores=0.52, foreign_cores=0.5)) or ""
    assert both.startswith("other processes used 0.50")
    assert "; the hypervisor" in both


@pytest.mark.parametrize("figures", [{}, {"foreign_cores": None, "steal_cores": None, "cores": None, "foreign": []}])
def test_unknown_figures_are_no_problem(figures: dict[str, Any]) -> None:
    assert load_problem(figures) is None


def test_limits_can_be_set_and_the_limit_itself_is_allowed() -> None:
    assert load_problem(seen(foreign_cores=0.3)) is None
    assert load_problem(seen(foreign_cores=0.98), max_foreign_cores=1.0) is None
    assert load_problem(seen(foreign_cores=0.02), max_foreign_cores=0.01) is not None


def test_nan_is_never_allowed() -> None:
    assert load_problem(seen(foreign_cores=float("nan"))) is not None

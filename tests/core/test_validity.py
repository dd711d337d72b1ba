"""The rule about other load on the machine: one line that names who took the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.validity import (
    cache_problem,
    client_problem,
    counters_problem,
    gpu_problems,
    hit_rate,
    load_problem,
    trace_problem,
)

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


def test_the_limit_itself_is_allowed() -> None:
    assert load_problem(seen(foreign_cores=0.3)) is None
    assert load_problem(seen(foreign_cores=0.31)) is not None


def test_beside_a_gpu_others_may_take_a_quarter_of_the_cores_and_two_at_most() -> None:
    """Seen on an H200 host of 16 cores: its kernel's own threads take 0.2 to 0.5, and the engine's figures do not follow them."""
    host = {"cores": 16, "device": "gpu"}
    assert load_problem(seen(foreign_cores=0.51, **host)) is None
    assert load_problem(seen(foreign_cores=2.2, **host)) == "other processes used 2.20 of 16 cores (allowed 2)"
    assert load_problem(seen(foreign_cores=1.1, cores=4, device="gpu")) is not None
    assert load_problem(seen(steal_cores=0.6, **host)) is not None
    assert load_problem(seen(foreign_cores=1.9, steal_cores=1.9, device="attached")) is None
    assert load_problem(seen(foreign_cores=0.51, cores=16)) is not None
    assert load_problem(seen(foreign_cores=0.31, cores=1, device="gpu")) is not None


STRANGER = {"pid": 977, "name": "python", "percent": 41.0, "mib": 28610}


@pytest.mark.parametrize(("gpu", "problems"), [
    ({}, []), ({"readings": 35, "slowed": {}, "foreign": []}, []), ({"slowed": {"power cap": 1.0, "heat": 0.02}}, []),
    ({"slowed": {"heat": 0.25}}, ["the GPU was slowed (heat) for 25% of the time (allowed 2%)"]),
    ({"slowed": {"power brake": 0.03, "hardware slowdown": 1.0}},
     ["the GPU was slowed (power brake) for 3% of the time (allowed 2%)", "the GPU was slowed (hardware slowdown) for 100% of the time (allowed 2%)"]),
    ({"slowed": {"heat": float("nan")}}, ["the GPU was slowed (heat) for nan% of the time (allowed 2%)"]),
    ({"foreign": [STRANGER]}, ["another process used 41 % of the GPU (allowed 2): pid 977 (python), 28610 MiB"]),
    ({"foreign": [STRANGER | {"percent": 0.0}, STRANGER | {"percent": 2.0}]}, []),
    ({"foreign": [STRANGER | {"percent": None}]},
     ["another process is on the GPU, and whether it computes cannot be read: pid 977 (python), 28610 MiB"]),
])  # fmt: skip
def test_a_gpu_that_was_slowed_or_shared_spoils_a_window(gpu: dict[str, Any], problems: list[str]) -> None:
    assert gpu_problems(gpu) == problems
    assert load_problem(seen(gpu=gpu, device="gpu")) == ("; ".join(problems) or None)
    trace = Trace(scenario="s", arm="a", run=1, workload="w", isl=1, osl=1, records=(), load=seen(gpu=gpu, device="gpu"))
    if problems:
        assert trace_problem(trace) == ("; ".join(problems), True), "the machine is to blame, not the engine"


def test_nan_is_never_allowed() -> None:
    assert load_problem(seen(foreign_cores=float("nan"))) is not None


# --- our own client, the server's answers, its counters ---


def record(i: int, sent: float = 0.0, **more: Any) -> RequestRecord:
    known = {"first_s": sent + 0.1, "last_s": sent + 0.5, "end_s": sent + 0.5, "input_tokens": 10, "output_tokens": 5, "events": 5}
    return RequestRecord(index=i, sent_s=sent, **{**known, **more})


def trace(records: Any, *, concurrency: int | None = None, **load: Any) -> Trace:
    return Trace(
        scenario="s",
        arm="base",
        run=1,
        workload="w",
        isl=10,
        osl=5,
        records=tuple(records),
        concurrency=concurrency,
        load={**seen(), **load},
    )


def client(**figures: Any) -> dict[str, Any]:
    return {"cores": 0.1, "stamps": "kernel", "loop_lag_ms": {"p99": 1.0}, "slot_idle_s": 0.001, "clock_steps": 0, **figures}


GOOD = [record(i, i * 0.5) for i in range(8)]


def test_a_healthy_client_is_no_problem() -> None:
    assert trace_problem(trace(GOOD, concurrency=1, client=client())) is None
    assert trace_problem(trace(GOOD, concurrency=1)) is None, "a runner of somebody else says nothing of itself"


@pytest.mark.parametrize(("figures", "words"), [
    ({"cores": 0.82}, "its busiest process used 0.82 of one core (allowed 0.7)"),
    ({"loop_lag_ms": {"p99": 90.0}}, "its loop lagged 90.0 ms (99th percentile, allowed 50)"),  # half of a TPOT of 100 ms
    ({"loop_lag_ms": {"p99": 9.0}, "stamps": "read"}, "its loop lagged 9.0 ms (99th percentile, allowed 5)"),
    ({"slot_idle_s": 0.4}, "its streams were idle 10% of the time between an answer and the next request (allowed 5%)"),
    ({"clock_steps": 1}, "clock was set"),
    ({"cores": float("nan")}, "used nan of one core"),
])  # fmt: skip
def test_a_client_that_is_too_slow_is_named_with_its_figures(figures: dict[str, Any], words: str) -> None:
    problem, machine = trace_problem(trace(GOOD, concurrency=1, client=client(**figures))) or ("", False)
    assert problem.startswith("the client was too slow: ")
    assert words in problem
    assert machine, "measured once more: it was not the engine"


def test_a_lag_below_a_tokens_gap_is_hidden_by_the_kernels_stamps() -> None:
    assert client_problem(trace(GOOD, concurrency=1, client=client(loop_lag_ms={"p99": 40.0}))) is None


def test_an_open_loop_that_lags_its_schedule() -> None:
    late = [record(i, i * 0.5 + 0.02, scheduled_s=i * 0.5) for i in range(8)]
    assert "it sent 20.0 ms behind its own schedule (99th percentile, allowed 5)" in (client_problem(trace(late)) or "")
    connecting = [record(i, i * 0.5 + 0.02, scheduled_s=i * 0.5, connect_s=0.02) for i in range(8)]
    assert client_problem(trace(connecting)) is None, "a server that is slow to accept is no lag of ours"


def test_failures_are_named_as_what_they_are_though_they_leave_the_client_idle() -> None:
    refused = [record(i, 0.0, outcome="http_status", error="HTTP 503: busy", first_s=None, last_s=None, end_s=0.003) for i in range(8, 40)]
    problem, machine = trace_problem(trace([*GOOD, *refused], concurrency=8, client=client(slot_idle_s=9.0))) or ("", True)
    assert problem == "32 of 40 requests failed (32 http_status); the first: HTTP 503: busy"
    assert not machine


@pytest.mark.parametrize(("counted", "problem"), [
    ({"output": 40.0, "input": 80.0}, None), ({"output": 41.0}, None), ({}, None),
    ({"output": 50.0}, "the server counted 50 output tokens during the load, its answers add up to 40"),
    ({"output": 40.0, "input": 800.0}, "the server counted 800 input tokens during the load, its answers add up to 80"),
])  # fmt: skip
def test_client_and_server_must_count_the_same_tokens(counted: dict[str, float], problem: str | None) -> None:
    assert counters_problem(trace(GOOD, server_tokens=counted)) == problem


@pytest.mark.parametrize(("before", "after", "how", "words"), [
    ({"prefix_queries": 1000, "prefix_hits": 900}, {"prefix_queries": 11000, "prefix_hits": 9400}, {}, "the prefix cache was warm: 85.0%"),
    ({"prefix_queries": 0, "prefix_hits": 0}, {"prefix_queries": 1000, "prefix_hits": 9}, {}, None),
    ({"prefix_queries": 0, "prefix_hits": 0}, {"prefix_queries": 1000, "prefix_hits": 0}, {"cold": False}, "the prefix cache was cold"),
    ({"preemptions": 3}, {"preemptions": 5}, {}, "the server preempted 2 requests"), ({"preemptions": 3}, {"preemptions": 5}, {"preempted": True}, None),
    ({"preemptions": 3, "output": 9}, {"preemptions": 0, "output": 2}, {}, "counters fell during the load (output, preemptions)"),
    ({}, {}, {}, None), ({}, {"preemptions": 5}, {}, None),
    # SGLang's page has these from their first use on
    ({"prefix_queries": 0}, {"prefix_queries": 1000, "prefix_hits": 500}, {}, "the prefix cache was warm: 50.0%"),
    ({"output": 1}, {"output": 9, "preemptions": 5}, {}, "the server preempted 5 requests"),
])  # fmt: skip
def test_the_servers_own_counters(before: Any, after: Any, how: Any, words: str | None) -> None:
    problem = cache_problem(before, after, **how)
    assert (problem is None) if words is None else (problem is not None and words in problem)


def test_counters_that_could_not_be_compared_are_no_clean_bill_and_are_read_once_more() -> None:
    problem = trace_problem(trace(GOOD, counters_lost="after the load: unreachable"))
    assert problem == ("the server's metrics page had no counters after the load: unreachable", True)


def test_no_hit_rate_without_questions_or_from_a_reset() -> None:
    assert hit_rate({"prefix_queries": 5, "prefix_hits": 1}, {"prefix_queries": 5, "prefix_hits": 1}) is None
    assert hit_rate({"prefix_queries": 10, "prefix_hits": 9}, {"prefix_queries": 20, "prefix_hits": 4}) is None
    assert hit_rate({}, {"prefix_queries": 20, "prefix_hits": 4}) is None

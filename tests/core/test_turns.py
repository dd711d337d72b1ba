"""Arms in turns: short windows stitched into one trace, what counts as a round, the ratio of a round."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.measurement import measurement
from pytest_kvcache.core.metrics import measure
from pytest_kvcache.core.stitched import stitched, windows_of
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.core.windows import rounds_of, runs_of, values_of

from .recorded_runs import trace

TURNS = 8


def windows(**more):
    return [trace(seed, **more) for seed in range(TURNS)]


def test_a_stitched_trace_holds_every_request_once_in_order_and_is_valid():
    parts = windows()
    whole = stitched(parts)
    assert [r.index for r in whole.records] == list(range(sum(len(p.records) for p in parts)))
    ends = [max(r.end_s for r in w.records) for w in windows_of(whole)]
    assert all(min(r.sent_s for r in w.records) > end for w, end in zip(windows_of(whole)[1:], ends, strict=False))
    assert sum(whole.arrivals["n"]) == sum(sum(p.arrivals["n"]) for p in parts)
    assert sum(whole.itl["n"]) == sum(sum(p.itl["n"]) for p in parts)
    assert whole.arrivals["ms"] == sorted(set(whole.arrivals["ms"]))
    assert trace_problem(whole) is None


def test_its_windows_have_the_figures_that_they_had_alone():
    parts = windows()
    for alone, cut in zip(parts, windows_of(stitched(parts)), strict=True):
        then, now = measure(alone), measure(cut)
        for name in ("output_tok_s", "req_s", "ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50"):
            assert math.isclose(then[name], now[name], rel_tol=2e-3), name
    assert windows_of(parts[0]) == []


def test_latencies_of_the_whole_are_those_of_all_requests():
    parts = windows()
    whole = measure(stitched(parts))
    every = sorted(1e3 * (r.first_s - r.sent_s) for p in parts for r in p.records)
    assert math.isclose(whole["ttft_ms.p50"], every[math.ceil(len(every) / 2) - 1], rel_tol=1e-9)


def test_what_broke_a_limit_in_one_window_shows_in_the_whole():
    for change, words in (
        ({"client": {"cores": 0.9}}, "used 0.90 of one core"), ({"client": {"clock_steps": 1}}, "clock was set"),
        ({"foreign_cores": 8.0, "foreign": [{"pid": 1, "name": "burn", "cores": 8.0}]}, "burn"),
        ({"server_tokens": {"output": 1.0}}, "the server counted"),
        ({"counters_lost": "after the load: unreachable"}, "had no counters after the load: unreachable"),
    ):  # fmt: skip
        parts = windows()
        load = parts[3].load
        client = load["client"] | change.get("client", {})
        parts[3] = dataclasses.replace(parts[3], load=load | {**change, "client": client})
        assert words in trace_problem(stitched(parts))[0]


def test_the_machine_is_that_of_all_windows_by_their_length():
    parts = windows()
    for part, wall, foreign in zip(parts, (1.0, 3.0) * 4, (0.4, 0.0) * 4, strict=True):
        part.load.update(wall_s=wall, foreign_cores=foreign)
    found = stitched(parts).load
    assert (found["wall_s"], found["foreign_cores"]) == (16.0, 0.1)
    assert found["asked"] == sum(p.load["asked"] for p in parts)


def test_an_idle_partner_that_does_not_count_takes_the_other_with_it():
    one = stitched(windows())
    assert trace_problem(one) is None
    one.load["beside"] = "other processes used 0.9 cores"
    problem, by_machine = trace_problem(one)
    assert "in turns" in problem
    assert by_machine


def row(run, arm="new", valid=True, value=1.0, turns=None):
    found = {"scenario": "s", "arm": arm, "run": run, "valid": valid, "metrics": {"tpot_ms.p50": value, "ttft_ms.p99": value}}
    return found | ({"windows": {"tpot_ms.p50": turns, "ttft_ms.p99": turns}} if turns else {})


def test_the_last_that_counts_stands_for_its_run_and_a_round_needs_both():
    rows = [
        row(1, value=1),
        row(1, value=2),
        row(2, valid=False),
        row(3, value=3),
        row(1, "old", value=9),
        row(2, "old"),
        row(3, "old", value=8),
    ]
    assert [m["metrics"]["tpot_ms.p50"] for m in runs_of(rows, "s", "new")] == [2, 3]
    pairs = rounds_of(rows, "s", ("old", "new"))
    assert [(a["metrics"]["tpot_ms.p50"], b["metrics"]["tpot_ms.p50"]) for a, b in pairs] == [(9, 2), (8, 3)]
    assert rounds_of(rows, "t", ("old", "new")) == []


factors = st.lists(st.floats(0.5, 2.0), min_size=TURNS, max_size=TURNS)


def ratio(one, other, metric="tpot_ms.p50"):
    (old,), (new,) = values_of([(row(1, "old", turns=one), row(1, turns=other))], metric)
    return new / old


@given(factors, st.floats(0.5, 2.0))
def test_whatever_the_machine_does_between_turns_the_ratio_is_exact(machine, build):
    assert math.isclose(ratio(machine, [m * build for m in machine]), build, rel_tol=1e-9)


@given(factors, factors)
def test_arms_swapped_are_the_ratio_inverted(one, other):
    assert math.isclose(ratio(one, other) * ratio(other, one), 1.0, rel_tol=1e-9)


@given(factors, st.lists(st.integers(0, TURNS - 1), min_size=1, max_size=2, unique=True), st.floats(0.1, 10))
def test_a_quarter_of_the_windows_spoiled_at_one_end_moves_nothing(machine, where, far):
    other = [1.1 * m * (far if i in where else 1.0) for i, m in enumerate(machine)]
    assert math.isclose(ratio(machine, other), 1.1, rel_tol=1e-9)


def test_a_tail_is_that_of_all_requests_and_so_is_what_no_window_has():
    noisy = [1.0] * 6 + [9.0, 9.0]
    assert ratio([1.0] * 8, noisy, "ttft_ms.p99") == 1.0, "of the whole measurement, not of the windows"
    (old,), (new,) = values_of([(row(1, "old", value=2.0, turns=[None] * 8), row(1, value=3.0, turns=[1.0] * 8))], "tpot_ms.p50")
    assert (old, new) == (2.0, 3.0)
    assert values_of([(row(1, value=2.0), row(1, value=4.0))], "tpot_ms.p50") == ([2.0], [4.0])


def test_on_a_machine_of_two_speeds_the_windows_see_what_the_whole_does_not():
    """A machine that changes its speed by 20 % every few windows: the round's ratio by windows, and by the two totals."""
    rng, by_windows, by_totals = random.Random(5), [], []
    for _ in range(40):
        state, old, new = 1.0, [], []
        for _ in range(TURNS):
            for side, build in ((old, 1.0), (new, 1.05)):
                state = rng.choice((1.0, 1.2)) if rng.random() < 0.15 else state
                side.append(state * build * math.exp(rng.gauss(0, 0.01)))
        by_windows.append(math.log(ratio(old, new) / 1.05))
        by_totals.append(math.log(sum(new) / sum(old) / 1.05))
    spread = [math.sqrt(sum(e * e for e in errors) / len(errors)) for errors in (by_windows, by_totals)]
    assert spread[0] < 0.6 * spread[1]
    assert abs(sum(by_windows)) / 40 < 0.005


def test_a_measurement_in_turns_has_the_figures_of_each_window():
    found = measurement(stitched(windows()), None)
    assert {len(v) for v in found["windows"].values()} == {TURNS}
    assert set(found["windows"]) <= set(found["metrics"])
    assert "windows" not in measurement(trace(1), None)


@pytest.mark.parametrize("turns", [1, 3])
def test_few_windows_are_all_taken(turns):
    assert math.isclose(ratio([1.0] * turns, [1.2] * turns), 1.2)

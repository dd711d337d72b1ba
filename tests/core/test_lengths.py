"""Lengths that are drawn: the same for a seed everywhere, within their bounds, as their names say."""

import json
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.lengths import Empirical, LogNormal, Uniform, drawn, longest, shortest, spread
from pytest_kvcache.core.metrics import measure
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop
from pytest_kvcache.core.spec import Arm, SpecError, UserError, json_hash
from pytest_kvcache.core.stitched import stitched, windows_of
from pytest_kvcache.core.validity import requests_problem
from pytest_kvcache.core.workload import WARM_UP, make_requests, workload_hash
from pytest_kvcache.harness.measure import _nothing
from pytest_kvcache.harness.running import RunningEngine

WORDS = tuple(f"w{i}" for i in range(2000))
UNIFORM, NORMAL = Uniform(low=16, high=64), LogNormal(median=128, sigma=0.8, high=1024)
SEEN = Empirical(name="seen", values=(300, 5, 80, 80))
MIXED = OpenLoop(isl=NORMAL, osl=UNIFORM, rate=2, requests=400)


@st.composite
def lengths(draw):
    low, middle, high = sorted(draw(st.lists(st.integers(1, 10**6), min_size=3, max_size=3)))
    return draw(st.one_of(
        st.just(low), st.just(Uniform(low=low, high=high)), st.just(LogNormal(median=middle, sigma=draw(st.floats(0.01, 4)), low=low, high=high)),
        st.just(Empirical(name="x", values=(low, high, middle))),
    ))  # fmt: skip


@given(lengths(), st.integers(0, 2**32), st.integers(1, 60))
def test_what_is_drawn_lies_within_the_bounds_and_a_warm_up_meets_the_longest(length, seed, n):
    found = drawn(length, random.Random(seed), n)
    assert len(found) == n and all(shortest(length) <= x <= longest(length) for x in found)
    assert found == drawn(length, random.Random(seed), n)
    covered = spread(length, n)
    assert len(covered) == n and covered[0] == longest(length) and covered == sorted(covered, reverse=True)


@pytest.mark.parametrize(("length", "quantiles"), [
    (UNIFORM, {0.0: 16, 0.5: 40, 0.999: 64, 1.0: 64}), (NORMAL, {0.0: 1, 0.5: 128, 0.8413447: 285, 0.1586553: 58, 1.0: 1024}),
    (SEEN, {0.0: 5, 0.3: 80, 0.74: 80, 0.76: 300, 1.0: 300}), (LogNormal(median=9, sigma=1, low=8, high=10), {0.01: 8, 0.5: 9, 0.99: 10}),
])  # fmt: skip
def test_quantiles_are_those_of_the_distribution(length, quantiles):
    assert {p: length.quantile(p) for p in quantiles} == quantiles


def test_the_share_of_each_uniform_number_is_the_same():
    counts = [drawn(Uniform(low=1, high=4), random.Random(1), 40_000).count(x) for x in range(1, 5)]
    assert all(abs(n - 10_000) < 5 * math.sqrt(7500) for n in counts)


@pytest.mark.parametrize("make", [
    lambda: Uniform(low=5, high=4), lambda: Uniform(low=0, high=4), lambda: Uniform(low=True, high=4), lambda: Uniform(low=1.5, high=4),
    lambda: LogNormal(median=9, sigma=0, high=10), lambda: LogNormal(median=9, sigma=math.nan, high=10), lambda: LogNormal(median=11, sigma=1, high=10),
    lambda: Empirical(name="a-b", values=(1,)), lambda: Empirical(name="x", values=()), lambda: Empirical(name="x", values=(0, 1)),
    lambda: ClosedLoop(isl="512", osl=4, concurrency=1), lambda: ClosedLoop(isl=4, osl=0, concurrency=1),
])  # fmt: skip
def test_what_is_no_length_is_refused(make):
    with pytest.raises(SpecError, match=r"must be|whole numbers|needs values|may hold"):
        make()


def test_ids_tell_lengths_apart_and_may_be_part_of_a_key():
    assert str(MIXED) == "islln128x0.8max1024-osl16to64-r2-n400"
    assert (
        str(ClosedLoop(isl=SEEN, osl=LogNormal(median=9, sigma=1, low=8, high=10), concurrency=2))
        == f"islseen.{json_hash(SEEN.values)[:6]}-oslln9x1max10min8-c2"
    )


def test_requests_have_the_lengths_drawn_the_same_in_every_process():
    requests = make_requests(MIXED, WORDS)
    assert [len(r.prompt.split()) for r in requests] == [r.isl for r in requests]
    assert [(r.isl, r.osl) for r in requests[:6]] == FIRST
    assert len({r.isl for r in requests}) > 100 and {r.osl for r in requests} == set(range(16, 65))
    assert [(r.isl, r.osl) for r in make_requests(MIXED, WORDS, n=6)] == FIRST, "fewer are the first of them"
    other = Empirical(name="seen", values=(300, 5, 80, 81))
    assert str(other) != str(SEEN)
    assert workload_hash(
        make_requests(ClosedLoop(isl=SEEN, osl=1, concurrency=1), WORDS), ClosedLoop(isl=SEEN, osl=1, concurrency=1)
    ) != workload_hash(make_requests(ClosedLoop(isl=other, osl=1, concurrency=1), WORDS), ClosedLoop(isl=other, osl=1, concurrency=1))


FIRST = [(140, 57), (170, 53), (262, 59), (16, 41), (195, 43), (43, 31)]


def test_a_warm_up_covers_the_shapes_and_meets_the_longest_first():
    warm = make_requests(MIXED, WORDS, part=WARM_UP, n=8)
    assert warm[0].isl == 1024 and warm[0].osl < 24, "no context need hold the longest of both"
    assert warm[-1].isl < 64 and warm[-1].osl == 64


def test_another_time_has_other_words_of_the_same_lengths():
    once, again = make_requests(MIXED, WORDS), make_requests(MIXED, WORDS, salt=" 2 of another session")
    assert [(r.isl, r.osl) for r in once] == [(r.isl, r.osl) for r in again]
    assert not {r.prompt for r in once} & {r.prompt for r in again}
    fixed = ClosedLoop(isl=8, osl=4, concurrency=2)
    assert make_requests(fixed, WORDS, part="measured", salt=" 2") == make_requests(fixed, WORDS, part="measured 2")


def test_of_a_window_that_was_cut_short_no_length_is_told():
    assert {k: v for k, v in _nothing(MIXED, Arm(), 1).items() if k in ("isl", "osl")} == {"isl": 0, "osl": 0}
    json.dumps(_nothing(MIXED, Arm(), 1))


def test_a_server_that_adds_more_than_a_prompt_has_is_said_before_the_load():
    running = SimpleNamespace(_again=lambda scenario: "")
    requests = make_requests(MIXED, WORDS)
    with pytest.raises(UserError) as told:
        RunningEngine._load(running, MIXED, requests, 40, part="measured")
    least = min(r.isl for r in requests)
    assert str(told.value) == (
        f"{MIXED}: the server adds 40 tokens to every prompt, and one of {least} is among them; ask for 41 at least (`low` of drawn lengths)"
    )


def record(i, isl, osl, outcome="ok"):
    return RequestRecord(i, float(i), None, 0.0, i + 0.1, i + 0.1, i + 0.5, i + 0.5, isl, osl, 1, osl, 200, outcome, "", ())


def mixed(*records):
    lengths = {"isl": [10, 30], "osl": [4, 8]}
    return Trace(
        scenario="s", arm="base", run=1, workload="w", isl=20, osl=6, records=records, itl={"us": [5000], "n": [30]}, lengths=lengths
    )


def test_each_request_is_held_against_its_own_lengths():
    assert requests_problem(mixed(record(0, 10, 4), record(1, 30, 8))) is None
    assert requests_problem(mixed(record(0, 20, 4))) == "request 0: the server counted 20 input tokens, 10 were sent"
    assert requests_problem(mixed(record(1, 30, 6))) == "request 1: 6 output tokens, 8 were asked for"


def test_windows_laid_end_to_end_keep_what_each_request_was_asked_for():
    first, second = (
        mixed(record(0, 10, 4), record(1, 30, 8)),
        Trace(
            scenario="s",
            arm="base",
            run=1,
            workload="w",
            isl=12,
            osl=5,
            records=(record(0, 12, 5), record(1, 12, 5)),
            itl={"us": [5000], "n": [30]},
        ),
    )
    whole = stitched([first, second, first])
    assert requests_problem(whole) is None and whole.lengths == {"isl": [10, 30, 12, 12, 10, 30], "osl": [4, 8, 5, 5, 4, 8]}
    assert requests_problem(stitched([first, second, mixed(record(0, 10, 4), record(1, 12, 8))])) is not None
    assert stitched([second, second]).lengths == {}
    assert all(requests_problem(w) is None for w in windows_of(whole))


@pytest.mark.parametrize(("index", "known"), [(0, True), (1, False)], ids=["3 gaps lost of 33", "7 of 37"])
def test_a_failed_request_loses_as_many_gaps_as_it_asked_for(index, known):
    found = measure(mixed(record(0, 10, 4), record(1, 30, 8), record(index, 0, 0, "timeout")))
    assert ("itl_ms.p90" in found) == known

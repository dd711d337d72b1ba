"""Service levels: what a request and a run meet, and from how many requests on that is stated."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.slo import Level, Limit
from pytest_kvcache.core.slo_search import MET, NOT_MET, NOT_STATED, Search
from pytest_kvcache.core.slo_verdict import goodput, judge, meets
from pytest_kvcache.core.spec import SpecError
from pytest_kvcache.core.window import Window, window_of

TTFT, TPOT, ITL = (Limit(metric=m, percentile=99, limit=x) for m, x in (("ttft_ms", 500), ("tpot_ms", 50), ("itl_ms", 50)))


def level(*limits, **more):
    return Level(**{"name": "x", "limits": limits or (TTFT, TPOT), "isl": 8, "osl": 5, "rate": 10} | more)


def record(i, ttft_ms=100.0, tpot_ms=10.0, n=5, **more):
    """Sent at i / 10 s."""
    first = i / 10 + ttft_ms / 1e3
    last = first + (n - 1) * tpot_ms / 1e3
    return RequestRecord(
        **{
            "index": i,
            "sent_s": i / 10,
            "first_s": first,
            "last_s": last,
            "end_s": last,
            "input_tokens": 8,
            "output_tokens": n,
            "events": n,
        }
        | more
    )


def lost(i):
    return RequestRecord(index=i, sent_s=i / 10, end_s=i / 10, outcome="http")


def trace(records, **more):
    return Trace(scenario="s", arm="base", run=1, workload="w", isl=8, osl=5, records=tuple(records), **more)


def of(level, *records, **more):
    """The verdict on the first limit of a level."""
    return judge(level, trace(records, **more)).limits[0]


# -- what a request meets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "expected"), [
    (record(0), True), (record(0, ttft_ms=500, tpot_ms=50), True), (record(0, ttft_ms=501), False), (record(0, tpot_ms=51), False), (lost(0), False),
    (record(0, n=1), True),  # one token: no cadence to break
    (record(0, n=5, events=1, first_event_tokens=5), True),  # all at once: neither
    (record(0, events=2, notes=("event_tokens_unknown",)), None), (record(0, ttft_ms=501, events=2, notes=("event_tokens_unknown",)), False),
    (record(0, output_tokens=None), None), (record(0, first_s=None), None),
])  # fmt: skip
def test_a_request_meets_every_limit_or_it_is_not_good(seen, expected):
    assert meets(level(), seen) is expected


def test_a_request_is_held_to_the_limit_of_the_highest_percentile():
    p50 = Limit(metric="ttft_ms", percentile=50, limit=200)
    assert level(TTFT, p50).per_request == level(p50, TTFT).per_request == {"ttft_ms": 500}
    assert meets(level(ITL), record(0, tpot_ms=49)) and not meets(level(ITL), record(0, tpot_ms=51)), "the mean of its gaps"


def test_goodput_is_a_share_of_all_sent_and_a_rate_of_the_window():
    records = [
        record(0),
        record(1, ttft_ms=600),
        lost(2),
        record(3, tpot_ms=60),
        *(record(i) for i in range(4, 9)),
        record(9, output_tokens=None),
    ]
    window = Window(start_s=0.0, end_s=0.9, whole=False, output_tokens=None, input_tokens=None, answered=0, open=0.0)
    found = goodput(level(), trace(records), window)
    assert (found.sent, found.good, found.unknown, found.share) == (10, 6, 1, 0.6)
    assert found.req_s == pytest.approx(5 / 0.9), "the last of them ends at 0.94 s"
    assert goodput(level(), trace(records)).req_s is None and goodput(level(), trace(())).share is None


# -- what a run meets ---------------------------------------------------------------------------------------------------


def test_a_percentile_below_its_floor_is_not_stated_and_never_met():
    found = of(level(TTFT), *map(record, range(661)))
    assert (found.state, found.reason, found.value) == (NOT_STATED, "661 requests, 662 are needed", pytest.approx(100))
    assert str(found) == "P99 ttft_ms <= 500 ms: 100 ms, not stated: 661 requests, 662 are needed"
    assert of(level(TTFT), *map(lost, range(661))).state == NOT_STATED
    assert of(level(TTFT), *map(record, range(662))).state == MET


@pytest.mark.parametrize(("percentile", "n"), [(50, 11), (90, 64), (95, 130), (99, 662), (99.9, 6636)])
def test_floors_are_those_of_loadgen(percentile, n):
    assert Limit(metric="ttft_ms", percentile=percentile, limit=1).needed == n
    assert Limit(metric="error_share", limit=round(1 - percentile / 100, 6)).needed == n, "a share of errors is a percentile, too"
    assert Limit(metric="goodput_share", limit=percentile / 100).needed == n
    assert Limit(metric="error_share", limit=0).needed == Limit(metric="goodput_share", limit=1).needed == 1


@pytest.mark.parametrize(("over", "failed", "state", "sure"), [
    (0, 0, MET, True), (1, 0, MET, True), (0, 1, MET, True), (2, 0, MET, False), (7, 0, MET, False), (4, 4, NOT_MET, False), (0, 8, NOT_MET, False), (6, 1, MET, False),
])  # fmt: skip
def test_a_failed_request_is_infinitely_late(over, failed, state, sure):
    """Of 700 requests 7 may lie beyond a P99; LoadGen's rule would pass one of them at most."""
    records = (
        [record(i, ttft_ms=900) for i in range(over)]
        + [lost(i) for i in range(over, over + failed)]
        + [record(i) for i in range(over + failed, 700)]
    )
    found = of(level(TTFT), *records)
    assert (found.state, found.over, found.sure, found.requests) == (state, over + failed, sure, 700)
    assert (found.value == math.inf) == (failed == 8)
    told = judge(level(TTFT), trace(records))
    assert told.state == state and json.loads(json.dumps(told.plain(), allow_nan=False))["limits"][0]["value"] == (
        None if failed == 8 else found.value
    )
    if failed == 8:
        assert str(told) == "x: not met: P99 ttft_ms <= 500 ms: failed requests, not met"


@given(st.lists(st.one_of(st.floats(1, 1000), st.none(), st.just("lost")), min_size=11, max_size=60), st.floats(1, 1000))
def test_a_limit_is_stated_only_where_the_unknown_answers_cannot_change_it(seen, bound):
    """None: an answer whose tokens an event are unknown."""
    limit = Limit(metric="tpot_ms", percentile=50, limit=bound)

    def verdict(values):
        return of(level(limit), *(lost(i) if v == "lost" else record(i, tpot_ms=v or 5, **({} if v else {"events": 2, "notes": ("event_tokens_unknown",)}))
                                  for i, v in enumerate(values)))  # fmt: skip

    found, best, worst = verdict(seen), verdict([v or bound / 2 for v in seen]), verdict([v or bound * 2 for v in seen])
    assert found.state == (best.state if best.state == worst.state else NOT_STATED)
    assert bool(found.reason) == (found.state == NOT_STATED)


def test_shares():
    errors, good = Limit(metric="error_share", limit=0.1), Limit(metric="goodput_share", limit=0.9)
    records = [record(i, ttft_ms=600 if i < 5 else 100) for i in range(95)] + [lost(i) for i in range(95, 100)]
    first, second, _ = judge(level(errors, good, TTFT), trace(records)).limits
    assert (first.state, first.value) == (MET, 0.05) and (second.state, second.value) == (MET, 0.9)
    first, second, _ = judge(level(errors, good, TTFT), trace([*records, *map(lost, range(100, 106))])).limits
    assert (first.state, second.state) == (NOT_MET, NOT_MET)
    assert str(first) == "error_share <= 0.1: 0.1038, not met"
    unknown = judge(level(good, TPOT), trace([record(i, **({} if i < 85 else {"output_tokens": None})) for i in range(100)])).limits[0]
    assert (unknown.state, unknown.reason) == (NOT_STATED, "of 15 of 100 requests it cannot be told")
    assert of(level(errors), *map(record, range(63))).reason == "63 requests, 64 are needed"
    none = Limit(metric="error_share", limit=0)
    assert of(level(none), record(0)).state == MET and of(level(none), record(0), lost(1)).state == NOT_MET


def test_gaps_are_those_of_tokens_and_requests_are_counted():
    records = [*map(record, range(699)), lost(699)]
    gaps = {"us": [9_000, 49_000, 51_000], "n": [2700, 60, 36]}
    found = of(level(ITL), *records, itl=gaps)
    assert (found.state, found.value, found.requests, found.over, found.sure) == (NOT_MET, 51, 700, None, None)
    assert of(level(ITL), *records, itl=gaps | {"n": [2700, 80, 16]}).state == MET, (
        "of 2,800 tokens 28 may be late: 16, and 4 of the lost request"
    )
    few = of(level(ITL), *records, itl={"us": [9_000], "n": [1000]})
    assert (few.state, few.value, few.reason) == (NOT_STATED, None, "itl_ms of fewer than 80% of the tokens is known")
    assert of(level(ITL), *map(lost, range(700))).value == math.inf
    assert of(level(ITL), *(record(i, n=1) for i in range(700))).reason == "0 requests, 662 are needed"


def test_a_load_that_was_not_steady_states_no_level():
    """Twice as many come as are answered: the queue has not broken the limit yet."""
    records = [record(i, ttft_ms=100 + 100 * i, scheduled_s=i / 10) for i in range(700)]
    wide = level(Limit(metric="ttft_ms", percentile=99, limit=1e6))
    found = judge(wide, trace(records))
    assert found.limits[0].state == MET and found.state == NOT_STATED
    assert found.unsteady == window_of(trace(records)).unsteady and str(found) == f"x: not stated: {found.unsteady}"
    steady = judge(wide, trace([record(i, scheduled_s=i / 10) for i in range(700)]))
    assert steady.state == MET and steady.goodput.req_s == pytest.approx(10, rel=0.05)
    assert judge(level(TTFT), trace(records)).state == NOT_MET, "what is missed needs no steady load"


def test_nothing_at_all_states_nothing():
    assert judge(level(), trace(())).state == NOT_STATED


@pytest.mark.parametrize(
    "make",
    [
        lambda: level(rate=None),
        lambda: level(search=Search(low=1, high=2)),
        lambda: level(name=""),
        lambda: level(isl=0),
        lambda: level(osl=1),
    ],
)
def test_levels_that_cannot_be_are_refused(make):
    with pytest.raises(SpecError):
        make()

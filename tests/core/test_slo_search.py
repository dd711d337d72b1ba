"""The search for the highest rate that meets the limits, against made-up servers whose threshold is known."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.slo_search import (
    FOUND,
    LOWEST_FAILS,
    MET,
    NEVER_FAILED,
    NOT_MET,
    NOT_STATED,
    OUT_OF_POINTS,
    Found,
    Next,
    Point,
    Search,
    highest_rate,
    step,
)
from pytest_kvcache.core.spec import SpecError

WIDE = Search(low=0.1, high=1000, points=60)


class Server:
    """Meets its limits up to `threshold`, but for the runs of the numbers `wrong`; keeps what it was asked."""

    def __init__(self, threshold, wrong=()):
        self.threshold, self.wrong, self.rates = threshold, wrong, []

    def __call__(self, rate):
        self.rates.append(rate)
        return MET if (rate <= self.threshold) != (len(self.rates) in self.wrong) else NOT_MET


def met(*rates):
    return [Point(rate=r, state=MET, reused=True) for r in rates]


def failed(*rates):
    return [Point(rate=r, state=NOT_MET, reused=True) for r in rates]


thresholds = st.floats(math.log(0.02), math.log(5000)).map(math.exp)
searches = st.builds(
    lambda low, span, resolution, where: Search(
        low=low, high=low * span, resolution=resolution, points=200, start=None if where is None else low * span**where),
    st.sampled_from([0.05, 0.1, 1.0, 7.3]), st.sampled_from([1.02, 2.0, 100.0, 10_000.0]), st.sampled_from([0.01, 0.05, 0.5]),
    st.sampled_from([None, 0.0, 0.2, 0.9]),
)  # fmt: skip


def right(found, search, threshold):
    """Whether what was found holds the threshold, no wider than asked."""
    if found.end == LOWEST_FAILS:
        return threshold < search.low == found.upper and found.lower is None
    if found.end == NEVER_FAILED:
        return threshold >= search.high == found.lower and found.upper is None
    return found.end == FOUND and found.lower <= threshold < found.upper <= found.lower * (1 + search.resolution) * 1.001


@given(searches, thresholds)
def test_the_interval_holds_the_threshold_of_an_exact_server(search, threshold):
    server = Server(threshold)
    found = highest_rate(search, server)
    assert right(found, search, threshold), str(found)
    assert found.runs == len(server.rates) == len(set(server.rates)) and not found.notes
    asked = {search.low, search.high, search.start}
    assert all(search.low <= r <= search.high and (r in asked or float(f"{r:g}") == r) for r in server.rates), "the id holds the very rate"


@given(thresholds)
def test_four_decades_take_a_dozen_runs(threshold):
    assert highest_rate(WIDE, Server(threshold)).runs <= 12
    near = Search(low=0.1, high=1000, start=max(0.1, min(1000, threshold * 0.8)))
    assert highest_rate(near, Server(threshold)).runs <= 9


@given(searches, thresholds, st.integers(1, 25))
def test_with_two_runs_at_each_end_one_wrong_run_is_found_out(search, threshold, which):
    search = Search(low=search.low, high=search.high, start=search.start, resolution=search.resolution, points=200, confirm=2)
    found = highest_rate(search, Server(threshold, wrong={which}))
    assert right(found, search, threshold), str(found)


@given(thresholds, st.floats(0.01, 0.3), st.integers(0, 2**32))
def test_a_noisy_threshold_is_found_within_its_noise(threshold, noise, seed):
    """Near the threshold a run may go either way: by a normal of so many per cent."""
    rng, sure = random.Random(seed), math.exp(4.5 * noise)

    def server(rate):
        return MET if math.log(rate / threshold) < max(-4.5, min(4.5, rng.gauss(0, 1))) * noise else NOT_MET

    found = highest_rate(Search(low=0.1, high=1000, points=100, confirm=2), server)
    assert found.end in (FOUND, LOWEST_FAILS, NEVER_FAILED)
    if found.lower is not None:
        assert found.lower < threshold * sure
    if found.upper is not None:
        assert found.upper > threshold / sure
    if found.end == FOUND:
        assert found.lower < found.upper <= found.lower * 1.0511


@given(thresholds, st.randoms())
def test_the_order_of_the_points_does_not_matter(threshold, rng):
    points = []
    while isinstance(now := step(WIDE, points), Next):
        shuffled = points[:]
        rng.shuffle(shuffled)
        assert step(WIDE, shuffled) == now
        points.append(Point(rate=now.rate, state=Server(threshold, wrong={1} if rng.random() < 0.1 else ())(now.rate)))


@given(searches, thresholds)
def test_a_search_done_before_measures_nothing_and_a_finer_one_only_what_is_new(search, threshold):
    server = Server(threshold)
    found = highest_rate(search, server)
    known = [Point(rate=r, state=server(r), reused=True) for r in server.rates[:]]
    assert highest_rate(search, pytest.fail, known) == found
    finer = Search(low=search.low, high=search.high, resolution=search.resolution / 2, points=200)
    again = Server(threshold)
    assert right(highest_rate(finer, again, known), finer, threshold) and len(again.rates) <= 4


def test_points_from_outside_the_bounds_narrow_them_but_do_not_end_the_search():
    search = Search(low=1, high=10)
    assert right(highest_rate(search, server := Server(4.0), [*met(0.5), *failed(20)]), search, 4.0)
    assert all(1 <= r <= 10 for r in server.rates)
    above = highest_rate(search, Server(100), failed(11))
    assert (above.end, above.lower, above.upper) == (NEVER_FAILED, 10, 11)
    below = highest_rate(search, Server(0.1), met(0.9))
    assert (below.end, below.lower, below.upper) == (LOWEST_FAILS, 0.9, 1)
    assert str(below) == "even the lowest rate fails, 1 req/s (0.9 req/s was met before): lower search.low (4 runs)"


def test_a_failure_below_a_rate_that_was_met_is_measured_once_more():
    """And then believed, whichever way it went."""
    points = [*met(2, 8), *failed(4, 8.4)]
    assert step(WIDE, points) == Next(4.0, "it failed although 8 was met")
    refuted = step(WIDE, [*points, *met(4)])
    assert isinstance(refuted, Found) and (refuted.lower, refuted.upper, refuted.notes) == (8, 8.4, ())
    found = highest_rate(WIDE, server := Server(3.95), points)
    assert right(found, WIDE, 3.95) and found.notes == ("8 req/s met the limits although 4 failed 2 times",)
    assert " does not (" in str(found) and str(found).endswith("; 8 req/s met the limits although 4 failed 2 times")
    assert len(server.rates) == len(set(server.rates)), "what was met above a failure that is believed puts no other one in doubt"


def test_of_several_doubtful_failures_the_lowest_is_looked_at_first_and_may_settle_it():
    points = [*met(1, 9), *failed(3, 5, 7)]
    assert step(WIDE, points).rate == 3
    assert step(WIDE, [*points, *failed(3)]).rate < 3, "what lies above decides nothing"
    assert step(WIDE, [*points, *met(3)]).rate == 5


def test_a_rate_that_was_met_and_failed_is_measured_a_third_time():
    assert step(WIDE, [*met(2, 4), *failed(4)]) == Next(4.0, "it was met and failed")
    assert step(WIDE, [*met(2, 4), *failed(4, 4)]).rate < 4
    assert step(WIDE, [*met(2, 4, 4), *failed(4)]).rate > 4
    assert step(WIDE, [*met(2, 4, 4), *failed(4, 4)]).rate < 4, "two against two has not met the limits"


def test_what_is_not_stated_is_measured_once_more_and_then_counts_as_not_met():
    silent = Point(rate=4, state=NOT_STATED)
    assert step(WIDE, [*met(3.9), silent]) == Next(4.0, "nothing could be stated")
    found = step(WIDE, [*met(3.9), silent, silent])
    assert (found.lower, found.upper, found.end) == (3.9, 4, FOUND)
    assert found.notes == ("nothing could be stated of 4 req/s in 2 runs, which counts as not met",)
    assert step(WIDE, [*met(3.9, 5), *failed(5.2), silent, silent]).lower == 5, "a higher rate that was met speaks for it"


def test_honest_ends():
    assert str(highest_rate(Search(low=1, high=64), Server(0.5))) == "even the lowest rate fails, 1 req/s: lower search.low (4 runs)"
    assert str(highest_rate(Search(low=1, high=64), Server(99))) == "never failed up to 64 req/s: raise search.high (4 runs)"
    few = highest_rate(Search(low=1, high=64, points=3), Server(20))
    assert few.end == OUT_OF_POINTS and few.lower <= 20 < few.upper and few.runs == 3
    assert str(few).startswith("not narrowed down: ") and str(few).endswith(": raise search.points (3 runs)")
    assert str(highest_rate(Search(low=1, high=64, points=1), Server(0.5))).startswith("not narrowed down: no rate met, ")
    found = highest_rate(Search(low=1, high=64), Server(20))
    assert str(found) == f"{found.lower:g} req/s meets the limits, {found.upper:g} req/s does not ({found.runs} runs)"


def test_points_of_an_earlier_session_count_towards_no_limit():
    search = Search(low=1, high=64, points=1)
    assert isinstance(step(search, [*met(1, 2, 4), *failed(64, 32)]), Next)
    assert step(search, [*met(1, 2), Point(rate=4, state=MET)]).end == OUT_OF_POINTS


@pytest.mark.parametrize("make", [
    lambda: Search(low=0, high=1), lambda: Search(low=2, high=1), lambda: Search(low=1, high=math.inf), lambda: Search(low=math.nan, high=2),
    lambda: Search(low=1, high=2, start=3), lambda: Search(low=1, high=2, resolution=0), lambda: Search(low=1, high=2, points=0),
    lambda: Search(low=1, high=2, points=True), lambda: Search(low=1, high=2, confirm=10), lambda: Search(low="1", high=2),
    lambda: Point(rate=0, state=MET), lambda: Point(rate=1, state="maybe"), lambda: Point(rate=math.nan, state=MET),
])  # fmt: skip
def test_what_cannot_be_is_refused(make):
    with pytest.raises(SpecError, match=r"search|Point"):
        make()

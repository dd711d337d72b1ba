"""Schedules: those of an open loop bit for bit as they are, and a rate that rises as it is said to."""

import hashlib
import itertools
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.arrivals import KINDS, Arrivals, due
from pytest_kvcache.core.scenarios import ARRIVALS, OpenLoop
from pytest_kvcache.core.spec import SpecError
from pytest_kvcache.core.workload import _rng, schedule

RATES = st.floats(0.01, 1000)


@st.composite
def arrivals(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    more = {"burstiness": draw(st.floats(0.1, 10))} if kind == "gamma" else {}
    more |= {"to": draw(RATES), "over": draw(st.integers(1, 60))} if kind.startswith("ramp") else {}
    return Arrivals(kind=kind, rate=draw(RATES), **more)


@given(st.sampled_from(ARRIVALS), RATES, st.floats(0.1, 10), st.integers(0, 3), st.sampled_from(["measured", "warm-up"]))
def test_an_open_loop_has_the_gaps_that_its_generator_draws(kind, rate, burstiness, seed, part):
    burst = {"burstiness": burstiness} if kind == "gamma" else {}
    scenario = OpenLoop(isl=8, osl=4, rate=rate, arrivals=kind, requests=30, seed=seed, **burst)
    rng = _rng("schedule.v1", part, scenario, seed)
    gap = {
        "poisson": lambda: rng.expovariate(rate), "constant": lambda: 1 / rate,
        "gamma": lambda: rng.gammavariate(burstiness, 1 / (burstiness * rate)),
    }[kind]  # fmt: skip
    assert schedule(scenario, part=part) == tuple(itertools.accumulate(gap() for _ in range(30)))


@given(arrivals(), st.integers(0, 9), st.integers(1, 100), st.integers(0, 100))
def test_moments_ascend_and_fewer_are_the_first_of_more(a, seed, n, fewer):
    found = due(a, random.Random(seed), n)
    assert len(found) == n and found[0] >= 0 and all(map(math.isfinite, found))
    assert list(found) == sorted(found)
    assert due(a, random.Random(seed), min(n, fewer)) == found[:fewer]


@given(RATES, RATES, st.integers(1, 200), st.integers(0, 20))
def test_a_ramp_has_a_request_wherever_the_area_below_the_rate_is_whole(rate, to, over, beyond):
    found = due(Arrivals(kind="ramp", rate=rate, to=to, over=over), random.Random(1), over + beyond)
    end = 2 * over / (rate + to)
    assert found[over - 1] == pytest.approx(end)
    for i, t in enumerate(found[:over], 1):
        assert rate * t + (to - rate) * t * t / (2 * end) == pytest.approx(i, rel=1e-6)
    for i, t in enumerate(found[over:], 1):
        assert t == pytest.approx(end + i / to)


@given(RATES, st.integers(1, 50))
def test_a_ramp_to_the_same_rate_is_constant(rate, n):
    ramp = due(Arrivals(kind="ramp", rate=rate, to=rate, over=n), random.Random(1), n)
    assert ramp == pytest.approx(due(Arrivals(kind="constant", rate=rate), random.Random(1), n))


@pytest.mark.parametrize(("rate", "to"), [(2, 8), (8, 2)])
def test_a_drawn_ramp_rises_as_the_even_one_does(rate, to):
    """A Poisson process of that rate: in each half of the ramp's time as many as lie below it, within 4 standard errors, and with that variance."""
    n, loads = 1000, 60
    half = n / (rate + to)
    drawn = [due(Arrivals(kind="ramp-poisson", rate=rate, to=to, over=n), random.Random(seed), 2 * n) for seed in range(loads)]
    for start, mean in ((0.0, half * (3 * rate + to) / 4), (half, half * (rate + 3 * to) / 4)):
        counts = [sum(start <= t < start + half for t in moments) for moments in drawn]
        assert abs(sum(counts) / loads - mean) < 4 * math.sqrt(mean / loads)
        assert 0.5 < sum((c - mean) ** 2 for c in counts) / loads / mean < 1.7


def test_gaps_of_a_drawn_ramp_are_exponential_where_it_is_flat():
    found = due(Arrivals(kind="ramp-poisson", rate=5, to=5, over=10), random.Random(3), 4000)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.07)
    assert sum(g > 0.2 for g in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_an_even_ramp_is_the_same_on_every_machine():
    """Of correctly rounded operations only: the same bits."""
    found = due(Arrivals(kind="ramp", rate=0.5, to=7, over=300), random.Random(1), 400)
    assert hashlib.sha256(struct.pack("<400d", *found)).hexdigest()[:16] == "96c74722eb08a05a"


def test_a_drawn_ramp_is_the_same_for_a_seed():
    found = due(Arrivals(kind="ramp-poisson", rate=1, to=4, over=20), random.Random(1), 4)
    assert found == pytest.approx((0.14058527, 1.56513715, 2.39337264, 2.54624720))


@pytest.mark.parametrize(("wrong", "told"), [
    ({"kind": "burst"}, "is none of poisson, constant"), ({"rate": 0}, "rate=0 must be above 0"), ({"rate": math.nan}, "rate=nan"),
    ({"rate": True}, "rate=True"), ({"burstiness": 2}, "no meaning for poisson"), ({"kind": "gamma", "burstiness": -1}, "burstiness=-1 must"),
    ({"kind": "ramp"}, "needs to=None"), ({"kind": "ramp", "to": 2}, "over=None"), ({"kind": "ramp", "to": 0, "over": 3}, "to=0 must"),
    ({"kind": "ramp", "to": 2, "over": 0}, "over=0"), ({"kind": "ramp", "to": 2, "over": True}, "over=True"),
    ({"kind": "ramp", "to": 2, "over": 2.5}, "over=2.5"), ({"to": 3}, "no meaning for poisson"), ({"over": 3}, "no meaning for poisson"),
])  # fmt: skip
def test_what_cannot_be_is_refused(wrong, told):
    with pytest.raises(SpecError, match=told):
        Arrivals(**{"rate": 2} | wrong)

"""Two arms measured in turns: one log ratio a round is one observation, whatever the machine does to both."""

import dataclasses
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.gate import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    PAIRED,
    PASS,
    REGRESSION,
    Limit,
    judge_paired,
)

BADNESS = {PASS: 0, IMPROVEMENT: 0, INCONCLUSIVE: 1, REGRESSION: 2}
factors = st.integers(-997, 997).map(lambda k: math.exp(0.03 * k / 997.3))
rounds = st.lists(st.tuples(factors, factors), min_size=4, max_size=12)
directions = st.sampled_from(["lower", "higher"])


def judged(pairs, better="lower", **more):
    old, new = zip(*pairs, strict=True)
    return judge_paired(old, new, better=better, **{"final": True} | more)


def drawn(loss, cv, count=12, *, session=0.02, drift=0.02, seed=1):
    """Rounds of two builds on one machine that is off by `session`, drifts by `drift` from first to last, in the order ABBA."""
    noise = random.Random(seed)
    shift, pairs = noise.gauss(0, session), []
    for i in range(count):
        runs = [noise.gauss(0, cv) + shift + drift * (2 * i + place) / (2 * count - 1) for place in (0, 1)]
        old, new = runs if i % 2 == 0 else runs[::-1]
        pairs.append((math.exp(old), math.exp(new + math.log1p(loss))))
    return pairs


@pytest.mark.parametrize(("loss", "cv", "word", "took"), [
    (0.0, 0.002, PASS, 4), (0.10, 0.005, REGRESSION, 4), (-0.10, 0.005, IMPROVEMENT, 4), (0.0, 0.05, INCONCLUSIVE, 12),
])  # fmt: skip
def test_a_margin_of_three_per_cent_is_judged_though_session_and_drift_are_as_large(loss, cv, word, took):
    found = judged(drawn(loss, cv, seed=2))
    assert (found.verdict, len(found.runs), found.margin) == (word, took, 0.03)
    assert len(found.baseline_runs) == took


def test_how_often_it_is_right():
    """Of 300 pairs of builds with a restart CV of 1 % (margin 3 %): equal ones pass, a loss of 10 % is caught."""
    equal = [judged(drawn(0.0, 0.01, seed=i)).verdict for i in range(300)]
    worse = [judged(drawn(0.10, 0.01, seed=i)).verdict for i in range(300)]
    limit = [judged(drawn(0.03, 0.01, seed=i)).verdict for i in range(300)]
    assert REGRESSION not in equal
    assert equal.count(PASS) > 290
    assert worse.count(REGRESSION) > 290
    assert limit.count(PASS) < 15


def test_the_looks_are_at_4_6_8_and_12_rounds_with_a_quarter_of_alpha_each():
    assert (PAIRED.looks, PAIRED.weight, PAIRED.session_prior, PAIRED.margin) == ((4, 6, 8, 12), 0.25, 0.0, 0.03)
    ratios = [0.01, 0.03, -0.01, 0.02]
    found = judged([(1.0, math.exp(d)) for d in ratios])
    middle, sd = sum(ratios) / 4, math.sqrt(sum((d - sum(ratios) / 4) ** 2 for d in ratios) / 3)
    half = 4.1765 * sd / 2  # t at 0.9875 with 3 degrees of freedom, from a table
    assert found.change == pytest.approx(math.expm1(middle))
    assert (found.low, found.high) == pytest.approx((math.expm1(middle - half), math.expm1(middle + half)), rel=1e-3)


@given(rounds, directions, st.lists(st.floats(min_value=0.01, max_value=100.0), min_size=12, max_size=12))
def test_what_happens_to_both_arms_of_a_round_does_not_matter(pairs, better, common):
    plain = judged(pairs, better)
    found = judged([(a * c, b * c) for (a, b), c in zip(pairs, common, strict=False)], better)
    assert found.verdict == plain.verdict
    assert found.change == pytest.approx(plain.change, abs=1e-9)


@given(rounds, directions, st.floats(min_value=1e-6, max_value=1e6))
def test_the_unit_does_not_matter(pairs, better, scale):
    assert judged([(a * scale, b * scale) for a, b in pairs], better).verdict == judged(pairs, better).verdict


@given(rounds, directions, st.randoms(use_true_random=False))
def test_rounds_between_two_looks_may_change_places(pairs, better, random):
    ends = [0, *(n for n in PAIRED.looks if n <= len(pairs)), len(pairs)]
    mixed = [p for a, b in pairwise(ends) for p in random.sample(pairs[a:b], b - a)]
    but = ("runs", "baseline_runs")
    plain, found = ({k: v for k, v in dataclasses.asdict(judged(p, better)).items() if k not in but} for p in (pairs, mixed))
    assert found == plain


@given(rounds, directions, st.floats(min_value=1.0, max_value=2.0))
def test_a_larger_loss_is_never_judged_milder(pairs, better, times):
    worse = [(a, b * times if better == "lower" else b / times) for a, b in pairs]
    assert BADNESS[judged(pairs, better).verdict] <= BADNESS[judged(worse, better).verdict]


@given(rounds, st.sampled_from([0.01, 0.03, 0.2]))
def test_direction_is_a_mirror(pairs, margin):
    times = judged(pairs, "lower", margin=margin)
    rates = judged([(1 / a, 1 / b) for a, b in pairs], "higher", margin=margin / (1 + margin))
    assert (times.verdict, len(times.runs)) == (rates.verdict, len(rates.runs))


@given(rounds, directions)
def test_exchanging_the_arms_turns_the_change_round(pairs, better):
    there, back = judged(pairs[:4], better), judged([(b, a) for a, b in pairs[:4]], better)
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)
    assert not (there.verdict == back.verdict == REGRESSION)
    assert not (there.verdict == back.verdict == IMPROVEMENT)


@pytest.mark.parametrize(("old", "new", "more", "words"), [
    ([1.0] * 4, [1.0] * 3, {}, "4 runs of the old arm and 3 of the new: rounds are not complete"), ([], [], {}, "nothing was measured"),
    ([1.0, 0.0, 1.0, 1.0], [1.0] * 4, {}, "a value of the old arm is not positive"), ([1.0] * 4, [1.0, math.nan, 1.0, 1.0], {}, "not a finite"),
    ([1.0] * 4, [1.0] * 4, {"margin": 5}, "margin 5"), ([1.0] * 4, [1.0] * 4, {"better": "up"}, "direction 'up'"),
    ([1.0] * 4, [1.0] * 4, {"limit": Limit(value=2.0, at_most=False, reason="weights")}, "beyond the physical limit"),
    ([500.0] * 4, [1.0] * 4, {}, "by a factor of 500"),
])  # fmt: skip
def test_what_cannot_be_compared_is_invalid(old, new, more, words):
    found = judge_paired(old, new, **{"better": "lower"} | more)
    assert found.verdict == INVALID
    assert words in found.reason


def test_too_little_is_inconclusive_and_says_what_is_missing():
    found = judge_paired([1.0] * 3, [1.0] * 3, better="lower")
    assert (found.verdict, found.more_runs) == (INCONCLUSIVE, 1)
    few = judge_paired([1.0] * 4, [1.0] * 4, better="lower", quantile=0.99, samples=[200] * 8)
    assert (few.verdict, few.settled) == (INCONCLUSIVE, True)
    assert "a P99 of 200 requests" in few.reason


def test_rounds_of_two_levels_are_inconclusive():
    pairs = [(1.0, 1.2 if i in (3, 6, 9) else 1.0 + 0.001 * (i % 2)) for i in range(12)]
    found = judged(pairs, margin=0.10, rule=dataclasses.replace(PAIRED, looks=(12,)))
    assert (found.verdict, found.reason) == (INCONCLUSIVE, "unstable: new to old by the round: 9 near 1, 3 near 1.2")


@given(rounds, st.floats(0.5, 2.0), directions)
def test_a_gain_of_as_much_as_is_allowed_to_be_lost_is_the_margin(pairs, gain, better):
    """`at_least` below 1 is a margin by another name, and above 1 the same claim on values that are so much better."""
    claimed = judged(pairs, better, at_least=gain)
    lifted = [(old, new / gain if better == "higher" else new * gain) for old, new in pairs]
    assert claimed.verdict == judged(lifted, better, at_least=1.0).verdict


@given(rounds, directions, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_who_claims_more_is_never_judged_better(pairs, better, one, other):
    low, high = sorted((one, other))
    assert BADNESS[judged(pairs, better, at_least=low).verdict] <= BADNESS[judged(pairs, better, at_least=high).verdict]


def test_how_often_a_claimed_gain_is_judged_right():
    """Restart CV 1 %, a gain of 1.2 claimed: true gains of 1.25 pass, of 1.15 fail, of exactly 1.2 do neither often."""
    found = {
        gain: [judged(drawn(gain - 1, 0.01, seed=i), "higher", at_least=1.2).verdict for i in range(300)] for gain in (1.15, 1.2, 1.25)
    }
    assert found[1.25].count(PASS) > 285
    assert found[1.15].count(REGRESSION) > 270
    assert found[1.15].count(PASS) == 0
    assert found[1.2].count(PASS) <= 21
    assert found[1.2].count(REGRESSION) <= 3
    assert IMPROVEMENT not in found[1.25]


def test_every_undecided_claim_says_what_its_runs_certify():
    found = judged(drawn(0.2, 0.05, seed=3), "higher", at_least=1.2)
    assert found.verdict == INCONCLUSIVE
    assert "at least 1.2 times as good is claimed, these runs certify 1." in found.reason
    assert found.certifiable is None


def test_a_change_below_the_floor_is_no_loss_between_arms_either():
    pairs = drawn(0.10, 0.002, count=4)
    assert judged(pairs).verdict == REGRESSION
    assert judged(pairs, floor=0.2).verdict == PASS
    assert judged(pairs, "higher", floor=5.0).verdict == INVALID


def test_each_arm_has_its_own_physical_bound():
    fast, slow = Limit(value=2.0, at_most=False, reason="fp8"), Limit(value=4.0, at_most=False, reason="fp16")
    pairs = [(4.5, 2.5)] * 4
    assert judged(pairs, limit=fast, old_limit=slow).verdict == IMPROVEMENT
    assert "a value of the new arm is beyond" in judged(pairs, limit=slow, old_limit=fast).reason
    assert "a value of the old arm is beyond" in judged([(2.5, 2.5)] * 4, limit=fast, old_limit=slow).reason

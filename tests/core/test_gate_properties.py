"""What holds of every verdict, whatever the numbers: units, order, size of the loss, direction, bad values.

The order of runs has a meaning: looks are taken at the first 3, 5, 8 and 12, and a decision is frozen. So what may be
exchanged without changing anything is runs between the same two looks, runs of one baseline session, and whole sessions.
A drift is a note on the order itself.
"""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pytest_kvcache.core.gate import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    NO_BASELINE,
    PASS,
    REGRESSION,
    Base,
    judge,
    judge_paired,
    rule_for,
)
from pytest_kvcache.core.units import factor

GOOD = (PASS, IMPROVEMENT)
BADNESS = {PASS: 0, IMPROVEMENT: 0, INCONCLUSIVE: 1, REGRESSION: 2}


def logs(least, most, size=0.1):
    """Relative figures of runs: logs within `size`, on a grid that meets no margin exactly."""
    return st.lists(st.integers(-997, 997).map(lambda k: math.exp(size * k / 997.3)), min_size=least, max_size=most)


sessions = st.lists(logs(1, 4), min_size=2, max_size=5).filter(lambda s: sum(map(len, s)) >= 5) | logs(5, 10).map(lambda s: [s])
new_runs = logs(3, 12)
directions = st.sampled_from(["lower", "higher"])
rules = st.builds(rule_for, st.sampled_from(["cpu", "gpu"]), st.sampled_from(["full", "ci"]))
no_futility = st.sampled_from([rule_for("cpu", "full"), rule_for("gpu", "full")])
worsening = st.floats(min_value=1.0, max_value=3.0)


def verdict(base, new, better="lower", rule=None, margin=0.05, **more):
    more = {"final": True} | more
    unit = more.pop("base_unit", more.get("unit", ""))
    stored = Base(sessions=tuple(map(tuple, base)), unit=unit)
    return judge(stored, new, better=better, margin=margin, rule=rule or rule_for("gpu", "full"), **more)


def worse(values, times, better):
    return [v * times if better == "lower" else v / times for v in values]


def figures(found, *but):
    return {k: v for k, v in dataclasses.asdict(found).items() if k not in {"runs", "baseline_runs", "notes", *but}}


@given(
    sessions, new_runs, directions, rules, st.sampled_from([("ms", "s"), ("s", "ms"), ("tok/s", "tok/min"), ("MiB", "GB"), ("kJ", "Wh")])
)
def test_a_baseline_in_another_unit_of_the_dimension_changes_nothing(base, new, better, rule, units):
    plain = verdict(base, new, better, rule, unit=units[1])
    other = [[v * factor(units[1], units[0]) for v in s] for s in base]
    found = verdict(other, new, better, rule, unit=units[1], base_unit=units[0])
    assert found.verdict == plain.verdict
    for name, value in figures(plain, "verdict", "reason").items():
        assert getattr(found, name) == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value), name


@given(sessions, new_runs, directions, rules, st.floats(min_value=1e-6, max_value=1e6))
def test_the_scale_of_both_sides_does_not_matter(base, new, better, rule, scale):
    plain = verdict(base, new, better, rule)
    found = verdict([[v * scale for v in s] for s in base], [v * scale for v in new], better, rule)
    assert (found.verdict, found.more_runs, len(found.runs)) == (plain.verdict, plain.more_runs, len(plain.runs))
    assert found.change == pytest.approx(plain.change, abs=1e-9)


@given(sessions, new_runs, directions, rules, st.randoms(use_true_random=False))
def test_order_between_two_looks_within_a_session_and_of_sessions_changes_no_figure(base, new, better, rule, random):
    mixed_base = [random.sample(s, len(s)) for s in random.sample(base, len(base))]
    ends = [0, *(n for n in rule.looks if n <= len(new)), len(new)]
    mixed = [v for a, b in pairwise(ends) for v in random.sample(new[a:b], b - a)]
    plain, found = verdict(base, new, better, rule), verdict(mixed_base, mixed, better, rule)
    assert figures(found) == figures(plain), "to the last bit"
    assert sorted(found.runs) == sorted(plain.runs)
    steady = [n for n in plain.notes if not n.startswith("drift")]
    assert [n for n in found.notes if not n.startswith("drift")] == steady


@given(sessions, new_runs, directions, no_futility, worsening)
def test_a_larger_loss_is_never_judged_milder(base, new, better, rule, times):
    """From pass (or improvement) through inconclusive to regression; a gate given up as futile is left out."""
    one, two = verdict(base, new, better, rule), verdict(base, worse(new, times, better), better, rule)
    assume(INVALID not in (one.verdict, two.verdict))  # better by a factor of 100
    assert BADNESS[one.verdict] <= BADNESS[two.verdict]
    if one.verdict == two.verdict == REGRESSION:
        assert len(two.runs) <= len(one.runs)


@given(sessions, new_runs, directions, rules, worsening)
def test_a_larger_loss_never_passes_where_a_smaller_one_did_not(base, new, better, rule, times):
    """Of every rule: what is given up as futile is inconclusive, where a smaller loss may have gone on and passed."""
    one, two = verdict(base, new, better, rule), verdict(base, worse(new, times, better), better, rule)
    assume(INVALID not in (one.verdict, two.verdict))
    assert two.verdict not in GOOD or one.verdict in GOOD or one.reason.startswith("futile")


@given(sessions, logs(3, 3), directions, no_futility, worsening)
def test_at_one_look_an_improvement_fades_through_pass(base, new, better, rule, times):
    order = [IMPROVEMENT, PASS, INCONCLUSIVE, REGRESSION]
    one, two = (verdict(base, n, better, rule).verdict for n in (new, worse(new, times, better)))
    assert order.index(one) <= order.index(two)


@given(sessions, new_runs, rules, st.sampled_from([0.05, 0.15, 0.3]))
def test_lower_is_better_on_a_time_is_higher_is_better_on_its_inverse(base, new, rule, margin):
    """The margin mirrored: 1.05 times the time is 1/1.05 of the rate."""
    times = verdict(base, new, "lower", rule, margin)
    rates = verdict([[1 / v for v in s] for s in base], [1 / v for v in new], "higher", rule, margin / (1 + margin))
    assert (times.verdict, times.more_runs, len(times.runs)) == (rates.verdict, rates.more_runs, len(rates.runs))
    assert times.p_seq == pytest.approx(rates.p_seq, rel=1e-6)
    assert 1 + times.change == pytest.approx(1 / (1 + rates.change))


NO_NUMBERS = [math.nan, math.inf, -math.inf, 0, 0.0, -1.0, None, True, False, "1", "", [], {}, 1 + 2j, 10**400]


@given(sessions, new_runs, directions, st.sampled_from(NO_NUMBERS), st.data())
def test_what_is_no_positive_number_is_invalid_on_either_side_of_any_gate(base, new, better, poison, data):
    at = data.draw(st.integers(0, len(new)))
    assert verdict(base, [*new[:at], poison, *new[at:]], better).verdict == INVALID
    which = data.draw(st.integers(0, len(base) - 1))
    spoiled = [[*s, poison] if i == which else s for i, s in enumerate(base)]
    assert verdict(spoiled, new, better).verdict == INVALID
    rounds = min(len(new), 4)
    assert judge_paired([*new[: rounds - 1], poison], new[:rounds], better=better).verdict == INVALID
    assert judge_paired(new[:rounds], [poison, *new[1:rounds]], better=better).verdict == INVALID


@given(st.lists(logs(1, 2), max_size=2), logs(0, 12), directions, rules)
@example([], [], "lower", rule_for("gpu", "ci"))
def test_a_baseline_of_fewer_than_five_runs_passes_nothing(base, new, better, rule):
    assert verdict(base, new, better, rule).verdict in (INVALID, INCONCLUSIVE, NO_BASELINE)


@given(sessions, logs(0, 2), directions, rules)
def test_fewer_than_three_new_runs_pass_nothing(base, new, better, rule):
    found = verdict(base, new, better, rule)
    assert found.verdict == (INCONCLUSIVE if new else INVALID)
    assert not new or found.more_runs == 3 - len(new)


@given(sessions, new_runs, directions, rules, st.booleans())
def test_every_open_verdict_says_what_would_settle_it(base, new, better, rule, final):
    found = verdict(base, new, better, rule, final=final)
    if found.verdict == INCONCLUSIVE:
        assert found.more_runs or found.certifiable
        assert found.more_runs is None or len(found.runs) + found.more_runs in rule.looks
        assert found.certifiable is None or found.certifiable > found.margin
        assert found.reason


@given(sessions, new_runs, directions, no_futility)
def test_the_certifiable_margin_certifies(base, new, better, rule):
    """With a hair more than that margin the same runs, looked at once more, pass."""
    found = verdict(base, new, better, rule)
    if found.verdict == INCONCLUSIVE and found.certifiable and found.certifiable < 0.95:
        assert verdict(base, list(found.runs), better, rule, found.certifiable * 1.001 + 1e-6).verdict in GOOD


@given(sessions, new_runs, directions, st.sampled_from([math.nan, 0, -0.1, 1, 1.0, 5, True, None, "0.05"]))
def test_a_margin_that_is_none_is_invalid(base, new, better, margin):
    assert verdict(base, new, better, margin=margin).verdict == INVALID


@given(sessions, new_runs, st.sampled_from(["", "up", None, 1]))
def test_a_direction_that_is_none_is_invalid(base, new, better):
    assert verdict(base, new, better).verdict == INVALID

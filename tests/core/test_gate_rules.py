"""Each rule of validity and of unsteady runs, on runs made so that one rule speaks."""

import dataclasses
import math
import random

import pytest

from pytest_kvcache.core.gate import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    NO_BASELINE,
    PASS,
    REGRESSION,
    Base,
    Limit,
    judge,
    rule_for,
)
from pytest_kvcache.core.lint import gate_problem
from pytest_kvcache.core.spec import Gate

GPU, CPU, ACCEPTANCE = rule_for("gpu", "full"), rule_for("cpu", "full"), rule_for("gpu", "acceptance")
STEADY = (1.0, 1.002, 0.998, 1.001, 0.999, 1.0, 1.003, 0.997, 1.001, 0.999)


def base(level=1.0, *, runs=STEADY, sessions=5, unit="ms", n=None, **more):
    values = [level * v for v in runs]
    size = len(values) // sessions
    split = tuple(tuple(values[i * size : (i + 1) * size]) for i in range(sessions))
    samples = {} if n is None else {"samples": tuple((n,) * size for _ in range(sessions))}
    return Base(sessions=split, unit=unit, **{"definition": "d.v1", **samples, **more})


def verdict(stored, new, *, better="lower", margin=0.05, rule=GPU, unit="ms", definition="d.v1", final=True, **more):
    return judge(stored, new, better=better, margin=margin, rule=rule, unit=unit, definition=definition, final=final, **more)


def at(level, n=5, spread=0.001, seed=1):
    noise = random.Random(seed)
    return [level * math.exp(noise.gauss(0, spread)) for _ in range(n)]


def once(runs):
    """The rule with one look, at all runs."""
    return dataclasses.replace(GPU, looks=(len(runs),))


# -- what cannot be compared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "measured", "words"), [
    ({"unit": "tok/s"}, {}, "unit differs: baseline 'tok/s', measured 'ms'"), ({"unit": ""}, {}, "unit differs"),
    ({"unit": "ms/tok"}, {"unit": "tok/ms"}, "unit differs"), ({"unit": "GiB"}, {"unit": "GJ"}, "unit differs"),
    ({"definition": "d.v0"}, {}, "definition differs: baseline 'd.v0', measured 'd.v1'"), ({"definition": ""}, {}, "definition differs"),
    ({"better": "higher"}, {}, "direction differs: baseline 'higher', measured 'lower'"),
    ({"mismatch": "gpu: A -> B"}, {}, "the baseline is of something else: gpu: A -> B"), ({}, {"failed": 2}, "2 requests failed"),
])  # fmt: skip
def test_numbers_of_different_things_are_invalid(stored, measured, words):
    found = verdict(base(**stored), at(1.0), **measured)
    assert found.verdict == INVALID
    assert words in found.reason


@pytest.mark.parametrize(("unit", "scale"), [("s", 1e-3), ("us", 1e3), ("µs", 1e3), ("ns", 1e6), ("min", 1 / 60e3)])
@pytest.mark.parametrize(("level", "word"), [(1.0, PASS), (1.2, REGRESSION), (0.8, IMPROVEMENT)])
def test_another_unit_of_the_same_dimension_is_converted(unit, scale, level, word):
    found = verdict(base(scale, unit=unit), at(level))
    assert found.verdict == word
    assert found.baseline == pytest.approx(1.0, rel=0.01), "in the measured unit"
    assert found.baseline_runs == pytest.approx([v * 1.0 for v in STEADY])


@pytest.mark.parametrize(("limit", "new", "old", "word"), [
    (Limit(value=20.9, at_most=False, reason="weights"), 22.0, 22.1, PASS), (Limit(value=20.9, at_most=False, reason="weights"), 5.1, 22.1, INVALID),
    (Limit(value=20.9, at_most=False, reason="weights"), 22.0, 5.1, INVALID), (Limit(value=22.2, at_most=False, reason="weights"), 22.0, 22.0, PASS),
    (Limit(value=80.0, at_most=True, reason="memory"), 71.0, 71.0, PASS), (Limit(value=80.0, at_most=True, reason="memory"), 95.0, 71.0, INVALID),
    (Limit(value=80.0, at_most=True, reason="memory"), 71.0, 95.0, INVALID), (Limit(value=80.0, at_most=True, reason="memory"), 81.0, 81.0, PASS),
])  # fmt: skip
def test_what_lies_beyond_a_physical_limit_by_more_than_two_per_cent_is_invalid_on_either_side(limit, new, old, word):
    better = "higher" if limit.at_most else "lower"
    found = verdict(base(old), at(new), better=better, limit=limit)
    assert found.verdict == word
    if word == INVALID:
        assert "beyond the physical limit" in found.reason
        assert limit.reason in found.reason
        assert ("a baseline value" in found.reason) == (old in (5.1, 95.0))


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_better_by_a_factor_of_a_thousand_is_a_wrong_unit_and_no_improvement(better):
    best = 0.001 if better == "lower" else 1000.0
    found = verdict(base(), at(best), better=better)
    assert found.verdict == INVALID
    assert "by a factor of 1000" in found.reason or "by a factor of 999" in found.reason or "by a factor of 1001" in found.reason
    assert verdict(base(), at(1 / best), better=better).verdict == REGRESSION
    assert verdict(base(), at(best**0.5), better=better).verdict == IMPROVEMENT


# -- how many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new", "more"), [(1, 1, 6), (5, 2, 1), (4, 12, 1), (2, 2, 4), (1, 3, 4)])
def test_too_few_runs_are_inconclusive_even_if_equal(old, new, more):
    found = verdict(base(runs=(1.0,) * old, sessions=1), [1.0] * new)
    assert found.verdict == INCONCLUSIVE
    assert found.reason.startswith(f"too few runs: {old} baseline and {new} new runs")
    assert found.more_runs == more


@pytest.mark.parametrize(("quantile", "old", "new", "margin", "rule", "words"), [
    (0.99, 50, 50, 0.1, GPU, "a P99 of 50 requests a run; 500 are the least"), (0.99, 499, 499, 0.1, GPU, "500 are the least"),
    (0.99, 5000, 100, 0.1, GPU, "a P99 of 100 requests"), (0.95, 99, 99, 0.1, GPU, "100 are the least"), (0.9, 49, 49, 0.1, GPU, "50 are the"),
    (0.5, 4, 4, 0.05, GPU, "a P50 of 4 requests a run; 5 are the least"), (0.99, 1000, 880, 0.2, GPU, "a P99 of 880 requests a run against one of 1000"),
    (0.5, 20, 30, 0.05, GPU, "its bias depends on their number"), (0.99, 999, 999, 0.2, ACCEPTANCE, "1000 are the least at a margin of 20 %"),
    (0.99, 4999, 4999, 0.1, ACCEPTANCE, "5000 are the least at a margin of 10 %"), (0.95, 999, 999, 0.1, ACCEPTANCE, "1000 are the least"),
])  # fmt: skip
def test_a_quantile_of_too_few_requests_is_inconclusive(quantile, old, new, margin, rule, words):
    found = verdict(base(n=old), at(1.0), quantile=quantile, samples=[new] * 5, margin=margin, rule=rule)
    assert found.verdict == INCONCLUSIVE
    assert found.reason.startswith("too few samples: ")
    assert words in found.reason
    assert found.settled, "more runs of the same size would change nothing"
    assert found.more_runs is None, "nor does it say that they would"


@pytest.mark.parametrize(("quantile", "old", "new", "margin", "rule"), [
    (0.99, 500, 500, 0.1, GPU), (0.95, 100, 100, 0.1, GPU), (0.9, 50, 50, 0.1, GPU), (0.5, 5, 5, 0.05, GPU), (0.99, 1000, 905, 0.2, GPU),
    (0.99, 1000, 1000, 0.2, ACCEPTANCE), (0.99, 5000, 5000, 0.1, ACCEPTANCE), (0.95, 1000, 1000, 0.05, ACCEPTANCE), (0.5, 8, 8, 0.05, ACCEPTANCE),
    (None, 8, 800, 0.05, GPU),
])  # fmt: skip
def test_enough_requests_are_judged(quantile, old, new, margin, rule):
    assert verdict(base(n=old), at(1.0), quantile=quantile, samples=[new] * 5, margin=margin, rule=rule).verdict == PASS


# -- zero variance and the floor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "word"), [(1.0, PASS), (1.0001, PASS), (1.1, REGRESSION), (0.9, IMPROVEMENT)])
def test_constant_values_are_judged_as_if_they_spread_by_a_thousandth(level, word):
    rule = dataclasses.replace(GPU, session_prior=0.0)
    found = verdict(base(runs=(1.0,) * 10), [level] * 5, margin=0.02, rule=rule)
    assert found.verdict == word
    assert found.low < found.change < found.high
    assert found.high - found.low > 0.001


@pytest.mark.parametrize(("floor", "level", "word"), [
    (0.0, 1.25, REGRESSION), (0.5, 1.25, PASS), (0.2, 1.25, REGRESSION), (0.5, 1.7, REGRESSION), (0.01, 1.0, PASS), (2.0, 2.9, PASS),
])  # fmt: skip
def test_a_change_below_the_floor_is_no_loss(floor, level, word):
    found = verdict(base(), at(level), floor=floor)
    assert found.verdict == word
    assert found.margin == pytest.approx(max(0.05, floor), rel=0.01)
    assert bool(found.notes) == (floor > 0.05)


@pytest.mark.parametrize(("at_least", "problem"), [
    (0.05, "at_least=0.05 lets a loss of 95 % pass, it could hardly ever fail; at least 0.2"), (0.2, ""), (1.2, ""), (20, ""),
])  # fmt: skip
def test_a_gain_that_could_hardly_be_missed_is_no_claim(at_least, problem):
    assert gate_problem(Gate("output_tok_s", arm="a", against="b", at_least=at_least), 24) == problem


def test_a_floor_as_large_as_the_baseline_could_never_fail():
    found = verdict(base(100.0), at(1.0), better="higher", floor=120.0)
    assert found.verdict == INVALID
    assert "could hardly ever fail" in found.reason
    assert verdict(base(100.0), at(40.0), better="higher", floor=40.0).verdict == REGRESSION


# -- unsteady runs ------------------------------------------------------------------------------------------------------

TWO = [100.0, 121.0, 100.4, 120.2, 99.7, 120.8, 100.1, 121.5, 99.9, 120.0, 100.2, 120.6]


@pytest.mark.parametrize(("runs", "words"), [
    (TWO, "6 near 100, 6 near 120.7"), ([100.0, 121.0, 100.4, 99.7, 100.1, 121.5, 100.2, 100.3], "6 near 100.1, 2 near 121.2"),
    ([100.0, 101.0, 99.0, 100.0, 180.0], "4 near 100, 1 near 180"), ([100.0, 20.0, 99.0, 100.0, 101.0], "1 near 20, 4 near 100"),
])  # fmt: skip
def test_two_levels_or_a_wild_spread_are_inconclusive_with_levels_and_counts(runs, words):
    found = verdict(base(100.0), runs, margin=0.10, rule=once(runs))
    assert (found.verdict, found.reason) == (INCONCLUSIVE, f"unstable: new runs: {words}")
    assert found.certifiable > 0.10


def test_a_pass_that_one_of_two_levels_contradicts_is_none():
    """Wide enough apart in runs to be certain of the mean, which no run has."""
    stored = base(100.0, runs=STEADY * 4)
    new = [100.0, 100.1, 99.9, 113.0, 100.2, 99.8, 112.9, 100.1, 100.0, 99.9, 113.1, 100.1]
    found = verdict(stored, new, margin=0.10, rule=once(new))
    assert (found.verdict, found.reason) == (INCONCLUSIVE, "unstable: new runs: 9 near 100, 3 near 113")
    assert verdict(stored, new, margin=0.15, rule=once(new)).verdict == PASS


def test_a_loss_that_every_level_shows_stands():
    found = verdict(base(100.0), [2 * v for v in TWO])
    assert found.verdict == REGRESSION
    wild = verdict(base(100.0), [250.0, 400.0, 900.0, 300.0, 700.0, 350.0, 500.0, 270.0, 650.0, 330.0, 800.0, 410.0])
    assert wild.verdict == REGRESSION
    assert any(n.startswith("unstable: new runs") for n in wild.notes)


def test_a_baseline_of_two_levels_does_not_accuse_runs_at_its_worse_level():
    two = (1.0, 1.2, 1.001, 0.999, 1.0, 1.002, 1.201, 1.0, 0.998, 1.0)
    rule = once(range(12))
    assert verdict(base(100.0, runs=two, sessions=1), at(120.0, 12), rule=rule).verdict == INCONCLUSIVE
    assert verdict(base(100.0, runs=two, sessions=1), at(140.0, 12), rule=rule).verdict == REGRESSION


@pytest.mark.parametrize("new", [at(1.3, 8), [*at(1.45, 7), 1.26], at(1.0, 8)])
def test_one_run_apart_from_the_others_is_no_level(new):
    found = verdict(base(), new)
    assert found.verdict in (PASS, REGRESSION)
    assert not any("unstable" in n for n in found.notes)


@pytest.mark.parametrize(("new", "better", "words"), [
    ([100.0, 101.0, 99.0, 100.0, 130.0], "lower", "4 near 100, 1 near 130"), ([100.0, 101.0, 99.0, 100.0, 80.0], "lower", "1 near 80, 4 near 100"),
    ([100.0, 101.0, 99.0, 100.0, 130.0], "higher", "1 near 130, 4 near 100"), ([100.0, 101.0, 99.0, 100.0, 104.0], "lower", ""),
    ([100.0, 130.0, 75.0, 110.0, 95.0], "lower", ""), ([100.0, 101.0, 130.0], "lower", ""),
])  # fmt: skip
def test_one_wild_run_is_shown_and_not_dropped(new, better, words):
    found = verdict(base(100.0), new, better=better, margin=0.3, rule=once(new))
    assert [n for n in found.notes if n.startswith("outlier")] == ([f"outlier: new runs: {words}"] if words else [])
    assert found.value == pytest.approx(math.exp(sum(map(math.log, new)) / len(new)))


# -- notes --------------------------------------------------------------------------------------------------------------


def test_new_runs_that_spread_more_than_the_baselines_are_noted():
    noisy = verdict(base(100.0), [92.0, 107.0, 96.0, 104.0, 100.0, 91.0, 108.0, 99.0], margin=0.3)
    assert any(n.startswith("noisier than the baseline: runs spread by 7.8 %, those of the baseline by 0.23 %") for n in noisy.notes), (
        noisy.notes
    )
    assert verdict(base(), at(1.0, 8, 0.002)).notes == ()


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("step", [0.01, -0.01])
def test_a_drift_is_noted_with_its_size_and_direction(better, step):
    new = [1 + step * i + v for i, v in enumerate([0, 0.001, -0.001, 0, 0.001])]
    (note,) = [n for n in verdict(base(), new, better=better, margin=0.3, rule=once(new)).notes if n.startswith("drift")]
    assert note.startswith("drift: +4." if step > 0 else "drift: -4.")
    assert "measure old and new in turns" in note


def test_a_drift_below_one_per_cent_or_by_chance_is_not_noted():
    for new in ([1.0, 1.002, 1.004, 1.006, 1.008], [1.0, 1.05, 0.98, 1.06, 1.03]):
        assert not verdict(base(runs=[v + 0.05 * (i % 3) for i, v in enumerate(STEADY)]), new, margin=0.3, rule=once(new)).notes


# -- what would settle it -----------------------------------------------------------------------------------------------


def test_more_runs_are_counted_to_the_look_that_would_decide():
    """At the mean and spread seen, five runs do not pass and eight do."""
    noisy = base(runs=[1.0, 1.04, 0.96, 1.03, 0.97] * 2, sessions=1)
    new = [1.0, 1.04, 0.96, 1.03, 0.97]
    found = verdict(noisy, new)
    assert (found.verdict, found.more_runs) == (INCONCLUSIVE, 3)
    assert verdict(noisy, [*new, 1.0, 1.03, 0.97]).verdict == PASS


@pytest.mark.parametrize(("rule", "runs"), [(CPU, 5), (GPU, 12)])
def test_at_the_last_look_a_margin_is_named_and_no_runs(rule, runs):
    new = [1.0, 1.2, 0.8, 1.15, 0.85, 1.1, 0.9, 1.2, 0.8, 1.1, 0.9, 1.0][:runs]
    found = verdict(base(runs=[1.0, 1.2, 0.8, 1.15, 0.85] * 2), new, rule=rule)
    assert (found.verdict, found.more_runs) == (INCONCLUSIVE, None)
    assert found.certifiable > 0.05


def test_runs_beyond_the_last_look_are_never_asked_for():
    """On a CPU the rule ends at five runs: three that would need eight name a margin instead."""
    new = [1.0, 1.12, 0.9]
    on_cpu, on_gpu = (verdict(base(runs=[1.0, 1.1, 0.9, 1.07, 0.93] * 2), new, rule=rule, margin=0.15) for rule in (CPU, GPU))
    assert (on_cpu.verdict, on_cpu.more_runs) == (INCONCLUSIVE, None)
    assert on_cpu.certifiable > 0.15
    assert (on_gpu.verdict, on_gpu.more_runs) == (INCONCLUSIVE, 5)


def test_a_suspected_regression_is_named_so():
    new = [1.10, 1.02, 1.13, 1.05, 1.12, 1.03, 1.09, 1.07, 1.01, 1.12, 1.04, 1.10]
    found = verdict(base(runs=[1.0, 1.06, 0.95, 1.05, 0.94] * 2), new, margin=0.06)
    assert (found.verdict, found.reason[:9]) == (INCONCLUSIVE, "suspected"), found
    assert 0.002 < found.p_seq < 0.05


def test_a_missing_baseline_is_told_from_a_baseline_of_too_few_runs():
    assert verdict(Base(missing="nothing there"), at(1.0)).reason == "nothing there"
    found = verdict(base(runs=(1.0, 1.0), sessions=1), [])
    assert (found.verdict, found.reason) == (NO_BASELINE, "only 2 of the 5 runs that a baseline needs are stored")

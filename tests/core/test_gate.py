"""The gate: frozen decisions, the canary, futility, what fails. Beside it: test_gate_{vectors,properties,rules,paired,settle,faults}.py."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.canary import PARTS
from pytest_kvcache.core.gate import (
    IMPROVEMENT,
    INCONCLUSIVE,
    INVALID,
    NO_BASELINE,
    PASS,
    REGRESSION,
    RULES,
    Base,
    fails,
    judge,
    rule_for,
)

values = st.floats(min_value=1e-6, max_value=1e9, allow_nan=False)
samples = st.lists(st.floats(min_value=0.9, max_value=1.1), min_size=5, max_size=12)
new_samples = st.lists(st.floats(min_value=0.9, max_value=1.1), min_size=3, max_size=12)
directions = st.sampled_from(["lower", "higher"])


def verdict(base, new, better="lower", **more):
    return judge(Base(sessions=(tuple(base),)), new, better=better, margin=0.05, rule=RULES["gpu"], final=True, **more)


@given(st.lists(values, max_size=4), st.lists(values, max_size=12), directions)
def test_too_little_evidence_never_passes(base, new, better):
    assert verdict(base, new, better).verdict in (INVALID, INCONCLUSIVE, NO_BASELINE)


@given(samples, new_samples, directions)
def test_twice_as_bad_is_never_a_pass(base, new, better):
    worse = [v * 2 for v in new] if better == "lower" else [v / 2 for v in new]
    assert verdict(base, worse, better).verdict in (REGRESSION, INCONCLUSIVE)


@given(samples, new_samples, directions)
def test_a_frozen_verdict_stays_whatever_comes_after(base, new, better):
    decided = judge(Base(sessions=(tuple(base),)), new[:3], better=better, margin=0.05, rule=RULES["gpu"])
    if decided.verdict != INCONCLUSIVE:
        later = judge(Base(sessions=(tuple(base),)), new[:3] + [50.0] * 9, better=better, margin=0.05, rule=RULES["gpu"])
        assert later == decided


@given(samples, new_samples, directions)
def test_the_interval_holds_the_change_and_the_verdict_agrees_with_it(base, new, better):
    found = verdict(base, new, better)
    assert found.low <= found.change <= found.high
    assert found.value / found.baseline - 1 == pytest.approx(found.change, abs=1e-9)
    worst = found.high if better == "lower" else -found.low
    if found.verdict == PASS:
        assert worst < 0.05 + 1e-9


def test_a_missing_baseline_and_a_mismatch_have_their_own_verdicts():
    assert verdict([], [1.0, 1.0, 1.0]).verdict == NO_BASELINE
    found = judge(Base(mismatch="gpu: a -> b"), [1.0] * 3, better="lower", margin=0.05, rule=RULES["gpu"])
    assert found.verdict == INVALID
    assert "gpu: a -> b" in found.reason


def test_fifty_percent_on_a_noisy_cpu_is_a_regression_at_the_first_look():
    """The figures of the embedded default: restarts that differ by 7 %, a third fewer tokens."""
    base, new = [100, 107, 94, 103, 96], [65, 70, 61]
    found = judge(Base(sessions=(tuple(base),)), new, better="higher", margin=0.15, rule=RULES["cpu"])
    assert found.verdict == REGRESSION
    assert len(found.runs) == 3


def beside(times, part="memory"):
    return [{"on": "2 cores", "ms": {part: ms}} for ms in times]


@pytest.mark.parametrize(("factor", "canary", "word"), [
    (1.3, 6.0, REGRESSION), (1.3, 11.0, INCONCLUSIVE), (1.3, 3.3, INCONCLUSIVE), (1.5, 11.0, REGRESSION), (1.0, 6.0, PASS),
    (1.0, 7.0, PASS), (1.0, 11.0, INCONCLUSIVE), (0.8, 11.0, PASS), (0.5, 11.0, IMPROVEMENT),
])  # fmt: skip
def test_a_machine_in_another_state_neither_accuses_nor_excuses(factor, canary, word):
    stored = Base(sessions=((1.0, 1.01, 0.99, 1.005, 0.995),), canary_on="2 cores", canary_ms={"memory": (6.0, 6.1, 5.9, 6.0, 6.0)})
    new = [factor * v for v in (1.0, 1.01, 0.99, 1.0, 1.005)]
    found = judge(stored, new, better="lower", margin=0.15, rule=RULES["cpu"], canary=beside([canary] * 5))
    assert found.verdict == word
    assert bool(found.notes) == (canary != 6.0)


def test_the_canary_within_its_own_noise_changes_nothing():
    base, new = (1.0, 1.01, 0.99, 1.005, 0.995), [1.0, 1.01, 1.0]
    still = judge(
        Base(sessions=(base,), canary_on="2 cores", canary_ms={"memory": (6.0, 6.1, 6.0, 5.95, 6.05)}),
        new,
        better="lower",
        margin=0.15,
        rule=RULES["cpu"],
        canary=beside([6.1, 6.0, 6.0]),
    )
    assert still == judge(Base(sessions=(base,)), new, better="lower", margin=0.15, rule=RULES["cpu"])


@given(
    samples,
    new_samples,
    directions,
    st.lists(st.floats(min_value=1.0, max_value=20.0), min_size=24, max_size=24),
    st.sampled_from(list(PARTS)),
)
def test_a_canary_only_ever_weakens_a_verdict(base, new, better, canary, part):
    stored = Base(sessions=(tuple(base),), canary_on="2 cores", canary_ms={part: canary[: len(base)]})
    with_it = judge(stored, new[:3], better=better, margin=0.05, rule=RULES["gpu"], final=True, canary=beside(canary[12:15], part))
    without = verdict(base, new[:3], better)
    if with_it.reason.endswith("that is another machine"):
        assert with_it.verdict == INVALID
        return
    assert with_it.verdict in (without.verdict, INCONCLUSIVE, *([PASS] if without.verdict == IMPROVEMENT else []))
    assert (with_it.change, with_it.low, with_it.high, with_it.p_seq) == (without.change, without.low, without.high, without.p_seq)


def test_a_canary_missing_beside_one_run_is_no_canary():
    stored = Base(sessions=((1.0, 1.01, 0.99, 1.005, 0.995),), canary_on="2 cores", canary_ms={"memory": (6.0,) * 5})
    found = judge(
        stored, [1.3, 1.31, 1.29], better="lower", margin=0.15, rule=RULES["cpu"], canary=[*beside([11.0]), None, *beside([11.0])]
    )
    assert found.verdict == REGRESSION


def test_futility_stops_a_gate_in_ci_only():
    base, new = [1.0, 1.04, 0.96, 1.03, 0.97], [1.03, 1.10, 0.99, 1.07, 1.0, 1.05]
    stored = Base(sessions=(tuple(base),))
    early = judge(stored, new[:5], better="lower", margin=0.05, rule=rule_for("gpu", "ci"))
    late = judge(stored, new[:5], better="lower", margin=0.05, rule=rule_for("gpu", "full"))
    assert early.verdict == late.verdict == INCONCLUSIVE
    assert early.reason.startswith("futile")
    assert not late.reason.startswith("futile")


@pytest.mark.parametrize(("word", "profile", "strict", "recording", "reason", "failed"), [
    (REGRESSION, "ci", False, False, "", True), (REGRESSION, "smoke", False, True, "", True), (INVALID, "ci", False, True, "x", True),
    (NO_BASELINE, "ci", False, False, "x", True), (NO_BASELINE, "ci", False, True, "", False),
    (NO_BASELINE, "ci", False, True, "only 2 of 5 runs", True), (NO_BASELINE, "smoke", True, False, "x", False),
    (INCONCLUSIVE, "ci", False, False, "", False), (INCONCLUSIVE, "ci", True, False, "", True),
    (INCONCLUSIVE, "acceptance", False, False, "", True), (INCONCLUSIVE, "smoke", True, False, "", False),
    (PASS, "acceptance", True, False, "", False), (IMPROVEMENT, "acceptance", True, False, "", False),
])  # fmt: skip
def test_what_fails(word, profile, strict, recording, reason, failed):
    assert fails(word, reason, profile=profile, strict=strict, recording=recording) is failed


def test_verdicts_are_json_plain():
    found = verdict([1.0, 1.1, 0.9, 1.0, 1.05], [1.0, 1.0, 1.1])
    plain = dataclasses.asdict(found)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain | {k: list(v) for k, v in plain.items() if isinstance(v, tuple)}

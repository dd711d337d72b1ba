"""The canary: which part tells of another state, and where readings are not compared at all."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import canary as c
from pytest_kvcache.core.gate import INCONCLUSIVE, INVALID, PASS, REGRESSION, RULES, Base, judge

CARD = "GPU-7fa58b2f-8016-ba90-aea5-bac85273433d, driver 580.159.04"
# One H200 around seven starts of vLLM, 2026-12-01.
COPY = [2.0407, 2.0439, 2.0495, 2.0475, 2.0458, 2.0525, 2.0509]
ARITHMETIC = [2.8062, 2.8099, 2.8137, 2.8083, 2.8069, 2.8155, 2.8117]


def reading(copy=2.045, arithmetic=2.81, on=CARD):
    return {"on": on, "ms": {"copy": copy, "arithmetic": arithmetic}}


def canary(now):
    return c.Canary(old=c.side([reading(*both) for both in zip(COPY, ARITHMETIC, strict=True)]), new=c.side(now))


def shift(copy=1.0, arithmetic=1.0):
    return canary([reading(copy * 2.045, arithmetic * 2.81)] * 3).shift(3)


def test_one_card_in_one_state_is_within_the_noise():
    assert shift() is None
    for name, times in (("copy", COPY), ("arithmetic", ARITHMETIC)):
        assert max(times) / min(times) - 1 < 2 * c.PARTS[name].noise


@pytest.mark.parametrize(
    ("copy", "arithmetic", "part"), [(1.02, 1.0, "copy"), (1.0, 0.97, "arithmetic"), (1.03, 1.06, "arithmetic"), (0.9, 1.06, "copy")]
)
def test_the_part_that_may_have_made_the_most_is_told(copy, arithmetic, part):
    found = shift(copy, arithmetic)
    assert found.part == part
    assert c.PARTS[part].words in found.words
    assert found.allowance == pytest.approx(abs(math.log({"copy": copy, "arithmetic": arithmetic}[part])), abs=0.003)


@pytest.mark.parametrize(("loss", "copy", "word"), [
    (1.10, 1.0, REGRESSION), (1.10, 1.06, INCONCLUSIVE), (1.10, 1.03, REGRESSION), (1.0, 1.0, PASS), (1.0, 1.06, INCONCLUSIVE),
    (1.0, 0.94, INCONCLUSIVE), (1.2, 1.06, REGRESSION),
])  # fmt: skip
def test_a_card_in_another_state_neither_accuses_nor_excuses(loss, copy, word):
    stored = Base(
        sessions=((1.0, 1.002), (0.998, 1.001), (1.0, 0.999)),
        canary_on=CARD,
        canary_ms={"copy": (2.04, 2.05) * 3, "arithmetic": (2.81, 2.81) * 3},
    )
    new = [loss * v for v in (1.0, 1.001, 0.999, 1.0, 1.0, 1.001, 1.0, 0.999, 1.0, 1.0, 1.0, 1.0)]
    found = judge(stored, new, better="lower", margin=0.05, rule=RULES["gpu"], final=True, canary=[reading(copy=copy * 2.045)] * 12)
    assert found.verdict == word
    assert any("copies within the GPU" in note for note in found.notes) == (copy != 1.0)


@pytest.mark.parametrize("now", [
    [reading(), reading(on="GPU-another"), reading()], [None, None, None], [reading(), None, reading()], [reading(on="GPU-another")] * 3,
    [reading(on=CARD.replace("580", "590"))] * 3,
], ids=["two cards", "none", "one missing", "another card", "a driver that slows the card must not excuse itself"])  # fmt: skip
def test_readings_from_elsewhere_or_of_some_runs_only_are_not_compared(now):
    now = [r and {**r, "ms": {name: 1.2 * v for name, v in r["ms"].items()}} for r in now]
    found = canary(now)
    assert found.shift(3) is None and found.problem(3) == ""
    assert found.note.startswith("judged without the canary: the baseline's ran on GPU-7fa58b2f")
    stored = Base(sessions=((1.0, 1.002), (0.998, 1.001), (1.0, 0.999)), canary_on=CARD, canary_ms={"copy": (2.04,) * 6})
    lost = judge(stored, [1.2, 1.2, 1.2], better="lower", margin=0.05, rule=RULES["gpu"], canary=now)
    assert lost.verdict == REGRESSION and any("judged without the canary" in note for note in lost.notes)


def test_a_baseline_without_readings_needs_no_words():
    assert c.Canary(new=c.side([reading()] * 3)).note == ""


def test_a_machine_that_takes_thrice_as_long_is_another_one():
    stored = Base(sessions=((1.0, 1.002), (0.998, 1.001), (1.0, 0.999)), canary_on=CARD, canary_ms={"copy": (2.04,) * 6})
    for times in (0.3, 3.0):
        found = judge(stored, [4.0] * 3, better="lower", margin=0.05, rule=RULES["gpu"], canary=[reading(copy=2.04 * times)] * 3)
        assert found.verdict == INVALID and found.reason.endswith("that is another machine")


def test_a_window_between_two_places_has_no_reading():
    assert c.around(reading(), reading(on="GPU-another")) is None
    assert c.around(None, reading()) is None


# The sides' noise and the canary's together, at the margin itself: what is excused must be so by its bound, not by its estimate.
@pytest.mark.parametrize("cv", [0.01, 0.02])
@pytest.mark.parametrize("state", [-0.004, -0.01, -0.02, -0.048, 0.02])
def test_a_faster_machine_hides_no_loss_of_the_margin(cv, state):
    rng, passed, n = random.Random(f"{cv}{state}"), 0, 400
    for _ in range(n):
        stored = Base(
            sessions=tuple(tuple(math.exp(rng.gauss(0, cv)) for _ in range(2)) for _ in range(5)), canary_on=CARD,
            canary_ms={"copy": [2.04 * math.exp(rng.gauss(0, 0.002)) for _ in range(10)]},
        )  # fmt: skip
        new = [1.05 * math.exp(state + rng.gauss(0, cv)) for _ in range(12)]
        beside = [reading(copy=2.04 * math.exp(state + rng.gauss(0, 0.002))) for _ in range(12)]
        for runs in (3, 5, 8, 12):
            found = judge(stored, new[:runs], better="lower", margin=0.05, rule=RULES["gpu"], final=runs == 12, canary=beside[:runs])
            if found.verdict != INCONCLUSIVE:
                break
        passed += found.verdict == PASS
    assert passed / n <= (0.03 if abs(state) > 0.005 else 0.10)


@given(st.floats(min_value=0.01, max_value=1e4), st.floats(min_value=0.01, max_value=1e4))
def test_a_window_lies_between_its_two_readings(before, after):
    found = c.around(reading(before, 1.0), reading(after, 1.0))
    assert min(before, after) * 0.99 - 1e-4 <= found["ms"]["copy"] <= max(before, after) * 1.01 + 1e-4
    assert found["on"] == CARD


def test_a_part_known_on_one_side_only_tells_nothing():
    assert canary([{"on": CARD, "ms": {"memory": 20.0}}] * 3).shift(3) is None

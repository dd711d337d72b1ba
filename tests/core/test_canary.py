"""The canary: which part tells of another state, and where readings are not compared at all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import canary as c
from pytest_kvcache.core.gate import INCONCLUSIVE, PASS, REGRESSION, RULES, Base, judge

CARD = "GPU-7fa58b2f-8016-ba90-aea5-bac85273433d, driver 580.159.04"
# One H200 around seven starts of vLLM, 2026-12-01.
COPY = [2.0407, 2.0439, 2.0495, 2.0475, 2.0458, 2.0525, 2.0509]
ARITHMETIC = [2.8062, 2.8099, 2.8137, 2.8083, 2.8069, 2.8155, 2.8117]


def reading(copy=2.045, arithmetic=2.81, on=CARD):
    return {"on": on, "ms": {"copy": copy, "arithmetic": arithmetic}}


def shift(copy=1.0, arithmetic=1.0):
    now = c.by_part([reading(copy * 2.045, arithmetic * 2.81)] * 3)
    return c.Canary(old={"copy": COPY, "arithmetic": ARITHMETIC}, new=now).shift(3)


def test_one_card_in_one_state_is_within_the_noise():
    assert shift() is None
    for name, times in (("copy", COPY), ("arithmetic", ARITHMETIC)):
        assert max(times) / min(times) - 1 < c.PARTS[name].noise


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
        sessions=((1.0, 1.002), (0.998, 1.001), (1.0, 0.999)), canary_ms={"copy": ((2.04, 2.05),) * 3, "arithmetic": ((2.81, 2.81),) * 3}
    )
    new = [loss * v for v in (1.0, 1.001, 0.999, 1.0, 1.0, 1.001, 1.0, 0.999, 1.0, 1.0, 1.0, 1.0)]
    found = judge(
        stored, new, better="lower", margin=0.05, rule=RULES["gpu"], final=True, canary_ms=c.by_part([reading(copy=copy * 2.045)] * 12)
    )
    assert found.verdict == word
    assert any("copies within the GPU" in note for note in found.notes) == (copy != 1.0)


def test_readings_of_another_card_or_of_none_are_not_compared():
    assert c.by_part([reading(), reading(on="GPU-another")]) == {}
    assert c.by_part([reading(), reading(on=CARD.replace("580", "590"))]) == {}, "a driver that slows the card must not excuse itself"
    assert c.by_part([None, None]) == {}
    assert c.by_part([reading(2.0, 3.0), None]) == {"copy": (2.0, None), "arithmetic": (3.0, None)}
    assert c.place([reading(), None, reading()]) == CARD
    assert c.around(reading(), reading(on="GPU-another")) is None
    assert c.around(None, reading()) is None


@given(st.floats(min_value=0.01, max_value=1e4), st.floats(min_value=0.01, max_value=1e4))
def test_a_window_lies_between_its_two_readings(before, after):
    found = c.around(reading(before, 1.0), reading(after, 1.0))
    assert min(before, after) * 0.99 - 1e-4 <= found["ms"]["copy"] <= max(before, after) * 1.01 + 1e-4
    assert found["on"] == CARD


def test_a_part_known_on_one_side_only_tells_nothing():
    now = c.by_part([{"on": "2 cores", "ms": {"memory": 20.0}}] * 3)
    assert c.Canary(old={"copy": COPY}, new=now).shift(3) is None

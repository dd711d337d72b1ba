"""The controls: a figure counts only where a cache made worse on purpose is seen, and a cache that was quantised differs at all."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import perplexity as p
from pytest_kvcache.core import quality as q
from pytest_kvcache.core.gate import INVALID, PASS, REGRESSION
from pytest_kvcache.core.perplexity import Figure, Scores
from pytest_kvcache.core.quality import NOT_SEEN, Controls, not_applied, not_seen, within


def controls(floor, negative, error=1e-5):
    return Controls(floor={"kld.mean": Figure(value=floor, error=error)}, negative={"kld.mean": Figure(value=negative, error=error)})


@pytest.mark.parametrize(("floor", "negative", "error", "seen"), [
    (1e-5, 0.1, 1e-3, True), (0.0, 0.0, 0.0, False), (1e-4, 1e-4, 1e-6, False), (1e-4, 2e-4, 1e-4, False), (0.1, 0.01, 1e-4, False),
])  # fmt: skip
def test_the_negative_control_must_lie_clearly_above_the_floor(floor, negative, error, seen):
    why = not_seen(controls(floor, negative, error), reads_back=True)
    assert (why == "") == seen
    assert seen or why.startswith(f"{NOT_SEEN}: a cache made worse on purpose")


def test_a_text_in_one_pass_is_never_judged():
    assert "one pass" in not_seen(controls(1e-6, 1.0), reads_back=False)


def test_a_quantised_cache_that_changes_no_bit_was_none():
    same = Scores(nll=[1.0, 2.0], base_nll=[1.0, 2.0], kld=[0.0, 0.0], same=[True, True], chunks=[0, 1])
    assert not_applied(same, "int8") == "the probe does not see the cache, or int8 was not applied: every token is exactly the 16-bit one"
    assert not_applied(dataclasses.replace(same, nll=[1.0, 2.0000001]), "int8") == ""
    assert not_applied(dataclasses.replace(same, kld=[0.0, 1e-9]), "int8") == ""


@given(st.floats(1.01, 1e4), st.floats(1e-4, 0.5), st.floats(-0.04, 0.0))
def test_a_little_better_is_a_pass_and_worse_than_the_limit_is_not(base, limit, better):
    assert within(base, base * (1 + better), limit) == (PASS, "")
    assert within(base, base * (1 + limit * 1.001), limit)[0] == REGRESSION


def test_much_better_is_another_test():
    word, why = within(5.5, 4.4, 0.01)
    assert word == INVALID and why.startswith("suspicious: the perplexity is 20 % better")


def test_a_cache_that_is_written_and_never_read_gives_the_tokens_of_one_pass():
    base, floor = [1.0 + i / 7 for i in range(200)], [1.0 + i / 7 + (0.001 if i % 3 else 0.0) for i in range(200)]
    assert "written and never read" in q.never_read(floor, base, floor, "kv_dtype=int4")
    assert q.never_read([v + 0.01 for v in base], base, floor, "kv_dtype=int4") == ""
    assert q.never_read(base, base, base, "kv_dtype=int4") == "", "an engine whose one pass is its steps tells nothing: not_applied does"


@pytest.mark.parametrize(("precision", "few"), [
    ("kv_dtype=int4", True), ("kv_dtype=nvfp4", True), ("kv_dtype=turboquant_k8v4", True), ("quantization=int4", True), ("kv_dtype=fp8_e4m3", False),
    ("kv_dtype=int8", False), ("kv_dtype=int8_per_token_head", False), ("kv_dtype=int4_per_token_head", True),
])  # fmt: skip
def test_four_bits_are_never_as_good_as_sixteen(precision, few):
    found = q.too_good(p.Figure(value=0.001), p.Figure(value=0.001, error=0.0001), precision)
    assert bool(found) == few
    assert q.too_good(p.Figure(value=0.02), p.Figure(value=0.001, error=0.0001), precision) == ""

"""Fragmentation of a paged cache: by hand, by counting every step of a simulated server, and by what such a server would tell."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.fragmentation import expected_waste, measured, recommend, wasted_at, wasted_over_life

from ..simulated_server import Server, closed_loop, mixed

lengths = st.integers(1, 3000)
requests = st.lists(st.tuples(lengths, st.integers(1, 400)), min_size=1, max_size=12)


# -- by arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "block", "share"), [
    ([16], 16, 0), ([17], 16, 15 / 32), ([1], 16, 15 / 16), ([16, 17], 16, 15 / 48), ([100, 200, 300], 1, 0), ([100], 128, 28 / 128), ([], 16, 0),
])  # fmt: skip
def test_the_last_block_of_each_sequence_is_what_is_wasted(given, block, share):
    assert wasted_at(given, block) == pytest.approx(share)


def test_over_a_life_each_step_counts_once():
    # A prompt of 3 and two tokens in blocks of 4: it holds 3 and then 4 tokens.
    assert wasted_over_life([(3, 2)], 4) == pytest.approx(1 - 7 / 8)
    # One more and the last step has 5 tokens in two blocks.
    assert wasted_over_life([(3, 3)], 4) == pytest.approx(1 - 12 / 16)
    assert wasted_over_life([], 16) == 0


@given(requests, st.integers(1, 300))
def test_the_closed_form_is_the_sum_over_all_steps(given, block):
    used = sum(n for isl, osl in given for n in range(isl, isl + osl))
    taken = sum(math.ceil(n / block) * block for isl, osl in given for n in range(isl, isl + osl))
    assert wasted_over_life(given, block) == pytest.approx(1 - used / taken, abs=1e-12)


@given(requests, st.integers(1, 300))
def test_waste_is_a_share_and_blocks_of_one_waste_nothing(given, block):
    for share in (wasted_over_life(given, block), wasted_at([isl + osl for isl, osl in given], block)):
        assert 0 <= share < 1
    assert wasted_over_life(given, 1) == wasted_at([isl for isl, _ in given], 1) == 0


@given(requests, st.integers(1, 60), st.integers(2, 6))
def test_blocks_that_are_made_of_smaller_ones_waste_no_less(given, block, times):
    assert wasted_over_life(given, times * block) >= wasted_over_life(given, block) - 1e-12


@given(requests, st.integers(1, 300), st.integers(2, 5))
def test_the_same_requests_again_and_in_another_order_change_nothing(given, block, times):
    assert wasted_over_life(times * given[::-1], block) == pytest.approx(wasted_over_life(given, block))


@pytest.mark.parametrize("block", [8, 16, 64, 256])
def test_the_expected_waste_is_that_of_lengths_that_end_anywhere(block):
    draw = random.Random(block)
    given = [draw.randint(1000, 3047) for _ in range(40_000)]
    mean = sum(given) / len(given)
    assert wasted_at(given, block) == pytest.approx(expected_waste(block, mean), rel=0.02)
    assert sum(-(-n // block) * block - n for n in given) / len(given) == pytest.approx((block - 1) / 2, rel=0.02)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "16"])
def test_what_is_no_length_is_refused(bad):
    with pytest.raises(ValueError, match="whole number"):
        wasted_at([16], bad)
    with pytest.raises(ValueError, match="whole number"):
        wasted_over_life([(bad, 1)], 16)


# -- against a simulated server -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 64])
def test_a_server_wastes_what_the_formula_says(block):
    """Requests one at a time: the mean over all steps of what the simulated pool held is the closed form, to the last token."""
    server = Server(block_size=block, blocks=4096)
    asks = mixed(3, 30, (20, 700), (5, 90))
    steps = closed_loop(server, asks, 1).steps
    # The last step of a request has one token more than it holds blocks for: its end is told after that token's step.
    taken, held = (sum(column) for column in zip(*((share * 4096 * block, tokens) for _, _, share, tokens, _ in steps), strict=True))
    assert 1 - held / taken == pytest.approx(wasted_over_life([(a.isl, a.osl) for a in asks], block), abs=1e-9)


def readings(block, seed, cv=0.0, every=37):
    """What a probe would read of a busy server: the share of the pool, and tokens held, by a count that is off by a few per cent."""
    draw = random.Random(seed)
    server = Server(block_size=block, blocks=40_000 // block, chunk=512)
    steps = closed_loop(server, mixed(seed, 160, (20, 700), (20, 90)), 24).steps[60:-60]
    truth = 1 - sum(held for *_, held, _ in steps) / sum(share * server.blocks * block for _, _, share, _, _ in steps)
    seen = [(share, held * math.exp(draw.gauss(0, cv))) for _, _, share, held, _ in steps[::every]]
    return truth, seen, server.blocks * block


def test_60_measured_fragmentations_of_a_known_one(request):
    """A count of the tokens held that is off by 2 to 7 % each time: bias, and how often the interval holds the truth."""
    draw, errors, covered = random.Random(1), [], 0
    for seed in range(60):
        truth, seen, capacity = readings(64, seed, draw.uniform(0.02, 0.07))
        found = measured(seen, capacity)
        errors.append(found.wasted - truth)
        covered += found.low <= truth <= found.high
    bias = sum(errors) / len(errors)
    spread = math.sqrt(sum((e - bias) ** 2 for e in errors) / len(errors))
    request.node.user_properties.append(("wasted", f"bias {bias:+.4f}, spread {spread:.4f}, covered {covered / 60:.3f}"))
    assert abs(bias) < 0.006 and spread < 0.03
    assert 0.88 <= covered / 60 <= 1


def test_a_coarse_reading_is_told_as_such():
    truth, seen, capacity = readings(64, 5)
    coarse = [(round(share, 2), held) for share, held in seen]
    found = measured(coarse, capacity, resolution=0.01)
    assert found.low <= truth <= found.high
    exact = measured(seen, capacity)
    assert found.high - found.low > exact.high - exact.low > 0


def test_one_reading_has_the_error_of_its_resolution_only():
    found = measured([(0.5, 450)], 1000, resolution=0.02)
    assert found.wasted == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(1 - 450 / 490), pytest.approx(1 - 450 / 510))


@pytest.mark.parametrize("given", [[], [(0.0, 0)], [(0.0, 10), (0.5, 0)], [(math.nan, 10)], [(0.5, math.inf)], [(math.inf, 4)]])
def test_readings_that_tell_nothing_have_a_reason(given):
    found = measured(given, 1000)
    assert found.reason and found.wasted is None and found.low is None


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(1, 1000)), min_size=1, max_size=9), st.floats(0.1, 50), st.floats(0, 0.01))
def test_the_interval_holds_the_figure_and_tokens_may_be_in_any_unit(given, unit, resolution):
    found = measured(given, 1000, resolution=resolution)
    other = measured([(share, held * unit) for share, held in given], 1000 * unit, resolution=resolution)
    assert other.wasted == pytest.approx(found.wasted, abs=1e-9)
    assert found.low <= found.wasted + 1e-12 and (found.high is None or found.wasted <= found.high + 1e-12)


# -- recommendation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "most", "size"), [
    ([(2000, 500)], 0.04, 128), ([(2000, 500)], 0.005, 16), ([(100, 50)], 0.04, 8), ([(30, 1)], 0.04, 1), ([(131_072, 1000)], 0.04, 512),
])  # fmt: skip
def test_the_largest_block_that_wastes_little_enough(given, most, size):
    found = recommend(given, most=most)
    assert found.block_size == size
    by_size = {row.block_size: row for row in found.table}
    assert by_size[size].over_life <= most
    assert all(row.over_life > most for row in found.table if row.block_size > size)
    assert [row.block_size for row in found.table] == sorted(by_size)


def test_where_each_candidate_wastes_too_much_there_is_none():
    found = recommend([(10, 2)], (64, 32))
    assert found.block_size is None and "more than 0.04" in found.reason and len(found.table) == 2
    assert recommend([]).block_size is None and recommend([]).reason
    assert recommend([(10, 2)], ()).block_size is None


@given(requests)
def test_more_waste_allowed_is_never_a_smaller_block(given):
    sizes = [recommend(given, most=most).block_size for most in (0.005, 0.02, 0.04, 0.1, 0.3)]
    assert sizes == sorted(sizes)


def test_the_formula_stands_beside_what_the_requests_waste():
    given = [(isl, osl) for isl in range(900, 1100, 7) for osl in range(100, 300, 11)]
    row = next(row for row in recommend(given).table if row.block_size == 64)
    assert row.over_life == pytest.approx(row.expected, rel=0.03) and row.at_end == pytest.approx(row.expected, rel=0.2)

"""How many requests a quantile needs: floors, defaults, early stopping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.metrics import QUANTILES, percentile
from pytest_kvcache.core.samples import default_margin, estimate_rank, floor, full_floor, least_under, order_bound, problem


@pytest.mark.parametrize(("q", "least"), [(0.5, 5), (0.75, 20), (0.9, 50), (0.95, 100), (0.99, 500), (0.999, 5000)])
def test_five_requests_must_lie_beyond_a_quantile_of_the_tail(q, least):
    assert floor(q) == least


@pytest.mark.parametrize("q", QUANTILES.values())
def test_at_its_floor_a_quantile_is_not_the_largest_value_and_a_bound_of_it_exists(q):
    n = floor(q)
    assert percentile(range(n), q) < n - 1
    assert n >= order_bound(q, 0.95)


@pytest.mark.parametrize(("q", "margin", "least"), [
    (0.99, 0.2, 1000), (0.99, 0.25, 1000), (0.99, 0.19, 5000), (0.99, 0.05, 5000), (0.95, 0.1, 1000), (0.9, 0.1, 50), (0.5, 0.05, 5),
])  # fmt: skip
def test_full_floors(q, margin, least):
    assert full_floor(q, margin) == least


@pytest.mark.parametrize("margin", [0.05, 0.15])
@pytest.mark.parametrize("quantile", [*QUANTILES, ""])
@pytest.mark.parametrize("requests", [500, 1000, 5000])
def test_a_default_margin_is_one_for_which_the_requests_suffice(margin, quantile, requests):
    chosen = default_margin(margin, quantile, requests)
    assert chosen >= margin
    if quantile and requests >= 1000:
        assert requests >= full_floor(QUANTILES[quantile], chosen)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(list(QUANTILES.values())))
def test_equal_sides_differ_only_by_their_floor_and_others_by_ten_per_cent(old, new, q):
    assert bool(problem(q, 0.1, [old] * 5, [old] * 3, full=False)) == (old < floor(q))
    assert bool(problem(q, 0.1, [old] * 5, [new] * 3, full=False)) == (min(old, new) < floor(q) or abs(new - old) > 0.1 * old)
    assert bool(problem(q, 0.1, [], [new], full=False)) == (new < floor(q)), "before there is a baseline"


def test_nothing_known_is_no_problem():
    assert problem(0.99, 0.1, [], [], full=True) == ""


@given(st.integers(0, 20), st.sampled_from([0.5, 0.9, 0.95, 0.99]), st.sampled_from([0.9, 0.99]))
def test_the_fewest_requests_are_enough_and_one_less_is_not(over, q, confidence):
    """P[Binomial(n, 1-q) <= over], term by term."""
    from math import comb

    def at_most(n):
        return sum(comb(n, i) * (1 - q) ** i * q ** (n - i) for i in range(over + 1))

    under = least_under(over, q, confidence)
    assert at_most(under + over) < 1 - confidence
    assert under == 1 or at_most(under + over - 1) >= 1 - confidence


def test_too_few_requests_have_no_rank():
    assert estimate_rank(661, 0.99) == 0

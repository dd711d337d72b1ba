"""Units convert inside a dimension, and nothing is guessed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.metrics import METRICS
from pytest_kvcache.core.units import _UNITS, factor


@pytest.mark.parametrize(("old", "new", "times"), [
    ("ms", "s", 1e-3), ("s", "ms", 1e3), ("us", "ms", 1e-3), ("µs", "us", 1.0), ("min", "s", 60), ("tok/s", "tok/min", 60),
    ("tok/ms", "tok/s", 1e3), ("ktok/s", "tok/s", 1e3), ("GiB", "MiB", 1024), ("GB", "GiB", 1e9 / 2**30), ("kWh", "J", 3.6e6),
    ("tok/J", "tok/kJ", 1e3), ("GB/s", "MB/s", 1e3), ("%", "1", 0.01), ("ppl", "ppl", 1.0), ("", "", 1.0), ("ppl/ms", "ppl/s", 1e3),
])  # fmt: skip
def test_inside_a_dimension(old, new, times):
    assert factor(old, new) == pytest.approx(times)


@pytest.mark.parametrize(("old", "new"), [
    ("ms", "tok/s"), ("ms", "MB"), ("ms", ""), ("", "ms"), ("ms", "parsec"), ("tok/s", "s/tok"), ("tok/s", "req/s"), ("tok/s", "tok"),
    ("ppl", "nll"), ("J", "W"), ("MB", "Mb"), ("ms", "MS"), ("ms", "ms/s"), ("a/b/c", "a/b"),
])  # fmt: skip
def test_across_dimensions_there_is_no_factor(old, new):
    assert factor(old, new) is None


@given(st.sampled_from(sorted(_UNITS)), st.sampled_from(sorted(_UNITS)), st.sampled_from(sorted(_UNITS)))
def test_factors_invert_and_chain(a, b, c):
    there, back = factor(a, b), factor(b, a)
    assert (there is None) == (back is None)
    if there is not None:
        assert there * back == pytest.approx(1)
        on = factor(b, c)
        assert (on is None) == (factor(a, c) is None)
        assert on is None or there * on == pytest.approx(factor(a, c))


def test_every_unit_of_a_metric_converts_or_counts_something():
    parts = {part for m in METRICS.values() for part in m.unit.split("/")}
    assert parts - set(_UNITS) <= {"req", "nats"}

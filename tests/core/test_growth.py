"""Growth with the context: against a simulated server whose exponent and cadence are known, and against curves that are the model itself."""

import functools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.core.growth import K, cadence, ttft_growth

from ..simulated_server import Ask, Server, closed_loop, noisy

CONTEXTS = (512, 1024, 2048, 4096, 8192)
STEP_MS = 20.0


@functools.cache
def simulated(power):
    """TTFT in ms of a lone prompt by its length. A prompt of the middle length takes ten times the constant step."""
    server = Server(step_s=STEP_MS / 1e3, prefill_s=0.2 / 2048**power, power=power)
    return {n: closed_loop(server, [Ask(isl=n, osl=1)], 1).served[0].ttft_ms for n in CONTEXTS}


def points(truth, cv, draw, runs=3):
    return [(n, noisy(value, cv, draw)) for n, value in truth.items() for _ in range(runs)]


# -- TTFT ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 1.3, 2.0])
def test_200_noisy_sweeps_of_a_known_exponent(power, request):
    """Three runs a length, noise of CV 2 to 7 %: bias and spread, and how often the interval and the standard error hold the truth."""
    draw = random.Random(f"{power}")
    found = [ttft_growth(points(simulated(power), draw.uniform(0.02, 0.07), draw)) for _ in range(200)]
    errors = [growth.exponent - power for growth in found]
    bias = math.fsum(errors) / len(errors)
    spread = math.sqrt(math.fsum((e - bias) ** 2 for e in errors) / len(errors))
    covered = sum((g.low or 0) <= power <= (g.high or 9) for g in found) / len(found)
    plain = math.fsum(g.plain - power for g in found) / len(found)
    request.node.user_properties.append(("exponent", f"bias {bias:+.4f}, spread {spread:.4f}, covered {covered:.3f}; plain {plain:+.3f}"))
    assert abs(bias) < 0.01 and spread < 0.06
    assert 0.91 <= covered <= 0.99
    assert sum(abs(g.exponent - power) < 2 * g.se for g in found) > 0.88 * len(found)
    assert plain < -0.08, "the constant bends a plain log-log line"
    constants = sorted(g.constant_ms for g in found)
    assert constants[100] == pytest.approx(STEP_MS, rel=0.15)


@pytest.mark.parametrize("constant", [0.0, 30.0, 3000.0])
@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.7, 2.4])
@pytest.mark.parametrize("lengths", [CONTEXTS, (512, 4096, 32768), (4096, 8192, 32768, 131072)])
def test_without_noise_the_fit_is_the_curve(constant, exponent, lengths):
    scale = 300.0 / lengths[1] ** exponent
    found = ttft_growth([(n, constant + scale * n**exponent) for n in lengths])
    assert found.exponent == pytest.approx(exponent, abs=0.02)
    assert found.constant_ms + found.scale_ms * lengths[-1] ** found.exponent == pytest.approx(
        constant + scale * lengths[-1] ** exponent, rel=5e-3
    )
    assert found.plain <= found.exponent + 0.01
    if constant:
        assert found.constant_ms == pytest.approx(constant, rel=0.1) and found.plain < exponent - 0.02


def test_what_does_not_grow_has_no_lower_end():
    draw = random.Random(4)
    found = ttft_growth(points(dict.fromkeys(CONTEXTS, 50.0), 0.05, draw))
    assert found.low is None


def test_three_points_give_an_exponent_and_no_certainty():
    found = ttft_growth([(1024, 30.0), (2048, 50.0), (4096, 90.0)])
    assert found.exponent == pytest.approx(1.0, abs=0.01) and found.reason == ""
    assert (found.se, found.low, found.high, found.relative_sd) == (None, None, None, None)


BAD = [
    ([], "0 context lengths"), ([(1024, 5.0), (2048, 7.0)] * 3, "2 context lengths"), ([(1024, 5.0), (2048, math.nan), (4096, 9.0)], "above 0"),
    ([(1024, 5.0), (2048, 0.0), (4096, 9.0)], "above 0"), ([(0, 5.0), (2048, 1.0), (4096, 9.0)], "above 0"),
    ([(1024, 5.0), (2048, 7.0), (math.inf, 9.0)], "above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "why"), BAD)
def test_what_says_nothing_has_a_reason_and_no_figure(given, why):
    growth, line = ttft_growth(given), cadence(given)
    assert why in growth.reason and why in line.reason
    assert (growth.exponent, growth.plain, growth.se, growth.low) == (None,) * 4
    assert (line.slope_ms, line.intercept_ms, line.slope_interval) == (None,) * 3


curves = st.tuples(st.floats(0, 100), st.floats(0.5, 2.5), st.floats(0.005, 0.07), st.integers(0, 10**6))


def made(constant, exponent, cv, seed):
    return points({n: constant + 20 * (n / 2048) ** exponent for n in CONTEXTS}, cv, random.Random(seed))


@settings(max_examples=20)
@given(curves, st.randoms(use_true_random=False), st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_units_and_order_change_no_exponent(how, shuffle, unit, length_unit):
    given_points = made(*how)
    plain = ttft_growth(given_points)
    shuffle.shuffle(given_points)
    other = ttft_growth([(n * length_unit, ms * unit) for n, ms in given_points])
    assert (other.exponent, other.plain) == (pytest.approx(plain.exponent, abs=1e-6), pytest.approx(plain.plain, abs=1e-9))
    assert other.constant_ms == pytest.approx(plain.constant_ms * unit, rel=1e-4, abs=1e-6 * unit)
    assert (other.low, other.high) == tuple(end if end is None else pytest.approx(end, abs=1e-6) for end in (plain.low, plain.high))


@settings(max_examples=20)
@given(curves)
def test_the_exponent_lies_in_its_interval_and_not_below_the_plain_slope(how):
    found = ttft_growth(made(*how))
    assert (found.low or 0) <= found.exponent <= (found.high or 4)
    assert found.exponent >= found.plain - 0.01
    assert found.constant_ms >= 0 and found.scale_ms >= 0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=10))
def test_odd_numbers_are_answered(odd):
    growth, line = ttft_growth(odd), cadence(odd)
    assert growth.reason or growth.exponent >= 0
    assert line.reason or math.isfinite(line.slope_ms)


# -- TPOT ---------------------------------------------------------------------------------------------------------------


@functools.cache
def simulated_cadence():
    """TPOT in ms by the mean context of a lone answer: 20 ms and 5 us a token of the cache, so 5.12 ms for each K."""
    server = Server(step_s=0.018, sequence_s=0.002, kv_token_s=5e-6)
    truth = {}
    for n in (1024, 4096, 8192, 16384):
        request = closed_loop(server, [Ask(isl=n, osl=65)], 1).served[0]
        truth[n + 31.5] = request.tpot_ms  # its 64 steps read n to n + 63 tokens
    return truth


def test_200_noisy_cadences_of_a_known_line(request):
    draw = random.Random(8)
    found = [cadence(points(simulated_cadence(), draw.uniform(0.02, 0.07), draw)) for _ in range(200)]
    for name, truth in (("intercept", 20.0), ("slope", 5e-3 * K)):
        values = [getattr(line, f"{name}_ms") for line in found]
        bias = math.fsum(values) / len(values) / truth - 1
        covered = sum(low <= truth <= high for low, high in (getattr(line, f"{name}_interval") for line in found)) / len(found)
        spread = math.sqrt(math.fsum((v / truth - 1 - bias) ** 2 for v in values) / len(values))
        request.node.user_properties.append((name, f"bias {bias:+.4f}, spread {spread:.4f}, covered {covered:.3f}"))
        assert abs(bias) < 0.01 and spread < 0.05 and 0.91 <= covered <= 0.99


def test_without_noise_the_line_is_exact():
    found = cadence(list(simulated_cadence().items()))
    assert (found.intercept_ms, found.slope_ms) == (pytest.approx(20.0, rel=1e-9), pytest.approx(5.12, rel=1e-9))
    assert found.relative_sd < 1e-9 and found.slope_interval == pytest.approx((5.12, 5.12), rel=1e-6)


def test_a_cadence_that_does_not_change_has_a_slope_about_zero():
    draw = random.Random(2)
    found = cadence(points(dict.fromkeys(CONTEXTS, 20.0), 0.03, draw))
    low, high = found.slope_interval
    assert low < 0 < high and found.intercept_ms == pytest.approx(20, rel=0.05)


def test_noise_in_per_cent_does_not_pull_the_line_down():
    """Weights by the measured values themselves would give slow runs too little weight: at CV 20 % some 4 % too low."""
    draw = random.Random(6)
    slopes = [cadence(points({n: n / 100 for n in (1000, 2000, 4000, 8000)}, 0.2, draw)) for _ in range(150)]
    mean = math.fsum(line.slope_ms * 8000 / K + line.intercept_ms for line in slopes) / len(slopes)
    assert mean == pytest.approx(80 * math.exp(0.02), rel=0.02)

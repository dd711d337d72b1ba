"""The knee of a sweep: against simulated servers whose knee is known by arithmetic, and against curves that are the definition itself."""

import functools
import math
import random
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_kvcache.core.knee import FALLS, NEVER, SATURATES, Knee, find_knee, latency_load

from ..simulated_server import Ask, Server, curve, mixed, noisy, open_loop

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (64, 128), (48, 80)
SOFT = Server(sequence_s=6e-4, kv_token_s=2e-7, prefill_s=1e-5)
SOFT_KNEE = SOFT.soft_knee(mixed(0, 4000, *LENGTHS))

# name: server, lengths, shape, knee. A batch limit ends growth at itself; of a full pool the knee is the last load that is not preempted:
# a request of 24 + 264 tokens takes 18 of the 800 blocks at its end, so 44 fit.
SERVERS = {
    "batch limit": (Server(sequence_s=2e-4, kv_token_s=2e-7, prefill_s=1e-5, max_requests=40), LENGTHS, SATURATES, 40.0),
    "long steps": (SOFT, LENGTHS, SATURATES, SOFT_KNEE),
    "preemption": (Server(sequence_s=1e-4, prefill_s=6e-4, blocks=800), ((24, 24), (264, 264)), FALLS, 800 // 18),
    "ample": (Server(sequence_s=1e-5, kv_token_s=1e-9, prefill_s=1e-6), LENGTHS, NEVER, math.inf),
}


@functools.cache
def simulated(name):
    server, lengths, _, _ = SERVERS[name]
    return curve(server, LOADS, *lengths, rounds=4)


def sweep(truth, cv, draw, runs=3):
    return [(load, noisy(value, cv, draw)) for load, value in truth.items() for _ in range(runs)]


def holds(knee, truth):
    return (knee.low or 0.0) <= truth <= (knee.high or math.inf)


# -- against simulated servers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "median", "spread", "misjudged", "coverage"), [
    ("batch limit", 0.02, 0.09, 0.03, 0.92), ("long steps", 0.02, 0.08, 0.03, 0.92), ("preemption", 0.08, 0.15, 0.05, 0.92), ("ample", None, None, 0.06, 0.94),
])  # fmt: skip
def test_200_noisy_sweeps_of_each_shape(name, median, spread, misjudged, coverage, request):
    """Three runs a load, noise of CV 2 to 7 %: how often the shape is misjudged, where the estimates lie, how often the interval holds the
    truth."""
    _, _, shape, truth = SERVERS[name]
    draw = random.Random(name)
    found = [find_knee(sweep(simulated(name), draw.uniform(0.02, 0.07), draw)) for _ in range(200)]
    shapes = Counter(knee.shape for knee in found)
    errors = sorted(math.log(knee.load / truth) for knee in found if knee.shape == shape and knee.load)
    covered = sum(holds(knee, truth) for knee in found) / len(found)
    request.node.user_properties.append(("shapes", f"{dict(shapes)}, covered {covered:.3f}"))
    assert 1 - shapes[shape] / len(found) <= misjudged, shapes
    assert covered >= coverage
    if shape == NEVER:
        assert not errors, "no number where there is none"
        return
    middle, low, high = (errors[int(q * (len(errors) - 1))] for q in (0.5, 0.05, 0.95))
    request.node.user_properties.append(("errors", f"median {middle:+.3f}, 5 % {low:+.3f}, 95 % {high:+.3f}"))
    assert abs(middle) <= median and -2 * spread < low and high < 2 * spread
    assert sum(abs(e) <= 2 * spread for e in errors) > 0.9 * len(errors)


def test_the_simulated_truth_is_what_its_arithmetic_says():
    """The soft curve is N / (step + N busy / tokens); the batch limit is level beyond itself; the full pool preempts only beyond its knee."""
    for load, value in simulated("long steps").items():
        assert value == pytest.approx(load / (SOFT.step_s * (1 + load / SOFT_KNEE)), rel=0.02)
    capped = simulated("batch limit")
    assert capped[64] == pytest.approx(capped[256], rel=1e-3) and capped[32] < 0.9 * capped[64]
    full = curve(SERVERS["preemption"][0], (40, 44, 45, 48), (24, 24), (264, 264), rounds=4)
    power = {load: value**2 / load for load, value in full.items()}
    assert max(power, key=power.get) == 44


def test_the_decline_is_that_from_the_peak_to_the_largest_load():
    truth = simulated("preemption")
    found = [find_knee(sweep(truth, 0.04, random.Random(seed))) for seed in range(60)]
    peak = curve(SERVERS["preemption"][0], (44,), (24, 24), (264, 264), rounds=4)[44]
    lost = 1 - truth[256] / peak
    declines = sorted(knee.decline for knee in found)
    assert declines[30] == pytest.approx(lost, abs=0.05)
    assert lost - 0.12 < declines[3] and declines[-4] < lost + 0.12


@pytest.mark.parametrize(("seats", "full"), [(16, 12.5), (400, 312.5)])
def test_an_open_loop_gets_what_is_offered_until_the_server_is_full(seats, full):
    """Each of the seats serves a request in 64 steps of 20 ms; loads are requests a second."""
    server, rates = Server(step_s=0.02, max_requests=seats), (0.5, 1, 2, 4, 8, 16, 32, 64)
    truth = {}
    for rate in rates:
        n = 60 + int(20 * rate)
        truth[rate] = open_loop(server, [Ask(isl=64, osl=64)] * n, [i / rate for i in range(n)]).output_tok_s(after=8)
        assert truth[rate] == pytest.approx(64 * min(rate, full), rel=0.03)
    knee = find_knee(sweep(truth, 0.03, random.Random(5)))
    if full < 64:
        assert knee.shape == SATURATES and knee.load == pytest.approx(full, rel=0.08) and holds(knee, full)
        assert latency_load(knee) == 8
    else:
        assert knee.shape == NEVER and knee.load is None and "above 64" in knee.reason


# -- against curves that are known --------------------------------------------------------------------------------------


def bent(load, soft=math.inf, sharp=math.inf, slope=0.0):
    inside = min(load, sharp)
    return inside / (1 + inside / soft) * (load / inside) ** slope


@pytest.mark.parametrize("loads", [LOADS, (1, 3, 10, 30, 100, 300), (2, 5, 20, 150), tuple(range(4, 200, 7))])
@pytest.mark.parametrize(("soft", "sharp", "slope"), [
    (30, math.inf, 0), (math.inf, 30, 0), (120, 30, 0), (30, 90, 0), (math.inf, 30, -0.4),
])  # fmt: skip
def test_without_noise_the_knee_is_where_power_is_greatest(loads, soft, sharp, slope):
    fine = [10 ** (i / 400) for i in range(1001)]
    truth = max(fine, key=lambda load: bent(load, soft, sharp, slope) ** 2 / load)
    knee = find_knee([(load, bent(load, soft, sharp, slope)) for load in loads])
    assert truth == pytest.approx(30, rel=0.01)
    assert holds(knee, 30)
    if len(loads) > 4:  # four are too few to tell a fall from noise, or to place a bend to a few per cent
        assert knee.shape == (FALLS if slope else SATURATES)
        assert knee.load == pytest.approx(30, rel=0.06)
        assert knee.throughput == pytest.approx(bent(30, soft, sharp, slope), rel=0.06)


def test_growth_that_is_less_than_proportional_is_still_growth():
    truth = {load: load**0.8 for load in LOADS}
    assert {find_knee(sweep(truth, 0.02, random.Random(seed))).shape for seed in range(20)} == {NEVER}


@pytest.mark.parametrize("how", [{"soft": 30}, {"sharp": 30}, {"sharp": 30, "slope": -0.4}, {"sharp": 200}, {}])
def test_growth_between_the_two_largest_loads(how):
    growth = math.log(bent(256, **how) / bent(128, **how)) / math.log(2)
    assert find_knee([(load, bent(load, **how)) for load in LOADS]).growth == pytest.approx(growth, abs=0.02)


def test_a_level_sweep_has_its_knee_below_all_that_was_measured():
    for values in ((7.0, 7.0, 7.0, 7.0, 7.0), (7.0, 6.9, 7.1, 7.0, 6.95)):
        knee = find_knee(list(zip((8, 16, 32, 64, 128), values, strict=True)))
        assert knee.shape == SATURATES and knee.load is None and "8 or below" in knee.reason
        assert knee.high < 16


def test_what_falls_from_the_first_load_on_has_no_knee():
    knee = find_knee([(load, load**-0.3) for load in LOADS])
    assert knee.shape == FALLS and knee.load is None and knee.decline == pytest.approx(1 - 256**-0.3, rel=0.05)


@pytest.mark.parametrize("spoiled", range(0, 27, 2))
def test_of_three_runs_one_that_was_spoiled_does_not_move_the_knee(spoiled):
    points = sweep({load: bent(load, 400, 40) for load in LOADS}, 0.02, random.Random(3))
    clean = find_knee(points)
    points[spoiled] = (points[spoiled][0], points[spoiled][1] / 2)
    knee = find_knee(points)
    assert knee.shape == SATURATES and holds(knee, 40) and knee.load == pytest.approx(clean.load, rel=0.05)


@pytest.mark.parametrize(("points", "why"), [
    ([], "0 loads"), ([(1, 5.0), (2, 9.0), (4, 12.0)], "3 loads"), ([(4, 5.0)] * 9, "1 loads"), ([(n, math.nan) for n in LOADS], "above 0"),
    ([(n, 0.0) for n in LOADS], "above 0"), ([(-n, 1.0) for n in LOADS], "above 0"), ([(n, math.inf) for n in LOADS], "above 0"),
    ([(math.nan, 1.0), (1, 1.0)], "above 0"),
])  # fmt: skip
def test_what_says_nothing_has_a_reason_and_no_number(points, why):
    knee = find_knee(points)
    assert why in knee.reason and knee.shape == ""
    assert (knee.load, knee.low, knee.high, knee.throughput, knee.growth) == (None,) * 5


# -- properties ---------------------------------------------------------------------------------------------------------

sweeps = st.tuples(
    st.floats(0.3, 6.0), st.floats(0.3, 6.0), st.sampled_from([0.0, -0.4]), st.floats(0.005, 0.07), st.integers(1, 3), st.integers(0, 10**6)
)


def made(soft, sharp, slope, cv, runs, seed):
    return sweep({load: bent(load, math.exp(soft), math.exp(sharp), slope) for load in LOADS}, cv, random.Random(seed), runs)


@settings(max_examples=20)
@given(sweeps, st.randoms(use_true_random=False), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units_and_order_change_nothing(how, shuffle, load_unit, unit):
    points = made(*how)
    plain = find_knee(points)
    shuffle.shuffle(points)
    other = find_knee([(load * load_unit, value * unit) for load, value in points])
    assert other.shape == plain.shape
    for name, factor in (("load", load_unit), ("low", load_unit), ("high", load_unit), ("throughput", unit), ("decline", 1.0)):
        a, b = getattr(plain, name), getattr(other, name)
        assert b == (a if a is None else pytest.approx(a * factor, rel=1e-6))


@settings(max_examples=20)
@given(sweeps)
def test_what_is_told_belongs_together(how):
    knee = find_knee(made(*how))
    assert (knee.load is None) == bool(knee.reason) == (knee.low is None or knee.high is None)
    if knee.load is not None:
        assert LOADS[0] <= knee.low <= knee.load <= knee.high <= LOADS[-1]
        if knee.shape == FALLS:
            assert knee.low <= max(load for load in LOADS if load <= knee.load) * (1 + 1e-9)
            assert knee.high >= min(load for load in LOADS if load >= knee.load) * (1 - 1e-9)
    assert (knee.decline is not None) == (knee.shape == FALLS)
    assert knee.runs == len(made(*how)) and knee.loads == LOADS


@settings(max_examples=20)
@given(sweeps)
def test_more_confidence_is_a_wider_interval(how):
    points = made(*how)
    narrow, wide = find_knee(points, confidence=0.5), find_knee(points, confidence=0.99)
    assume(narrow.load is not None)
    assert (wide.low or 0) <= narrow.low * 1.02 and (wide.high or math.inf) >= narrow.high / 1.02


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12))
def test_odd_numbers_are_answered(points):
    knee = find_knee(points)
    assert knee.reason or knee.load > 0


# -- the load at which latency is judged --------------------------------------------------------------------------------


@pytest.mark.parametrize(("knee", "share", "load"), [
    (Knee(shape=SATURATES, load=40.0, loads=(1.0, 8.0, 16.0, 32.0, 64.0)), 0.7, 16), (Knee(shape=SATURATES, load=46.0, loads=(1.0, 32.0, 64.0)), 0.7, 32),
    (Knee(shape=FALLS, load=10.0, loads=(1.0, 7.0, 8.0)), 0.7, 7), (Knee(shape=SATURATES, load=10.0, loads=(0.5, 2.5, 8.0)), 0.7, 2.5),
    (Knee(shape=SATURATES, load=10.0, loads=(8.0, 16.0)), 0.7, None), (Knee(shape=NEVER, low=120.0, loads=(1.0, 64.0, 128.0)), 0.7, 64),
    (Knee(shape=NEVER, low=90.0, loads=(1.0, 64.0, 128.0)), 0.7, 1), (Knee(shape=NEVER, loads=(1.0, 64.0, 128.0)), 0.7, None),
    (Knee(shape=SATURATES, high=2.0, loads=(1.0, 2.0), reason="level"), 0.7, None), (Knee(reason="3 loads", loads=(1.0, 2.0, 4.0)), 0.7, None),
    (Knee(shape=SATURATES, load=40.0, loads=(1.0, 8.0, 16.0, 32.0)), 0.9, 32), (Knee(), 0.7, None),
])  # fmt: skip
def test_the_largest_load_measured_at_or_below_a_share_of_the_knee(knee, share, load):
    found = latency_load(knee, share)
    assert found == load and type(found) is type(load)

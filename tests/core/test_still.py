"""Gates on figures of a text: a limit is kept or not whatever was stored, a baseline is one run, and nothing odd passes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import still
from pytest_kvcache.core.gate import Base
from pytest_kvcache.core.limits import LIMITS
from pytest_kvcache.core.lint import LOOSEST
from pytest_kvcache.core.metrics import find_metric

KLD, TOP, RATIO = find_metric("kld.mean"), find_metric("top1"), find_metric("ppl_ratio")
positive = st.floats(min_value=1e-9, max_value=1e3)


def base(value, metric=KLD, **changes):
    fields = {"sessions": ((value,),), "unit": metric.unit, "definition": metric.definition, "better": metric.better, "samples": ((2048,),)}
    return Base(**(fields | changes))


@pytest.mark.parametrize(("metric", "bounds", "limit", "word"), [
    (KLD, (0.003, 0.005), 0.01, "pass"), (KLD, (0.003, 0.011), 0.01, "inconclusive"), (KLD, (0.011, 0.02), 0.01, "regression"),
    (TOP, (0.95, 0.97), 0.93, "pass"), (TOP, (0.92, 0.97), 0.93, "inconclusive"), (TOP, (0.80, 0.92), 0.93, "regression"),
    (KLD, (0.003, None), 0.01, "inconclusive"), (KLD, (None, None), 0.01, "inconclusive"), (TOP, (None, 0.99), 0.93, "inconclusive"),
    (KLD, (0.003, 0.01), 0.01, "inconclusive"),
])  # fmt: skip
def test_a_limit_is_kept_only_where_the_whole_interval_lies_on_its_good_side(metric, bounds, limit, word):
    middle = [b for b in bounds if b is not None] or [0.004]
    assert still.of_limit(sum(middle) / len(middle), bounds, limit, metric, windows=8).verdict == word


@given(positive, positive, positive, st.integers(1, 200))
def test_no_figure_beyond_its_limit_ever_passes_and_none_within_ever_fails(value, wide, limit, windows):
    bounds = (max(0.0, value - wide), value + wide)
    found = still.of_limit(value, bounds, limit, KLD, windows=windows)
    assert found.verdict != "pass" or (value < limit and windows >= still.FEWEST_WINDOWS)
    assert found.verdict != "regression" or value > limit
    assert found.verdict != "inconclusive" or found.reason
    assert found.settled


@given(positive, positive)
def test_more_windows_are_promised_only_where_they_could_settle_it(value, wide):
    found = still.of_limit(value, (max(0.0, value - wide), value + wide), 0.5, KLD, windows=8)
    if "would" in found.reason and "about" in found.reason:
        needed = int(found.reason.split("about ")[1].split()[0])
        assert needed > 8
        assert value + wide * math.sqrt(8 / needed) <= 0.5 * 1.000001


@pytest.mark.parametrize(("metric", "old", "new", "word"), [
    (KLD, 0.004, 0.0049, "pass"), (KLD, 0.004, 0.0051, "regression"), (KLD, 0.004, 0.0029, "improvement"),
    (TOP, 0.96, 0.952, "pass"), (TOP, 0.96, 0.94, "regression"), (TOP, 0.96, 0.98, "improvement"),
    (RATIO, 1.01, 1.0115, "pass"), (RATIO, 1.01, 1.013, "regression"), (RATIO, 1.01, 0.90, "invalid"),
])  # fmt: skip
def test_one_run_against_one_stored_run(metric, old, new, word):
    assert still.of_baseline(base(old, metric), new, metric, margin=metric.drift).verdict == word


@given(positive, positive, st.floats(0.001, 0.5), st.floats(0, 1))
def test_a_pass_against_a_baseline_is_within_its_margin_or_its_floor(old, new, margin, floor):
    found = still.of_baseline(base(old), new, KLD, margin=margin, floor=floor)
    assert found.verdict in ("pass", "improvement", "regression")
    allowed = max(margin * old, floor)
    assert (found.verdict == "regression") == (new / old - 1 > max(margin, floor / old))
    assert found.verdict == "regression" or new - old <= allowed * 1.0000001


@pytest.mark.parametrize(("changes", "word"), [
    ({"mismatch": "workload: 'a' -> 'b'"}, "invalid"), ({"missing": "no baseline is stored for this gate", "sessions": ()}, "no-baseline"),
    ({"definition": "kld.mean.v0"}, "invalid"), ({"unit": "ms"}, "invalid"), ({"sessions": ()}, "no-baseline"),
])  # fmt: skip
def test_what_is_no_number_of_the_same_is_never_compared(changes, word):
    assert still.of_baseline(base(0.004, **changes), 0.004, KLD, margin=0.25).verdict == word


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.1, None, True, "0.004"])
def test_no_path_leads_from_no_figure_to_a_pass(value):
    assert still.of_limit(value, (0.001, 0.002), 0.01, KLD, windows=8).verdict == "invalid"
    assert still.of_baseline(base(0.004), value, KLD, margin=0.25).verdict == "invalid"
    assert still.of_baseline(base(0.004), value, KLD, margin=0.25, report="smoke").verdict == "invalid"
    assert still.of_baseline(base(value), 0.004, KLD, margin=0.25).verdict == "invalid"


@pytest.mark.parametrize("ends", [(math.nan, 0.02), (0.001, math.nan), (math.nan, math.nan)])
def test_no_odd_end_of_an_interval_passes(ends):
    assert still.of_limit(0.004, ends, 0.01, KLD, windows=8).verdict != "pass" or not math.isnan(ends[1])
    assert still.of_limit(0.95, ends, 0.93, TOP, windows=8).verdict != "pass" or not math.isnan(ends[0])


def test_what_the_order_of_the_arithmetic_makes_is_read_from_the_controls():
    load = {"controls": {"floor": {"kld.mean": [0.003, 0.001], "ppl_ratio": [0.9996, 0.0], "top1": [0.98, 0.0], "ppl": [12.0, 1.0]}}}
    assert still.controls_floor(load, "kld.mean") == 0.003
    assert still.controls_floor(load, "ppl_ratio") == pytest.approx(0.0004)
    assert still.controls_floor(load, "top1") == pytest.approx(0.02)
    assert still.controls_floor(load, "ppl") == 0.0
    assert still.controls_floor({}, "kld.mean") == still.controls_floor({"controls": {"floor": {}}}, "kld.mean") == 0.0


def test_the_table_of_limits_is_stricter_where_there_are_more_bits_and_never_beyond_the_loosest():
    for metric in ("ppl_ratio", "kld.mean", "kld.p99"):
        assert LIMITS["int8"][metric] < LIMITS["fp8"][metric] < LIMITS["int4"][metric] <= LOOSEST[metric]
        assert LIMITS["w8"][metric] < LIMITS["w4"][metric] <= LOOSEST[metric]
    assert LIMITS["int8"]["top1"] > LIMITS["fp8"]["top1"] > LIMITS["int4"]["top1"] >= LOOSEST["top1"]

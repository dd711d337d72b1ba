"""Definitions of the metrics on records worked out by hand, and what failures do to them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.metrics import METRICS, find_metric, measure, percentile
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.spec import SpecError


def record(i, sent, first, last, n=5, **more):
    return RequestRecord(index=i, sent_s=sent, first_s=first, last_s=last, end_s=last, input_tokens=10, output_tokens=n, events=n, **more)


def trace(*records):
    return Trace(scenario="s", arm="base", run=1, workload="w", isl=10, osl=5, records=records)


def test_figures_worked_out_by_hand():
    found = measure(trace(record(0, 0.0, 0.1, 0.5), record(1, 0.2, 0.5, 1.3)))
    assert found["ttft_ms.p50"] == pytest.approx(100)
    assert found["ttft_ms.p99"] == pytest.approx(300)
    assert found["tpot_ms.p50"] == pytest.approx(100)  # 0.4 s for the 4 tokens after the first
    assert found["tpot_ms.p90"] == pytest.approx(200)
    assert found["e2e_ms.p90"] == pytest.approx(1100)
    assert found["output_tok_s"] == pytest.approx(10 / 1.3)
    assert found["total_tok_s"] == pytest.approx(30 / 1.3)
    assert found["req_s"] == pytest.approx(2 / 1.3)


def test_the_first_event_may_hold_several_tokens():
    assert measure(trace(record(0, 0.0, 0.1, 0.5, first_event_tokens=3)))["tpot_ms.p50"] == pytest.approx(200)


def test_one_token_has_no_cadence():
    assert "tpot_ms.p50" not in measure(trace(record(0, 0.0, 0.1, 0.1, n=1)))


def test_failures_count_as_infinite_and_never_as_fast():
    slow = [record(i, 0.0, 0.1, 0.5) for i in range(4)]
    dead = [RequestRecord(index=9, sent_s=0.0, end_s=0.01, outcome="http_status") for _ in range(5)]
    found = measure(trace(*slow, *dead))
    assert "ttft_ms.p50" not in found, "the median request failed"
    assert found["output_tok_s"] == pytest.approx(20 / 0.5)


def test_nothing_answered_gives_no_figures():
    assert measure(trace(RequestRecord(index=0, sent_s=0.0, outcome="http_status"))) == {}


def test_missing_usage_gives_no_throughput():
    silent = RequestRecord(index=0, sent_s=0.0, first_s=0.1, last_s=0.5, end_s=0.5)
    assert "output_tok_s" not in measure(trace(silent))


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1), st.sampled_from([0.5, 0.9, 0.95, 0.99]), st.integers(0, 20))
def test_a_quantile_is_an_observed_value_and_failures_only_raise_it(values, q, failed):
    plain, with_failures = percentile(values, q), percentile(values, q, failed=failed)
    assert plain in values
    assert with_failures >= plain
    assert sum(v <= plain for v in values) >= q * len(values) - 1e-6


def test_quantiles_of_nothing():
    assert percentile([], 0.5) is None
    assert percentile([], 0.5, failed=3) == math.inf


@pytest.mark.parametrize("name", ["ttft_ms", "output_tok_s.p50", "ttft_ms.p42", "speed", "", "ttft_ms."])
def test_unknown_metrics_are_refused_with_the_known_ones(name):
    with pytest.raises(SpecError, match="known: "):
        find_metric(name)


def test_every_row_says_how_it_is_defined():
    for metric in METRICS.values():
        assert metric.definition.startswith(metric.name.removesuffix("_ms") + ".v")
        assert metric.better in ("lower", "higher")
        assert (metric.sample is not None) + (metric.total is not None) + metric.pooled + (metric.drift is not None) == 1

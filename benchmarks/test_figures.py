"""The arithmetic of the figures, on runs made by hand. Untimed."""

import dataclasses

import numpy as np
import pytest

from .figures import Report, cpu_between, figures, ks_sqrt_n, lags_ms, quantiles, slot_gaps_ms
from .scenarios import FIGURES, SCENARIOS, TARGETS, mockserver
from .table import markdown, number, shown, spread

MS = 1_000_000


def truth(start_ms, *tokens_ms, conn=0, k=1, end_ms=None):
    """A request at `start_ms` whose chunks came at `tokens_ms` after it."""
    t = tuple(round((start_ms + at) * MS) for at in tokens_ms)
    end = t[-1] if end_ms is None else round((start_ms + end_ms) * MS)
    unused = {"t_hdr": 0, "t_role": 0, "sched_ttft": 0, "xid": "", "chat": False, "stream": True, "open": 1}
    return mockserver.Truth(t_req=start_ms * MS, t=t, t_end=end, n_tok=k * len(t), k=k, conn=conn, aborted=False, **unused)


def test_a_run_that_is_reported_as_it_was_has_no_bias():
    truths = [truth(0, 50, 60, 70), truth(100, 40, 60, 80)]
    said = {"ttft": quantiles([50, 40]), "tpot": quantiles([10, 20]), "itl": quantiles([10, 20], [2, 2])}
    report = Report(asked=2, done=2, tokens=6, quantiles=said, called_ns=-20 * MS, cpu_s=0.003)
    found = figures(truths, report, concurrency=1, rate=None, chunk=1)
    assert all(found[f"{name}_bias_{q}_ms"] == pytest.approx(0) for name in ("ttft", "tpot", "itl") for q in ("p50", "p99"))
    assert (found["exact"], found["slot_gap_p50_ms"], found["start_s"]) == (1, pytest.approx(30), pytest.approx(0.02))
    assert (found["events_s"], found["requests_s"], found["cpu_s_per_mev"]) == (
        pytest.approx(6 / 0.18),
        pytest.approx(2 / 0.18),
        pytest.approx(500),
    )


def test_bias_is_what_was_reported_minus_what_was_written():
    report = Report(asked=1, done=1, tokens=3, quantiles={"ttft": (53, 53), "itl": (9, 30)}, cpu_s=0)
    found = figures([truth(0, 50, 60, 70)], report, concurrency=None, rate=None, chunk=1)
    assert (found["ttft_bias_p50_ms"], found["itl_bias_p50_ms"], found["itl_bias_p99_ms"]) == (3, -1, 20)
    assert "tpot_bias_p50_ms" not in found


def test_chunks_of_four_are_compared_by_both_conventions():
    report = Report(asked=1, done=1, tokens=12, quantiles={"tpot": (10, 10), "itl": (40, 40)}, cpu_s=0)
    found = figures([truth(0, 50, 90, 130, k=4)], report, concurrency=None, rate=None, chunk=4)
    assert (found["tpot_bias_p50_ms"], found["itl_bias_p50_ms"]) == (0, 0)
    assert (found["tpot_n1_bias_p50_ms"], found["itl_per_token_bias_p50_ms"]) == (pytest.approx(10 - 80 / 11), 30)


@pytest.mark.parametrize("wrong", [{"asked": 3}, {"done": 1}, {"tokens": 5}])
def test_a_wrong_count_is_not_exact(wrong):
    report = dataclasses.replace(Report(asked=2, done=2, tokens=4, cpu_s=0), **wrong)
    assert figures([truth(0, 1, 2), truth(5, 1, 2)], report, concurrency=1, rate=None, chunk=1)["exact"] == 0


def test_an_aborted_answer_is_not_exact():
    broken = dataclasses.replace(truth(0, 1, 2), aborted=True)
    assert figures([broken], Report(asked=1, done=1, tokens=2, cpu_s=0), concurrency=1, rate=None, chunk=1)["exact"] == 0


def test_the_window_ends_with_the_later_clock_and_ours_with_the_records():
    report = Report(asked=1, done=1, tokens=3, last_ns=100 * MS, records_ns=200 * MS, cpu_samples=[(-100 * MS, 1.0), (100 * MS, 2.0)])
    found = figures([truth(0, 50, 60, 70)], report, concurrency=None, rate=None, chunk=1)
    assert (found["events_load_s"], found["events_s"], found["cpu_s"]) == (pytest.approx(30), pytest.approx(15), pytest.approx(0.5))


def test_slot_gaps_by_connection_and_else_in_order():
    kept = [truth(0, 10, conn=0), truth(0, 20, conn=1), truth(11, 10, conn=0), truth(25, 10, conn=1)]
    assert slot_gaps_ms(kept, 2) == [1, 5]
    fresh = [dataclasses.replace(t, conn=i) for i, t in enumerate(kept)]
    assert slot_gaps_ms(fresh, 2) == [1, 5]


def test_lag():
    assert list(lags_ms([3 * MS, 1 * MS], [0, 2 * MS], False)) == [1, 1]
    assert list(lags_ms([1003 * MS, 1001 * MS], [0, 2 * MS], True)) == [0, 0]


def test_poisson_arrivals_pass_and_even_ones_do_not():
    rng = np.random.default_rng(1)
    assert ks_sqrt_n(np.cumsum(rng.exponential(1e6, 3000))) < 1.05
    assert ks_sqrt_n(np.arange(3000) * MS) > 20


def test_cpu_is_read_between_samples():
    assert cpu_between([(0, 1.0), (10, 2.0), (20, 2.0)], 5, 15) == pytest.approx(0.5)


def test_targets_belong_to_what_is_shown():
    assert all(figure in FIGURES and figure in shown(scenario) for scenario, figure in TARGETS)
    assert all(figure in FIGURES for scenario in SCENARIOS for figure in shown(scenario))


def test_the_table():
    shown_as = {
        0.004: "0.004",
        0.25: "0.25",
        4.56: "4.56",
        45.6: "45.6",
        456.7: "457",
        45678: "46k",
        4.5e6: "4.50M",
        -0.5: "-0.50",
        0.9996: "1.00",
    }
    assert {x: number(x) for x in shown_as} == shown_as
    assert spread([3, 1, 2]) == "2.00 [1.00 .. 3.00]"
    rows = {
        ("A1", "x"): [{"exact": 1.0, "ttft_bias_p50_ms": 0.05}],
        ("F64", "y"): [{"exact": 0.0, "asked": 2, "sent": 1, "done": 1, "aborted": 0, "tokens": 4, "tokens_reported": 4}],
    }
    text = markdown(rows, ["x", "y", "z"])
    assert (
        "| A1 | TTFT bias p50, ms | ± 0.3 | ± 0.1 | 0.050 | – |" in text
        and "no: asked 2, sent 1" in text
        and "z" not in text.splitlines()[0]
    )

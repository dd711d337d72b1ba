"""The gate tests itself: faults planted in recorded runs turn it red, each in its own colour; without one it is green."""

import copy
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import metrics
from pytest_kvcache.core.gate import IMPROVEMENT, INCONCLUSIVE, INVALID, PASS, REGRESSION, judge, rule_for
from pytest_kvcache.core.verdict import Base

from .recorded_runs import GATES, METRICS, RULE, baseline, judged, stretched, trace

RUNS = range(RULE.looks[-1])


@pytest.fixture(scope="module")
def recorded():
    return baseline()


def replaced(one, requests, **changes):
    """The trace with fields of some of its requests changed."""
    return dataclasses.replace(one, records=tuple(dataclasses.replace(r, **changes) if r.index in requests else r for r in one.records))


def with_load(one, **changes):
    return dataclasses.replace(one, load=one.load | changes)


def counted(one, **grown):
    before, after = one.load["counters"]
    return with_load(one, counters=(before, after | grown))


def queued(one):
    """A pool that holds half the streams: every other request waits for one before it, and the load takes as much longer."""
    wait = 0.3
    records = tuple(
        dataclasses.replace(r, **{k: getattr(r, k) + wait * (r.index % 2) for k in ("first_s", "answer_s", "last_s", "end_s")})
        for r in one.records
    )
    return dataclasses.replace(stretched(one, 1.3), records=stretched(dataclasses.replace(one, records=records), 1.3).records)


def test_without_a_fault_every_gate_passes(recorded):
    for seed in range(5):
        found = judged(recorded, [trace(f"new{seed}", run) for run in RUNS])
        assert {m: v.verdict for m, v in found.items()} == dict.fromkeys(METRICS, PASS), seed


ALL = frozenset(METRICS)
FIRST = {"ttft_ms.p50", "ttft_ms.p90"}
CADENCE = {"output_tok_s", "req_s", "tpot_ms.p50", "itl_ms.p50", "e2e_ms.p50"}
# name: what is done to every run, which gates turn red, the verdict
SLOWER = {
    "everything 25 % slower": (lambda t: stretched(t, 1.25), ALL),
    "everything twice as slow": (lambda t: stretched(t, 2.0), ALL),
    "times in milliseconds read as seconds": (lambda t: stretched(t, 1000.0), ALL),
    "a pool that is too small for its streams": (queued, ALL),
}


@pytest.mark.parametrize("fault", SLOWER)
def test_a_planted_slow_down_is_a_regression(recorded, fault):
    plant, gates = SLOWER[fault]
    found = judged(recorded, [plant(trace("new", run)) for run in RUNS])
    assert {m for m, v in found.items() if v.verdict == REGRESSION} == gates, {m: (v.verdict, v.change) for m, v in found.items()}


@pytest.mark.parametrize(("more", "gates", "others"), [
    ({"first_slower": 1.4}, FIRST, {"tpot_ms.p50", "itl_ms.p50", "output_tok_s", "req_s", "e2e_ms.p50"}), ({"slower": 1.3}, ALL, set()),
])  # fmt: skip
def test_only_the_gates_of_what_became_slower_turn_red(recorded, more, gates, others):
    found = judged(recorded, [trace("new", run, **more) for run in RUNS])
    assert {m for m, v in found.items() if v.verdict == REGRESSION} == gates
    assert {m for m, v in found.items() if v.verdict == PASS} == others


# What makes a run worthless, and words of the reason.
INVALIDATING = {
    "fewer tokens than asked": (lambda t: replaced(t, {3}, output_tokens=20), "20 output tokens, 32 were asked for"),
    "no tokens counted": (lambda t: replaced(t, {3}, output_tokens=None), "no token counts"),
    "shorter prompts": (lambda t: replaced(t, {3}, input_tokens=60), "60 input tokens, 64 were sent"),
    "a failed request": (lambda t: replaced(t, {5}, outcome="http_status", error="HTTP 500"), "1 of 64 requests failed"),
    "slow requests left out": (lambda t: dataclasses.replace(t, records=t.records[:50]), "only 50 of 64 requests were sent"),
    "a pool so small that requests are preempted": (lambda t: counted(t, preemptions=2.0), "the server preempted 2 requests"),
    "prompts served from the prefix cache": (lambda t: counted(t, prefix_hits=2000.0), "the prefix cache was warm"),
    "a server that was restarted meanwhile": (lambda t: counted(t, prefix_queries=-1.0), "counters fell"),
    "tokens of somebody else": (lambda t: with_load(t, server_tokens={"output": 9999.0, "input": None}), "the server counted 9999"),
    "another process on the machine": (lambda t: with_load(t, foreign_cores=0.9), "other processes used 0.90"),
    "time taken by the hypervisor": (lambda t: with_load(t, steal_cores=0.9), "the hypervisor took 0.90"),
    "a client that was the limit": (lambda t: with_load(t, client=t.load["client"] | {"cores": 0.95}), "the client was too slow"),
    "a clock that was set": (lambda t: with_load(t, client=t.load["client"] | {"clock_steps": 1}), "clock was set"),
    "no request at all": (lambda t: dataclasses.replace(t, records=()), "no request was sent"),
}  # fmt: skip


@pytest.mark.parametrize("fault", INVALIDATING)
@pytest.mark.parametrize("run", [0, 2])
def test_a_run_that_does_not_count_makes_every_gate_invalid(recorded, fault, run):
    plant, words = INVALIDATING[fault]
    found = judged(recorded, [plant(one) if n == run else one for n, one in ((n, trace("new", n)) for n in RUNS[:3])])
    assert {v.verdict for v in found.values()} == {INVALID}
    assert all(words in v.reason for v in found.values()), found


def test_times_in_seconds_read_as_milliseconds_are_no_improvement(recorded):
    found = judged(recorded, [stretched(trace("new", run), 0.001) for run in RUNS])
    assert {v.verdict for v in found.values()} == {INVALID}


def test_noise_between_restarts_is_inconclusive_and_named(recorded):
    wild = [1.3, 0.65, 0.95, 0.85, 1.4, 0.7, 1.2, 0.6, 1.6, 0.75, 1.1, 0.9]
    found = judged(recorded, [stretched(trace("new", run), wild[run]) for run in RUNS])
    assert {v.verdict for v in found.values()} == {INCONCLUSIVE}
    assert all(v.reason.startswith("unstable: new runs: ") and v.certifiable > 0.10 for v in found.values())
    assert all(any(n.startswith("noisier than the baseline") for n in v.notes) for v in found.values())


def test_starts_of_two_kinds_are_inconclusive_with_both_levels(recorded):
    lot = [1.0, 1.3, 1.0, 1.3, 1.3, 1.0, 1.0, 1.3, 1.0, 1.3, 1.0, 1.0]
    found = judged(recorded, [stretched(trace("new", run), lot[run]) for run in RUNS])
    assert {v.verdict for v in found.values()} == {INCONCLUSIVE}
    assert "unstable: new runs: 7 near 19.8" in found["tpot_ms.p50"].reason
    assert ", 5 near 25.9" in found["tpot_ms.p50"].reason


def spoiled(doc, change):
    """The document with every stored number changed."""
    doc = copy.deepcopy(doc)
    for entry in doc["entries"].values():
        change(entry)
    return doc


def _values(times):
    def change(entry):
        for run in entry["runs"]:
            run["value"] *= times if entry["better"] == "lower" else 1 / times

    return change


BASELINES = {
    "stored in seconds under the name of milliseconds": (_values(0.001), {REGRESSION}),
    "stored in microseconds under the name of milliseconds": (_values(1000.0), {INVALID}),
    "a unit of another dimension": (lambda e: e.update(unit="GiB"), {INVALID}),
    "the direction turned round": (lambda e: e.update(better="lower" if e["better"] == "higher" else "higher"), {INVALID}),
    "another definition": (lambda e: e.update(definition="x.v0"), {INVALID}),
    "another workload": (lambda e: e.update(workload="v"), {INVALID}),
    "a stored zero": (lambda e: e["runs"][4].update(value=0.0), {INVALID}),
    "a stored NaN": (lambda e: e["runs"][4].update(value=float("nan")), {INVALID}),
    "a stored text": (lambda e: e["runs"][4].update(value="20"), {INVALID}),
    "four runs of the ten": (lambda e: e.update(runs=e["runs"][:4]), {INCONCLUSIVE}),
    "no runs": (lambda e: e.update(runs=[]), {"no-baseline"}),
    "other numbers of requests": (lambda e: [r.update(n=90) for r in e["runs"]], {INCONCLUSIVE, PASS}),
}


@pytest.mark.parametrize("fault", BASELINES)
def test_a_planted_fault_in_the_baseline_is_no_pass(recorded, fault):
    change, words = BASELINES[fault]
    found = judged(spoiled(recorded, change), [trace("new", run) for run in RUNS])
    assert {v.verdict for v in found.values()} == words
    if "requests" in fault:
        assert {m for m, v in found.items() if v.verdict == PASS} == {"output_tok_s", "req_s"}, "only quantiles depend on their number"


def test_another_machine_is_invalid(recorded):
    other = {"identity": {"gpu": "Other CPU"}, "subject": {}, "context": {}}
    found = judged(recorded, [trace("new", run) for run in RUNS], environment=other)
    assert {v.verdict for v in found.values()} == {INVALID}


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_whose_direction_was_swapped_in_the_table_is_caught(recorded, metric, monkeypatch):
    """Twice as slow would be an improvement by it."""
    row = metrics.find_metric(metric)
    turned = dataclasses.replace(row, better="lower" if row.better == "higher" else "higher")
    monkeypatch.setitem(metrics.METRICS, row.name, turned)
    found = judged(recorded, [stretched(trace("new", run), 2.0) for run in RUNS])
    assert found[metric].verdict == INVALID
    assert "direction differs" in found[metric].reason
    assert {v.verdict for m, v in found.items() if not m.startswith(row.name)} == {REGRESSION}


def test_a_metric_that_is_gone_from_one_run_is_invalid(recorded):
    """No tokens per event any more: the gaps between tokens are not known."""
    found = judged(recorded, [dataclasses.replace(trace("new", run), itl={}) if run == 1 else trace("new", run) for run in RUNS[:3]])
    assert {m for m, v in found.items() if v.verdict == INVALID} == {"itl_ms.p50"}
    assert "missing from run 1" in found["itl_ms.p50"].reason


def test_a_faster_engine_is_an_improvement_and_its_loss_would_be_red(recorded):
    fast = [stretched(trace("new", run), 0.7) for run in RUNS]
    assert {v.verdict for v in judged(recorded, fast).values()} == {IMPROVEMENT}
    sessions = tuple((v, v * 1.001) for v in (14.0, 14.1, 13.9, 14.05, 13.95))
    found = judge(Base(sessions=sessions), [20.0, 20.1, 19.9], better="lower", margin=0.10, rule=rule_for("gpu", "ci"))
    assert found.verdict == REGRESSION


@given(st.floats(min_value=1.25, max_value=50.0), st.integers(0, 10**6))
def test_whatever_the_slow_down_beyond_twice_the_margin_it_is_never_green(times, seed):
    values = {"lower": [20.0, 20.2, 19.8, 20.1, 19.9], "higher": [100.0, 101.0, 99.0, 100.5, 99.5]}
    noise = random.Random(seed)
    for better, old in values.items():
        new = [v * (1 + noise.gauss(0, 0.01)) * (times if better == "lower" else 1 / times) for v in old]
        found = judge(Base(sessions=(tuple(old),)), new, better=better, margin=0.10, rule=RULE, final=True)
        assert found.verdict == REGRESSION


def test_every_gate_is_planted_against():
    assert set(GATES) == ALL
    assert {find.total is None for find in map(metrics.find_metric, METRICS)} == {True, False}

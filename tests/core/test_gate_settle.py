"""How a gate of a block is settled: what it is told besides its runs, and what needs no run at all."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.gate import IMPROVEMENT, INCONCLUSIVE, INVALID, NO_BASELINE, PASS, REGRESSION, Base, rule_for
from pytest_kvcache.core.plan import Wanted, make_plan
from pytest_kvcache.core.progress import Orders, Progress, settle
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Arm, Gate

H200 = {"identity": {"gpu": "NVIDIA H200"}, "subject": {"server_argv": ["serve"]}, "context": {"gpu_uuids": ["GPU-0"]}}
CPU = {"identity": {"gpu": "AMD EPYC, 2 cores"}, "subject": {}, "context": {}}
TPOT, RATE, P99 = "tpot_ms.p50", "output_tok_s", "ttft_ms.p99"
UNITS = {TPOT: ("ms", "tpot.v1 = (last - first) / (n - n_first)"), P99: ("ms", "ttft.v1 = first token event - request sent")}
UNITS[RATE] = ("tok/s", "output_tok_s.v2 = output tokens that arrived in the window / its length")


def settled(
    metric, values, stored, *, environment=CPU, need="judge", final=True, requests=24, rule=None, base=None, n=None, broken="", **gate
):
    """The verdict on a gate whose runs had these values, of a scenario of so many requests a run."""
    scenario = ClosedLoop(isl=512, osl=128, concurrency=8, requests=requests)
    want = Wanted(framework="f", model="granite-3.3-8b", family="s", scenario=scenario, gates=(Gate(metric, **gate),))
    (block,) = make_plan([want], 0.05)
    (spec,) = block.tasks[0].gates
    progress = Progress(block=block, environment=environment)
    progress.broken = {(str(scenario), "base"): broken} if broken else {}
    progress.measurements = [
        {
            "run": i, "scenario": str(scenario), "arm": "base", "valid": True, "metrics": {} if v is None else {metric: v},
            "requests": n or requests, "canary": None,
        } for i, v in enumerate(values, 1)
    ]  # fmt: skip
    unit, definition = UNITS[metric]
    known = {"unit": unit, "definition": definition, "samples": ((requests,) * len(stored),)} | (base or {})
    bases = {spec.key: Base(sessions=(tuple(stored),), **known)}
    orders = Orders(rule=rule or rule_for("gpu", "full"), needs={spec.key: need}, bases=bases)
    return settle(spec, progress, orders, final=final)


def five(level):
    return [level * v for v in (1.0, 1.001, 0.999, 1.0005, 0.9995)]


@pytest.mark.parametrize(("metric", "stored", "new", "on_h200", "on_cpu"), [
    (TPOT, 5.0, 5.0, PASS, PASS), (TPOT, 5.0, 1.0, INVALID, IMPROVEMENT), (TPOT, 1.0, 5.0, INVALID, REGRESSION),
    (RATE, 1500.0, 1500.0, PASS, PASS), (RATE, 1500.0, 9000.0, INVALID, IMPROVEMENT), (RATE, 9000.0, 1500.0, INVALID, REGRESSION),
])  # fmt: skip
def test_what_a_known_card_and_model_cannot_do_is_invalid_and_on_a_cpu_no_limit_is_known(metric, stored, new, on_h200, on_cpu):
    found = settled(metric, five(new), five(stored), environment=H200)
    assert found.verdict == on_h200
    assert (found.verdict == INVALID) == ("H200" in found.reason)
    assert settled(metric, five(new), five(stored), environment=CPU).verdict == on_cpu


def test_a_floor_that_a_test_declares_is_heeded():
    assert settled(TPOT, five(6.0), five(5.0)).verdict == REGRESSION
    assert settled(TPOT, five(6.0), five(5.0), floor=1.5).verdict == PASS


@pytest.mark.parametrize(("requests", "profile", "margin", "few"), [
    (1000, "acceptance", 0.2, False), (1000, "acceptance", 0.1, True), (600, "acceptance", 0.2, True), (600, "full", 0.1, False),
    (5000, "acceptance", 0.1, False),
])  # fmt: skip
def test_a_quantile_of_too_few_requests_is_settled_before_anything_is_measured(requests, profile, margin, few):
    rule = rule_for("gpu", profile)
    found = settled(P99, [], five(100.0), requests=requests, margin=margin, rule=rule, final=False)
    assert (found is not None) == few
    if few:
        assert found.verdict == INCONCLUSIVE
        assert found.reason.startswith("too few samples: a P99 of")
    measured = settled(P99, five(100.0), five(100.0), requests=requests, margin=margin, rule=rule)
    assert (measured.verdict == INCONCLUSIVE) == few


def test_runs_that_lost_requests_are_not_compared_with_whole_ones():
    found = settled(P99, five(100.0), five(100.0), requests=1000, n=800, margin=0.2, final=False)
    assert (found.verdict, found.settled) == (INCONCLUSIVE, True)
    assert "a P99 of 800 requests a run against one of 1000" in found.reason


@pytest.mark.parametrize(("need", "values", "verdict"), [
    ("judge", [], INCONCLUSIVE), ("report", [], INCONCLUSIVE), ("report", [5.0], INCONCLUSIVE), ("record", [], NO_BASELINE),
])  # fmt: skip
def test_what_was_cut_short_says_how_many_runs_are_missing(need, values, verdict):
    found = settled(TPOT, values, five(5.0), need=need)
    assert found.verdict == verdict
    assert verdict == NO_BASELINE or found.more_runs == 3 - len(values)


def test_an_open_gate_asks_for_more_runs_and_a_settled_one_does_not():
    wild = [5.0, 5.6, 4.5, 5.5, 4.6]
    assert settled(TPOT, wild[:3], wild, final=False) is None
    assert settled(TPOT, five(5.0)[:3], five(5.0), final=False).verdict == PASS
    futile = dataclasses.replace(rule_for("gpu", "ci"))
    found = settled(TPOT, [5.15, 5.5, 4.9, 5.4, 5.0], wild, final=False, rule=futile)
    assert (found.verdict, found.reason[:6]) == (INCONCLUSIVE, "futile")


def between(profile, ratios):
    """The verdict on two arms whose rounds had these ratios, on a GPU."""
    arms = (Arm(name="old", block_size=16), Arm(name="new", block_size=32))
    scenario = ClosedLoop(isl=512, osl=128, concurrency=8, requests=24, arms=arms)
    want = Wanted(
        framework="f", model="granite-3.3-8b", family="s", scenario=scenario, gates=(Gate(TPOT, arm="new", against="old", margin=0.05),)
    )
    (block,) = make_plan([want], 0.05)
    (spec,) = block.tasks[0].gates
    progress = Progress(block=block, environment=CPU)
    progress.measurements = [
        {"run": i, "scenario": str(scenario), "arm": arm, "valid": True, "metrics": {TPOT: value}, "requests": 24, "canary": None}
        for i, ratio in enumerate(ratios, 1) for arm, value in (("old", 5.0), ("new", 5.0 * ratio))
    ]  # fmt: skip
    return settle(spec, progress, Orders(rule=rule_for("gpu", profile), needs={spec.key: "pair"}, bases={}), final=False)


def test_arms_that_their_rounds_will_not_tell_apart_are_given_up_in_ci_as_well():
    wild = [1.03, 1.14, 0.94, 1.10, 0.96, 1.06]
    assert between("ci", wild).reason.startswith("futile")
    assert between("full", wild) is None


def test_smoke_reports_a_baseline_in_the_measured_unit():
    found = settled(TPOT, [5.5], [0.005] * 5, need="report", base={"unit": "s"})
    assert found.baseline == pytest.approx(5.0)
    assert found.change == pytest.approx(0.1)
    odd = settled(TPOT, [5.5], [0.005] * 5, need="report", base={"unit": "GiB"})
    assert (odd.verdict, odd.reason) == (NO_BASELINE, "it is stored in 'GiB'")


runs = st.lists(st.sampled_from([4.0, 4.9, 4.95, 5.0, 5.05, 5.1, 5.3, 6.0, 0.5, None]), max_size=14)


@given(runs, st.sampled_from(["judge", "record", "report", "nothing"]), st.sampled_from(["ci", "full"]), st.booleans(), st.booleans())
def test_a_gate_settled_after_each_run_is_settled_alike_on_all_of_them(values, need, profile, ends_broken, on_gpu):
    """A session settles as it goes and then measures on for other gates; who judges the stored run sees all at once."""
    more = {"need": need, "rule": rule_for("gpu", profile), "environment": H200 if on_gpu else CPU}
    stored = [] if need == "nothing" else five(5.0)
    broken = "the server died" if ends_broken else ""
    steps = [*((values[:k], "") for k in range(len(values) + 1)), (values, broken)]
    in_turn = (settled(TPOT, seen, stored, final=False, broken=b, **more) for seen, b in steps)
    live = next((v for v in in_turn if v is not None), None) or settled(TPOT, values, stored, broken=broken, **more)
    again = settled(TPOT, values, stored, final=False, broken=broken, **more) or settled(TPOT, values, stored, broken=broken, **more)
    assert again == live


def test_a_metric_that_a_run_lacks_is_named_with_the_run():
    found = settled(TPOT, [5.0, None, 5.0], five(5.0), final=False)
    assert (found.verdict, found.reason) == (INVALID, "tpot_ms.p50 is missing from run 2")
    assert settled(TPOT, [*five(5.0)[:3], None], five(5.0), final=False).verdict == PASS, "decided before"

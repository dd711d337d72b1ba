"""Tests become gates and blocks; what cannot be a gate is refused at collection."""

import pytest

from pytest_kvcache.core.plan import Wanted, cost, gate_specs, make_plan
from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop, Text
from pytest_kvcache.core.spec import Arm, Gate, SpecError


def want(*gates, family="s", **scenario):
    return Wanted(framework="f", model="m", family=family, scenario=ClosedLoop(isl=8, osl=4, concurrency=4, **scenario), gates=gates)


@pytest.mark.parametrize(("gate", "requests", "words"), [
    (Gate("ttft_ms.p99"), 24, "ttft_ms.p99 of 24 requests is only their largest value; .*requests=500"),
    (Gate("ttft_ms.p99"), 499, "ttft_ms.p99 of 499 requests has too few of them beyond it to be certified; .*requests=500"),
    (Gate("itl_ms.p95"), 99, "itl_ms.p95 of 99 requests has too few .*requests=100"), (Gate("e2e_ms.p90"), 49, "requests=50"),
    (Gate("tpot_ms.p50"), 4, "tpot_ms.p50 of 4 requests has too few .*requests=5"),
    (Gate("output_tok_s", margin=0.51), 24, r"margin=0.51 lets a loss of 51 % pass, it could hardly ever fail; at most 0.5"),
    (Gate("output_tok_s", margin=0.999), 24, "could hardly ever fail"), (Gate("tpot_ms.p50", margin=0.9), 24, "could hardly ever fail"),
    (Gate("tpot_ms.p50", margin=0.0009), 24, "margin=0.0009 can never be certified: runs resolve 0.1 %; at least 0.001"),
])  # fmt: skip
def test_a_gate_that_could_never_fail_or_never_pass_is_refused_with_test_metric_and_cure(gate, requests, words):
    asked = want(gate, requests=requests)
    with pytest.raises(SpecError, match=rf"s/isl8-osl4-c4-n{requests}: Gate\('{gate.metric}'\): .*{words}"):
        gate_specs(asked, 0.05)
    with pytest.raises(SpecError, match=gate.metric):
        make_plan([asked], 0.05)


@pytest.mark.parametrize(("gate", "requests"), [
    (Gate("ttft_ms.p99"), 500), (Gate("itl_ms.p95"), 100), (Gate("e2e_ms.p90"), 50), (Gate("tpot_ms.p50"), 5), (Gate("output_tok_s"), 4),
    (Gate("output_tok_s", margin=0.5), 4), (Gate("output_tok_s", margin=0.001), 4),
])  # fmt: skip
def test_at_its_bound_a_gate_is_taken(gate, requests):
    assert gate_specs(want(gate, requests=requests), 0.05)


@pytest.mark.parametrize(("gate", "requests", "device", "margin"), [
    (Gate("output_tok_s"), 24, 0.05, 0.05), (Gate("ttft_ms.p50"), 24, 0.05, 0.05), (Gate("ttft_ms.p95"), 1000, 0.05, 0.10),
    (Gate("ttft_ms.p99"), 1000, 0.05, 0.20), (Gate("ttft_ms.p99"), 5000, 0.05, 0.10), (Gate("ttft_ms.p95"), 1000, 0.15, 0.15),
    (Gate("ttft_ms.p99"), 1000, 0.15, 0.20), (Gate("ttft_ms.p99"), 5000, 0.15, 0.15), (Gate("ttft_ms.p99", margin=0.03), 1000, 0.05, 0.03),
])  # fmt: skip
def test_a_gate_that_names_no_margin_has_that_of_the_device_or_of_its_quantile(gate, requests, device, margin):
    (spec,) = gate_specs(want(gate, requests=requests), device)
    assert spec.margin == margin


def test_two_tests_that_claim_one_number_differently_are_refused():
    asked = [want(Gate("output_tok_s")), want(Gate("output_tok_s", floor=5.0))]
    with pytest.raises(SpecError, match=r"two tests claim it, one with margin=0.05, floor=0, one with margin=0.05, floor=5"):
        make_plan(asked, 0.05)


@pytest.mark.parametrize("floor", [-1, float("nan"), float("inf")])
def test_a_floor_that_is_none_is_refused(floor):
    with pytest.raises(SpecError, match="floor="):
        Gate("output_tok_s", floor=floor)


@pytest.mark.parametrize(
    ("windows", "arms", "tasks", "measured_s"),
    [(40, ("fp16", "fp8", "int8", "int4"), 0, 314), (20, ("fp16", "wfp8", "w8a8"), 10, 234)],  # vLLM 0.25.1 on an H200, 2026-12-01
)
def test_a_text_is_planned_for_about_what_it_took(windows, arms, tasks, measured_s):
    text = Text(windows=windows, arms=tuple(Arm(name=name) for name in arms), tasks=tasks)
    gates = (Gate("ppl_ratio", arm=arms[1]),)
    (block,) = make_plan([Wanted(framework="vllm", model="m", family="p", scenario=text, gates=gates)], 0.05)
    low, high = cost(block, (1, 1), "gpu").seconds
    assert low == high == pytest.approx(measured_s, rel=0.35)


@pytest.mark.parametrize(("rate", "requests"), [(0.5, 40), (8, 1000)])
def test_an_open_loop_takes_as_long_as_its_schedule(rate, requests):
    load = OpenLoop(isl=8, osl=4, rate=rate, requests=requests)
    (block,) = make_plan([Wanted(framework="f", model="m", family="p", scenario=load, gates=(Gate("ttft_ms.p50"),))], 0.05)
    assert requests / rate < cost(block, (1, 1), "cpu").seconds[0] < requests / rate + 60

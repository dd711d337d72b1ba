"""The noise of a machine: found from runs whose truth is known, and what it certifies."""

import dataclasses
import math
import random

import pytest

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.calibration import certifiable, noise_of, of_gates, session_sd
from pytest_kvcache.core.evidence import Evidence, as_judged, from_plain, gather
from pytest_kvcache.core.gate import PASS, REGRESSION, Base, judge, rule_for
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.core.plan import Wanted, gate_specs
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Gate

METRIC = find_metric("tpot_ms.p50")
ENVIRONMENT = {"identity": {"gpu": "Test CPU"}, "subject": {}, "context": {}}
NOW = stored.Current(environment=ENVIRONMENT, workload="w")
(GATE,) = gate_specs(
    Wanted(framework="f", model="m", family="s", scenario=ClosedLoop(isl=8, osl=4, concurrency=4), gates=(Gate("tpot_ms.p50"),)), 0.15
)


def document(sessions):
    doc = stored.empty("cpu", "f", "m")
    for i, values in enumerate(sessions):
        runs = tuple({"value": v, "n": 24, "failed": 0} for v in values)
        one = stored.Recording(key=GATE.key, metric=METRIC, workload="w", runs=runs)
        doc = stored.merge(doc, [one], session=f"s{i}", about={"started": f"2026-11-0{i + 1}T00:00:00Z", "environment": ENVIRONMENT},
                           now_iso="2026-11-30T00:00:00Z", replace=False)  # fmt: skip
    return doc


def drawn(seed, sessions, runs, *, restart=0.02, shift=0.0):
    noise = random.Random(seed)
    for _ in range(sessions):
        level = noise.gauss(0, shift)
        yield [20 * math.exp(level + noise.gauss(0, restart)) for _ in range(runs)]


def test_the_spread_of_restarts_and_of_sessions_is_found():
    rule = rule_for("cpu", "ci")
    found = [noise_of(document(drawn(s, 9, 5, restart=0.05, shift=0.10)), GATE.key, 0.15, NOW, rule) for s in range(40)]
    assert math.isclose(sum(n.restart_sd for n in found) / 40, 0.05, rel_tol=0.05)
    # Shrunk by 8 of 16 degrees of freedom towards 2 %: sqrt((0.02^2 + 0.10^2) / 2).
    assert math.isclose(sum(n.session_sd for n in found) / 40, 0.072, rel_tol=0.1)
    assert {(n.sessions, n.runs, n.margin) for n in found} == {(9, 45, 0.15)}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("restart", [0.01, 0.05])
def test_a_margin_that_is_called_certifiable_passes_nine_of_ten_equal_builds(kind, restart):
    rule = dataclasses.replace(rule_for(kind, "full"), futility=False)
    shift = rule.session_prior
    margin = certifiable(restart, shift, rule, rule.looks[-1], "lower")
    noise, words = random.Random(7), []
    for _ in range(300):
        sessions = []
        for _ in range(rule.record_sessions):
            level = noise.gauss(0, shift)
            sessions.append(tuple(math.exp(level + noise.gauss(0, restart)) for _ in range(rule.record_runs)))
        level = noise.gauss(0, shift)
        new = [math.exp(level + noise.gauss(0, restart)) for _ in range(rule.looks[-1])]
        base = Base(sessions=tuple(sessions), unit="ms", better="lower")
        words.append(judge(base, new, better="lower", margin=margin, rule=rule, unit="ms", final=True).verdict)
    assert REGRESSION not in words
    assert 0.84 < sum(w in (PASS, "improvement") for w in words) / 300 < 0.99


def test_more_runs_certify_less_and_less_noise_too():
    rule = rule_for("gpu", "full")
    margins = [certifiable(0.02, 0.0075, rule, n, "higher") for n in rule.looks]
    assert margins == sorted(margins, reverse=True)
    assert certifiable(0.01, 0.0075, rule, 3, "higher") < margins[0] < certifiable(0.02, 0.03, rule, 3, "higher")


def test_one_session_tells_nothing_of_sessions():
    rule = rule_for("cpu", "ci")
    base = stored.lookup(document(drawn(1, 1, 5)), GATE.key, METRIC, NOW)
    assert session_sd(base, "lower", rule) == 0.0
    assert noise_of(document(drawn(1, 1, 5)), GATE.key, 0.15, NOW, rule).session_sd == rule.session_prior
    assert noise_of(document([]), GATE.key, 0.15, NOW, rule) is None
    assert noise_of(document([[1.0]]), GATE.key, 0.15, NOW, rule) is None


def test_a_gate_takes_the_spread_that_was_calibrated_and_a_stored_run_keeps_it():
    rule, doc = rule_for("cpu", "ci"), document(drawn(3, 1, 5))
    known = gather(doc, GATE, NOW, rule, noise=document(drawn(4, 5, 5, shift=0.15)))
    assert known.base.session_sd > 0.05
    assert as_judged(GATE, known.base, rule)[1].session_prior == known.base.session_sd
    plain = gather(doc, GATE, NOW, rule)
    assert (plain.base.session_sd, as_judged(GATE, plain.base, rule)[1]) == (0.0, rule)
    assert from_plain(known.plain()) == known
    with pytest.raises(TypeError, match="session_sd"):
        from_plain(Evidence(need="judge", base=Base(session_sd=-1.0)).plain())


def test_the_noise_of_something_else_is_not_taken():
    rule, doc = rule_for("cpu", "ci"), document(drawn(3, 1, 5))
    noise = document(drawn(4, 5, 5, shift=0.15))
    for session in noise["sessions"].values():
        session["environment"] = {**ENVIRONMENT, "identity": {"gpu": "Other CPU"}}
    assert gather(doc, GATE, NOW, rule, noise=noise).base.session_sd == 0.0
    assert of_gates(noise, {GATE.key: 0.15}, ENVIRONMENT, rule) == []

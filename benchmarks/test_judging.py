"""Ten thousand gates of 60 runs judged: `pytest benchmarks/test_judging.py`. Times are shown, none is asserted; docs/gate.md has them."""

import math
import random
from collections import Counter

import pytest

from pytest_kvcache.core.gate import INCONCLUSIVE, PASS, REGRESSION, Base, judge, judge_paired, rule_for

GATES = 10_000
SESSIONS, A_SESSION, NEW = 24, 2, 12  # 48 stored runs and 12 new ones
RULE = rule_for("gpu", "full")
CARD, PARTS = "GPU-1, driver 580", ("copy", "arithmetic")


def runs(noise, level, cv, count):
    return [100 * math.exp(noise.gauss(level, cv)) for _ in range(count)]


def gates(level, cv):
    """Made-up gates, all truly worse by `level` (a log), with restarts that differ by `cv`."""
    noise = random.Random(1)
    made = []
    for _ in range(GATES):
        old = tuple(tuple(runs(noise, 0.0, cv, A_SESSION)) for _ in range(SESSIONS))
        beside = {part: runs(noise, 0.0, 0.002, SESSIONS * A_SESSION) for part in PARTS}
        stored = Base(sessions=old, samples=((500,) * A_SESSION,) * SESSIONS, canary_on=CARD, canary_ms=beside)
        times = zip(*(runs(noise, 0.0, 0.002, NEW) for _ in PARTS), strict=True)
        readings = [{"on": CARD, "ms": dict(zip(PARTS, ms, strict=True))} for ms in times]
        made.append((stored, runs(noise, level, cv, NEW), readings))
    return made


@pytest.mark.parametrize(("level", "cv", "mostly"), [
    pytest.param(0.0, 0.01, PASS, id="decided at the first look"), pytest.param(0.04, 0.05, INCONCLUSIVE, id="open through all looks"),
    pytest.param(0.10, 0.02, REGRESSION, id="regressed"),
])  # fmt: skip
def test_judge(benchmark, level, cv, mostly):
    benchmark.group = f"judge {GATES} gates of {SESSIONS * A_SESSION + NEW} runs"
    asked = gates(level, cv)

    def judge_all():
        more = {"better": "lower", "margin": 0.05, "rule": RULE, "samples": (500,) * NEW, "quantile": 0.5, "final": True}
        return [judge(b, n, **more, canary=c) for b, n, c in asked]

    words = Counter(v.verdict for v in benchmark.pedantic(judge_all, rounds=3, warmup_rounds=1))
    assert words.most_common(1)[0][0] == mostly
    assert words.total() == GATES


def test_judge_paired(benchmark):
    """Twelve rounds of two arms that differ by less than their noise."""
    benchmark.group = f"judge {GATES} pairs of arms of {NEW} rounds"
    noise = random.Random(2)
    asked = [(runs(noise, 0.0, 0.03, NEW), runs(noise, 0.01, 0.03, NEW)) for _ in range(GATES)]

    def judge_all():
        return [judge_paired(old, new, better="lower", final=True) for old, new in asked]

    assert len(benchmark.pedantic(judge_all, rounds=3, warmup_rounds=1)) == GATES

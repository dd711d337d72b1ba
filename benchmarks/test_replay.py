"""A stored run of 100,000 requests read, checked, judged again: `pytest benchmarks/test_replay.py`. Times are shown, none is asserted;
docs/gate.md has them."""

import dataclasses
import json
from collections import Counter

import pytest

from pytest_kvcache import replay
from pytest_kvcache.core.evidence import Evidence
from pytest_kvcache.core.gate import Base, rule_for
from pytest_kvcache.core.measurement import measurement
from pytest_kvcache.core.metrics import find_metric, measure
from pytest_kvcache.core.plan import Wanted, make_plan
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Gate
from pytest_kvcache.harness.traces import part_of, write

REQUESTS, RUNS, STREAMS = 100_000, 5, 256
SCENARIO = ClosedLoop(isl=512, osl=128, concurrency=STREAMS, requests=REQUESTS // RUNS)
GATES = ("output_tok_s", "ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50")
RULE = rule_for("cpu", "ci")
TOKENS = {"output": 128.0 * SCENARIO.n_requests, "input": 512.0 * SCENARIO.n_requests}
LAG = {"p50": 0.1, "p99": 0.3, "max": 1.0}
# What a window of a real server on a GPU is told with, so that every rule of validity has something to look at.
WATCHED = {
    "device": "gpu",
    "cores": 64,
    "foreign_cores": 0.2,
    "steal_cores": 0.0,
    "foreign": [],
    "server_tokens": TOKENS,
    "counters": [dict.fromkeys(TOKENS, 0.0), TOKENS],
    "gpu": {"readings": 1000, "slowed": {"power cap": 0.5}, "foreign": []},
    "client": {"workers": 4, "cores": 0.3, "stamps": "kernel", "slot_idle_s": 0.1, "loop_lag_ms": LAG, "clock_steps": 0},
}


def trace(run):
    """Every stream one request after the other, a little slower each run."""
    factor, records, arrivals = 1 + run / 1000, [], Counter()
    for i in range(SCENARIO.n_requests):
        sent = (i // STREAMS) * 1.5 * factor + (i % STREAMS) * 1e-4
        first, last = sent + 0.2 * factor, sent + 1.4 * factor
        arrivals.update(int(1e3 * (first + (last - first) * k / 127)) for k in range(0, 128, 8))
        records.append(
            RequestRecord(
                index=i, sent_s=sent, first_s=first, last_s=last, end_s=last, input_tokens=512, output_tokens=128, events=128, status=200
            )
        )
    return Trace(
        scenario=str(SCENARIO), arm="base", run=run, workload="w", isl=512, osl=128, records=tuple(records), concurrency=STREAMS,
        load={"asked": SCENARIO.n_requests, **WATCHED},
        itl={"us": [9000, 9449, 10_000], "n": [1, 126 * SCENARIO.n_requests, SCENARIO.n_requests - 1]},
        arrivals={"ms": sorted(arrivals), "n": [8 * arrivals[ms] for ms in sorted(arrivals)]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The run's folder and its one block."""
    folder = tmp_path_factory.mktemp("run")
    want = Wanted(framework="vllm", model="m", family="fixed", scenario=SCENARIO, gates=tuple(Gate(g) for g in GATES))
    (block,) = make_plan([want], RULE.margin)
    traces = [trace(run) for run in range(1, RUNS + 1)]
    figures = [measure(t) for t in traces]
    evidence = {}
    for gate in block.tasks[0].gates:
        metric = find_metric(gate.metric)
        base = Base(
            sessions=(tuple(f[gate.metric] for f in figures),), samples=((SCENARIO.n_requests,) * RUNS,), unit=metric.unit,
            better=metric.better, definition=metric.definition,
        )  # fmt: skip
        evidence[gate.key] = dataclasses.asdict(Evidence(need="judge", base=base))
    digest = write(folder / "records.npz", [part_of(t) for t in traces], [block.id] * RUNS)
    kept = ("scenario", "arm", "run", "workload")
    run = {
        "schema": "pytest-kvcache/run/1", "complete": True, "interrupted": None, "session": "s", "started": "2026-11-30T00:00:00Z",
        "seconds": 1.0, "command": "pytest", "exit_code": 0, "plugin": "0.1.0", "gpu": "cpu", "profile": "ci", "verdicts": [],
        "expected_false_alarms": 0.0, "files": {"records.npz": digest}, "environments": {block.id: {}},
        "plan": {"blocks": [{"id": block.id, "framework": "vllm", "model": "m", "arms": ["base"], "scenarios": [str(SCENARIO)],
                             "server_starts": [3, 5], "seconds": [1, 2]}]},
        "traces": [{"block": block.id, **{k: getattr(t, k) for k in kept}} for t in traces],
        "blocks": {block.id: {
            "complete": True, "error": None, "server_start_s": [], "spent_s": {}, "broken": [], "evidence": evidence,
            "measurements": [measurement(t, None) for t in traces],
        }},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return folder, block


def test_judge_again(benchmark, stored):
    benchmark.group = f"judge {REQUESTS} stored requests again"
    folder, block = stored
    gates = block.tasks[0].gates

    def again():
        run = replay.load(*replay.head(folder))
        return replay.judged(run, block, replay.evidence(run, block, gates, RULE, smoke=False), RULE)

    found = benchmark.pedantic(again, rounds=3, warmup_rounds=1)
    assert {v["verdict"] for v in found["verdicts"].values()} == {"pass"}

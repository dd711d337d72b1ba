"""Recorded runs for tests of the gate: traces of a closed loop with known truth, from the requests to the verdict as in a session."""

import dataclasses
import random

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.gate import rule_for
from pytest_kvcache.core.measurement import measurement
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.core.plan import Wanted, make_plan
from pytest_kvcache.core.progress import Orders, Progress, settle
from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.scenarios import ClosedLoop
from pytest_kvcache.core.spec import Gate
from pytest_kvcache.core.validity import trace_problem

SCENARIO = ClosedLoop(isl=64, osl=32, concurrency=4, requests=64)
METRICS = ("output_tok_s", "req_s", "ttft_ms.p50", "tpot_ms.p50", "itl_ms.p50", "e2e_ms.p50", "ttft_ms.p90")
RULE = rule_for("gpu", "full")
(BLOCK,) = make_plan([Wanted(framework="f", model="m", family="faults", scenario=SCENARIO, gates=tuple(map(Gate, METRICS)))], 0.10)
GATES = {g.metric: g for g in BLOCK.tasks[0].gates}
ENVIRONMENT = {"identity": {"gpu": "Test CPU"}, "subject": {}, "context": {}}


def trace(seed, run=1, *, slower=1.0, first_slower=1.0, sd=0.01):
    """One run: four streams in turn, each request 0.1 s to the first token and 20 ms a token, noise by request and by restart."""
    noise = random.Random(f"{seed}|{run}")
    restart = 1 + noise.gauss(0, sd)
    records, free, gaps, arrivals = [], [0.0] * SCENARIO.concurrency, {}, {}
    for i in range(SCENARIO.n_requests):
        stream = free.index(min(free))
        sent = free[stream]
        first = sent + 0.1 * restart * slower * first_slower * (1 + noise.gauss(0, 0.05))
        step = 0.02 * restart * slower * (1 + noise.gauss(0, 0.02))
        times = [first + k * step for k in range(SCENARIO.osl)]
        records.append(RequestRecord(
            index=i, sent_s=sent, first_s=first, answer_s=first, last_s=times[-1], end_s=times[-1], input_tokens=SCENARIO.isl,
            output_tokens=SCENARIO.osl, events=SCENARIO.osl, status=200,
        ))  # fmt: skip
        free[stream] = times[-1]
        gaps[round(step * 1e6)] = gaps.get(round(step * 1e6), 0) + SCENARIO.osl - 1
        for t in times:
            arrivals[int(t * 1e3)] = arrivals.get(int(t * 1e3), 0) + 1
    return Trace(
        scenario=str(SCENARIO), arm="base", run=run, workload="w", isl=SCENARIO.isl, osl=SCENARIO.osl, records=tuple(records),
        concurrency=SCENARIO.concurrency, load=load(records), itl=columns("us", gaps), arrivals=columns("ms", arrivals),
    )  # fmt: skip


def columns(name, counts):
    return {name: sorted(counts), "n": [counts[k] for k in sorted(counts)]}


def load(records):
    """What the watch, the client and the server's counters say of a run in which nothing was wrong."""
    tokens = {"output": sum(r.output_tokens for r in records), "input": sum(r.input_tokens for r in records)}
    client = {"cores": 0.1, "stamps": "kernel", "loop_lag_ms": {"p99": 0.5}, "slot_idle_s": 0.0, "clock_steps": 0}
    counters = {"preemptions": 0.0, "prefix_queries": 0.0, "prefix_hits": 0.0}
    grown = counters | {"prefix_queries": float(tokens["input"])}
    return {
        "cores": 2, "foreign_cores": 0.02, "steal_cores": 0.0, "asked": len(records), "client": client, "server_tokens": tokens,
        "counters": (counters, grown),
    }  # fmt: skip


def stretched(one, times):
    """Every time of a trace multiplied, as a slower engine or a wrong unit would have it."""
    keys = ("sent_s", "first_s", "answer_s", "last_s", "end_s")
    records = [dataclasses.replace(r, **{k: None if getattr(r, k) is None else getattr(r, k) * times for k in keys}) for r in one.records]
    itl = {"us": [max(1, round(v * times)) for v in one.itl["us"]], "n": one.itl["n"]}
    arrivals = {}
    for ms, n in zip(one.arrivals["ms"], one.arrivals["n"], strict=True):
        arrivals[int(ms * times)] = arrivals.get(int(ms * times), 0) + n
    return dataclasses.replace(one, records=tuple(records), itl=itl, arrivals=columns("ms", arrivals))


def baseline(sessions=5, runs=2):
    """The document that recording so many sessions of so many runs gives."""
    doc = stored.empty("gpu", "f", "m")
    for s in range(sessions):
        rows = [measurement(trace(f"baseline{s}", r), None) for r in range(runs)]
        recordings = [
            stored.Recording(
                key=gate.key, metric=find_metric(metric), workload="w",
                runs=tuple({"value": row["metrics"][metric], "n": row["requests"], "failed": row["failed"]} for row in rows),
            )
            for metric, gate in GATES.items()
        ]  # fmt: skip
        about = {"started": f"2026-01-0{s + 1}T00:00:00Z", "environment": ENVIRONMENT}
        doc = stored.merge(doc, recordings, session=f"s{s}", about=about, now_iso="2026-02-01T00:00:00Z", replace=False)
    return doc


def judged(doc, traces, *, workload="w", environment=ENVIRONMENT, find=find_metric):
    """The verdict on each gate when a session has measured these traces, one a run."""
    progress = Progress(block=BLOCK, environment=environment)
    for one in traces:
        problem = trace_problem(one)
        progress.measurements.append(measurement(one, problem[0] if problem else None))
        if problem:
            progress.broken[one.scenario, one.arm] = problem[0]
    now = stored.Current(environment=environment, workload=workload)
    bases = {g.key: stored.lookup(doc, g.key, find(g.metric), now) for g in GATES.values()}
    orders = Orders(rule=RULE, needs=dict.fromkeys(bases, "judge"), bases=bases)
    return {metric: settle(gate, progress, orders, final=True) for metric, gate in GATES.items()}

"""Our load client, called as the plugin calls it: from a Python that runs already, in this process."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

from .figures import Report, quantiles
from .scenarios import Scenario

PROMPT = "the quick brown fox " * 16


def body(scenario: Scenario) -> bytes:
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if scenario.tokens_per_chunk > 1 else {})
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if scenario.chat else {"prompt": PROMPT}
    return json.dumps({"model": "mock", "stream": True, "max_tokens": scenario.tokens, "stream_options": options, **asked}).encode()


def _cpu_s() -> float:
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in both)


def drive(scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None, *, workers: int = 1) -> Report:
    from pytest_kvcache.core.load import Load, Target
    from pytest_kvcache.core.scenarios import OpenLoop
    from pytest_kvcache.core.workload import schedule
    from pytest_kvcache.harness.loadgen import run

    n = scenario.requests * scenario.factor
    load = Load(
        bodies=(body(scenario),) * n,
        osl=(scenario.tokens,) * n,
        concurrency=scenario.concurrency,
        due_s=schedule(OpenLoop(isl=1, osl=scenario.tokens, rate=scenario.rate, requests=n, seed=seed)) if scenario.rate else None,
    )
    cpu, called = _cpu_s(), time.perf_counter_ns()
    seen = run(Target(base_url=url, endpoint=scenario.endpoint, ca_file=ca_file), load, workers=workers)
    returned, cpu_outside = time.perf_counter_ns(), _cpu_s() - cpu
    good = [r for r in seen.records if r.outcome == "ok"]
    if not good:
        raise RuntimeError(f"no request was answered, the first: {seen.records[0]}")
    many = [r for r in good if r.output_tokens > r.first_event_tokens]
    itl_ms = [us / 1000 for us in seen.itl["us"]]
    return Report(
        asked=n,
        done=len(good),
        tokens=sum(r.output_tokens for r in good),
        quantiles={
            "ttft": quantiles([(r.first_s - r.sent_s) * 1e3 for r in good]),
            "tpot": quantiles([(r.last_s - r.first_s) / (r.output_tokens - r.first_event_tokens) * 1e3 for r in many]),
            "itl": quantiles(itl_ms, seen.itl["n"]),
        },
        called_ns=called,
        last_ns=seen.zero_ns + int(max(r.end_s for r in good) * 1e9),
        records_ns=returned,
        cpu_s=seen.client["cpu_s"],
        cpu_outside_s=cpu_outside,
        due_ns=[seen.zero_ns + r.scheduled_s * 1e9 for r in seen.records] if scenario.rate else (),
        notes={name: value for name, value in seen.client.items() if isinstance(value, int | float | str)},
    )

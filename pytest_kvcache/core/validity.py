"""Rules that make a run invalid, never merely slow. Each takes what was seen and gives one line, or None."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .metrics import METRICS, percentile
from .record import OK, Trace


class Spoiled(Exception):
    """The machine, not the engine, made a window worthless; the message says how, `seen` is what the watch saw."""

    def __init__(self, problem: str, seen: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.seen = dict(seen)


MAX_FOREIGN_CORES = 0.3
MAX_STEAL_CORES = 0.3
BESIDE_A_GPU, MOST_BESIDE_A_GPU = 0.25, 2.0  # of the cores, and cores: they only feed it, and do not wait for the slowest of them


def allowed_cores(seen: Mapping[str, Any]) -> tuple[float, float]:
    """How many cores other processes and the hypervisor may take: little beside an engine on the processors, of processes a share of all
    cores beside one on a GPU. An attached server is not seen among them: what our client lacks of this machine its own clocks tell."""
    device, cores = seen.get("device"), seen.get("cores") or 0
    if device == "attached":
        return math.inf, math.inf
    share = min(MOST_BESIDE_A_GPU, BESIDE_A_GPU * cores) if device == "gpu" else 0.0
    return max(MAX_FOREIGN_CORES, share), MAX_STEAL_CORES


def _exceeds(value: Any, limit: float) -> bool:
    """Whether a known figure is above its limit; NaN is."""
    return value is not None and not value <= limit


def _named(process: Mapping[str, Any]) -> str:
    what = process.get("cmdline") or process.get("name") or "?"
    who = f"pid {process['pid']} {what}" if process.get("pid") is not None else str(what)
    return f"{who} {process['cores']:.2f}"


NORMAL = "power cap"  # a card at its power cap runs as it is meant to; that is only shown
MAX_SLOWED = 0.02  # of a window's readings
MAX_FOREIGN_PERCENT = 2.0  # of the GPU's multiprocessors


def gpu_problems(seen: Mapping[str, Any]) -> list[str]:
    """What a watch over the GPU (`harness.gpu_watch`) says against a window: it was slowed, or others computed on it."""
    slowed = [(why, share) for why, share in seen.get("slowed", {}).items() if why != NORMAL and _exceeds(share, MAX_SLOWED)]
    problems = [f"the GPU was slowed ({why}) for {share:.0%} of the time (allowed {MAX_SLOWED:.0%})" for why, share in slowed]
    for one in seen.get("foreign", ()):
        who = f"pid {one['pid']} ({one['name']}), {one['mib']} MiB"
        if one["percent"] is None:
            problems.append(f"another process is on the GPU, and whether it computes cannot be read: {who}")
        elif _exceeds(one["percent"], MAX_FOREIGN_PERCENT):
            problems.append(f"another process used {one['percent']:.0f} % of the GPU (allowed {MAX_FOREIGN_PERCENT:g}): {who}")
    return problems


def load_problem(seen: Mapping[str, Any]) -> str | None:
    """Why the machine was too busy for this window to count (`seen` of `harness.device.LoadWatch`), or None."""
    problems = gpu_problems(seen.get("gpu") or {})
    of_cores = f" of {seen['cores']} cores" if seen.get("cores") is not None else " cores"
    foreign, steal = seen.get("foreign_cores"), seen.get("steal_cores")
    most_foreign, most_steal = allowed_cores(seen)
    if _exceeds(foreign, most_foreign):
        names = ", ".join(_named(p) for p in seen.get("foreign", ()))
        problems.append(f"other processes used {foreign:.2f}{of_cores} (allowed {most_foreign:g})" + (f": {names}" if names else ""))
    if _exceeds(steal, most_steal):
        problems.append(f"the hypervisor took {steal:.2f}{of_cores} (allowed {most_steal:g})")
    return "; ".join(problems) or None


MAX_CLIENT_CORES = 0.7  # of one core, by the busiest load process
MAX_SEND_LAG_MS, MAX_SEND_LAG = 5.0, 0.05  # or this share of the median TTFT, if that is more
MAX_LOOP_LAG_MS, MAX_LOOP_LAG = 5.0, 0.5  # or this share of the median TPOT: kernel stamps hide a delay below a token's gap
MAX_SLOT_IDLE = 0.05  # of the time of a closed loop's streams


def client_problem(trace: Trace) -> str | None:
    """Whether our own load generator was the limit, so that its delays are in the figures, or its load was not the one asked for.

    The limits are those of the module: processor time of the busiest load process; sends behind an open loop's schedule,
    less what connecting took; the lag of a heartbeat in the load's own loop (99th percentiles); and the share of time that
    the streams of a closed loop spent between an answer's end and the next send.
    """
    client, problems = trace.load.get("client", {}), []
    if _exceeds(client.get("cores"), MAX_CLIENT_CORES):
        problems.append(f"its busiest process used {client['cores']:.2f} of one core (allowed {MAX_CLIENT_CORES:g})")
    behind = [(r.sent_s - r.scheduled_s - r.connect_s) * 1e3 for r in trace.records if r.scheduled_s is not None]
    allowed = max(MAX_SEND_LAG_MS, MAX_SEND_LAG * (_median_ttft_ms(trace) or 0.0))
    if behind and _exceeds(lag := percentile(behind, 0.99), allowed):
        problems.append(f"it sent {lag:.1f} ms behind its own schedule (99th percentile, allowed {allowed:.3g})")
    hidden = MAX_LOOP_LAG * (_median_tpot_ms(trace) or 0.0) if client.get("stamps") == "kernel" else 0.0
    allowed = max(MAX_LOOP_LAG_MS, hidden)
    if _exceeds(lag := client.get("loop_lag_ms", {}).get("p99"), allowed):
        problems.append(f"its loop lagged {lag:.1f} ms (99th percentile, allowed {allowed:.3g})")
    problems += _idle_streams(trace, client)
    if client.get("clock_steps"):
        problems.append("the machine's clock was set meanwhile, by which arrivals are stamped")
    return "the client was too slow: " + "; ".join(problems) if problems else None


def _idle_streams(trace: Trace, client: Mapping[str, Any]) -> list[str]:
    ends = [r.end_s for r in trace.records if r.end_s is not None]
    if not trace.concurrency or not ends or not client.get("slot_idle_s"):
        return []
    time_s = trace.concurrency * (max(ends) - min(r.sent_s for r in trace.records))
    if not _exceeds(share := client["slot_idle_s"] / time_s, MAX_SLOT_IDLE):
        return []
    return [f"its streams were idle {share:.0%} of the time between an answer and the next request (allowed {MAX_SLOT_IDLE:.0%})"]


def _median_tpot_ms(trace: Trace) -> float | None:
    tpot = METRICS["tpot_ms"].sample
    return percentile([v for r in trace.records if tpot and (v := tpot(r)) is not None], 0.5)


def _median_ttft_ms(trace: Trace) -> float | None:
    return percentile([(r.first_s - r.sent_s) * 1e3 for r in trace.records if r.first_s is not None], 0.5)


MAX_HIT_RATE = 0.01


def cache_problem(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    cold: bool = True,
    max_hit_rate: float = MAX_HIT_RATE,
    preempted: bool = False,
) -> str | None:
    """What the server's own counters, read before and after a load, say against it.

    `prefix_queries` and `prefix_hits` (tokens): prompts that should be new (`cold`) were served from the prefix cache, or
    the other way round; `preemptions` where none may be. A counter that is missing says nothing, one that fell was reset.
    """
    before = _with_first_uses(before, after)
    grown = {name: after[name] - before[name] for name in after if name in before}
    if fell := [name for name, n in grown.items() if n < 0]:
        return f"the server's counters fell during the load ({', '.join(sorted(fell))}): it was restarted"
    if grown.get("preemptions", 0) > 0 and not preempted:
        return f"the server preempted {grown['preemptions']:.0f} requests; none may be"
    rate = hit_rate(before, after)
    if rate is None:
        return None
    if cold and rate > max_hit_rate:
        return f"the prefix cache was warm: {rate:.1%} of the prompt tokens were hits (allowed {max_hit_rate:.0%}): no true prefill"
    if not cold and rate <= max_hit_rate:
        return f"the prefix cache was cold: {rate:.1%} of the prompt tokens were hits, though all had been sent before"
    return None


def _with_first_uses(before: Mapping[str, float], after: Mapping[str, float]) -> Mapping[str, float]:
    """A reading with 0 for what was counted since for the first time: SGLang's page has no hits before the first one."""
    return {**{name: 0.0 for name in ("prefix_hits", "preemptions") if name in after}, **before} if before else before


def hit_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Share of prompt tokens found in the prefix cache between two readings; None where nothing was asked or is not counted."""
    before = _with_first_uses(before, after)
    try:
        queries, hits = (after[k] - before[k] for k in ("prefix_queries", "prefix_hits"))
    except KeyError:
        return None
    return hits / queries if queries > 0 and hits >= 0 else None


COUNTERS_AGREE = 0.001


def counters_problem(trace: Trace) -> str | None:
    """Whether the server counted other tokens than the client was told of: somebody else used it, or one of them miscounts."""
    counted = trace.load.get("server_tokens") or {}
    for name, column in (("output", "output_tokens"), ("input", "input_tokens")):
        told = [getattr(r, column) for r in trace.records]
        if counted.get(name) is None or None in told:
            continue
        if abs(counted[name] - sum(told)) > max(1.0, COUNTERS_AGREE * sum(told)):
            return f"the server counted {counted[name]:.0f} {name} tokens during the load, its answers add up to {sum(told)}"
    return None


def requests_problem(trace: Trace, *, allowed_failures: int = 0) -> str | None:
    """Why the answers are not what was asked for: failures, no usage, prompts or outputs of another length."""
    failed = [r for r in trace.records if r.outcome != OK]
    if not trace.records:
        return "no request was sent"
    if not failed and len(trace.records) < trace.load.get("asked", 0):
        return f"only {len(trace.records)} of {trace.load['asked']} requests were sent"
    if len(failed) > allowed_failures:
        counts = Counter(r.outcome for r in failed)
        classes = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        return f"{len(failed)} of {len(trace.records)} requests failed ({classes}); the first: {failed[0].error[:200]}"
    for r in trace.records:
        if r.outcome != OK:
            continue
        if r.input_tokens is None or r.output_tokens is None:
            return f"request {r.index}: the server reports no token counts (usage)"
        isl, osl = trace.asked(r.index)
        if r.input_tokens != isl:
            return f"request {r.index}: the server counted {r.input_tokens} input tokens, {isl} were sent"
        if r.output_tokens != osl:
            return f"request {r.index}: {r.output_tokens} output tokens, {osl} were asked for"
    return None


def trace_problem(trace: Trace) -> tuple[str, bool] | None:
    """The first reason why a run of a scenario does not count, and whether the machine (not the engine) is to blame.

    What the machine did comes first: an engine starved by another process also fails requests. Failed requests come before
    what our client did: refusals leave it little to do, and time-outs stand in its way.
    """
    if refused := trace.load.get("refused"):
        return refused, False
    if trace.tokens:
        from .quality import text_problem

        return text_problem(trace)
    if sizes := trace.load.get("capacity"):
        from .capacity import problem as size_problem

        counters = trace.load.get("counters", ({}, {}))
        found = requests_problem(trace) or size_problem(sizes) or counters_problem(trace) or cache_problem(*counters)
        return (found, False) if found else None
    if problem := load_problem(trace.load):
        return problem, True
    if problem := requests_problem(trace):
        return problem, False
    if problem := client_problem(trace):
        return problem, True
    if beside := trace.load.get("beside"):
        return f"what it was measured in turns with does not count: {beside}", True
    if lost := trace.load.get("counters_lost"):
        return f"the server's metrics page had no counters {lost}", True
    problem = counters_problem(trace) or cache_problem(*trace.load.get("counters", ({}, {})))
    return (problem, False) if problem else None

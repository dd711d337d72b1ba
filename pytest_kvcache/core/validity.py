"""Rules that make a run invalid, never merely slow. Each takes what was seen and gives one line, or None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .record import OK, Trace


class Spoiled(Exception):
    """The machine, not the engine, made a window worthless; the message says how, `seen` is what the watch saw."""

    def __init__(self, problem: str, seen: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.seen = dict(seen)


MAX_FOREIGN_CORES = 0.3
MAX_STEAL_CORES = 0.3


def _exceeds(value: Any, limit: float) -> bool:
    """Whether a known figure is above its limit; NaN is."""
    return value is not None and not value <= limit


def _named(process: Mapping[str, Any]) -> str:
    what = process.get("cmdline") or process.get("name") or "?"
    who = f"pid {process['pid']} {what}" if process.get("pid") is not None else str(what)
    return f"{who} {process['cores']:.2f}"


def load_problem(
    seen: Mapping[str, Any], *, max_foreign_cores: float = MAX_FOREIGN_CORES, max_steal_cores: float = MAX_STEAL_CORES
) -> str | None:
    """Why the machine was too busy for this window to count (`seen` of `harness.device.LoadWatch`), or None."""
    problems = []
    of_cores = f" of {seen['cores']} cores" if seen.get("cores") is not None else " cores"
    foreign, steal = seen.get("foreign_cores"), seen.get("steal_cores")
    if _exceeds(foreign, max_foreign_cores):
        names = ", ".join(_named(p) for p in seen.get("foreign", ()))
        problems.append(f"other processes used {foreign:.2f}{of_cores} (allowed {max_foreign_cores:g})" + (f": {names}" if names else ""))
    if _exceeds(steal, max_steal_cores):
        problems.append(f"the hypervisor took {steal:.2f}{of_cores} (allowed {max_steal_cores:g})")
    return "; ".join(problems) or None


MAX_CLIENT_CORES = 0.9


def client_problem(seen: Mapping[str, Any]) -> str | None:
    """Whether our own load generator, one thread, ran out of processor, so that its delays are in the figures."""
    used = seen.get("client_cores")
    return f"the client used {used:.2f} cores of the one it has" if _exceeds(used, MAX_CLIENT_CORES) else None


def requests_problem(trace: Trace, *, allowed_failures: int = 0) -> str | None:
    """Why the answers are not what was asked for: failures, no usage, prompts or outputs of another length."""
    failed = [r for r in trace.records if r.outcome != OK]
    if not trace.records:
        return "no request was sent"
    if len(failed) > allowed_failures:
        counts = Counter(r.outcome for r in failed)
        classes = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        return f"{len(failed)} of {len(trace.records)} requests failed ({classes}); the first: {failed[0].error[:200]}"
    for r in trace.records:
        if r.outcome != OK:
            continue
        if r.input_tokens is None or r.output_tokens is None:
            return f"request {r.index}: the server reports no token counts (usage)"
        if r.input_tokens != trace.isl:
            return f"request {r.index}: the server counted {r.input_tokens} input tokens, {trace.isl} were sent"
        if r.output_tokens != trace.osl:
            return f"request {r.index}: {r.output_tokens} output tokens, {trace.osl} were asked for"
    return None


def trace_problem(trace: Trace) -> tuple[str, bool] | None:
    """The first reason why a run of a scenario does not count, and whether the machine (not the engine) is to blame.

    What the machine did comes first: an engine starved by another process also fails requests.
    """
    for problem in (load_problem(trace.load), client_problem(trace.load)):
        if problem:
            return problem, True
    problem = requests_problem(trace)
    return (problem, False) if problem else None

"""A trace in figures, as a block's result has them: what was asked decides which figures there are. Pure."""

from __future__ import annotations

import math
from typing import Any

from .capacity import figures
from .metrics import measure
from .perplexity import scores_of, summarise
from .record import OK, Trace
from .stitched import windows_of


def measurement(trace: Trace, problem: str | None) -> dict[str, Any]:
    """A trace in figures; `problem` says why it does not count."""
    row = {"scenario": trace.scenario, "arm": trace.arm, "run": trace.run, "valid": problem is None, "invalid": problem, "canary": None}
    if trace.tokens:
        return row | _of_text(trace, problem)
    row |= {"requests": len(trace.records), "failed": sum(r.outcome != OK for r in trace.records)}
    if "capacity" in trace.load:  # the requests only show what the cache did when it was filled: no speed is among the figures
        return row | {"metrics": {} if problem else figures(trace.load["capacity"]), "load": trace.load}
    return row | _of_traffic(trace)


def _of_traffic(trace: Trace) -> dict[str, Any]:
    """`windows`: the figures of each of the windows it was made of."""
    from .window import facts, window_of  # numpy: only once something has been measured

    window, turns = window_of(trace), [measure(w) for w in windows_of(trace)]
    found: dict[str, Any] = {"metrics": measure(trace, window), "load": trace.load | facts(trace, window)}
    if turns:
        found["windows"] = {name: [t.get(name) for t in turns] for name in sorted(set().union(*turns))}
    return found


def _of_text(trace: Trace, problem: str | None) -> dict[str, Any]:
    """`bounds` (`core.perplexity.Figure.bounds`) beside the metrics; `requests` are the tokens scored."""
    summary = {} if problem else summarise(scores_of(trace.tokens))
    found = {name: f for name, f in summary.items() if math.isfinite(f.value) and f.value > 0}
    return {
        "metrics": {name: f.value for name, f in found.items()},
        "bounds": {name: [b if math.isfinite(b) else None for b in f.bounds] for name, f in found.items()},
        "requests": len(trace.tokens["nll"]), "failed": 0, "load": trace.load | {"windows": len(set(trace.tokens["chunk"]))},
    }  # fmt: skip

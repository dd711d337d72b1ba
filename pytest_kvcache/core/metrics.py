"""The metric table: name, unit, direction, definition, formula. A trace becomes a measurement. Pure.

Definitions are those of the field (TTFT, TPOT, E2E as in the design); each has a definition id that baselines store,
and a changed definition is never compared with an old number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .record import OK, RequestRecord, Trace
from .spec import SpecError

Samples = Callable[[RequestRecord], float | None]


@dataclass(frozen=True)
class Metric:
    """A row of the table. `sample` gives one value a request (quantiles are taken of it), `total` one value a run."""

    name: str
    unit: str
    better: str
    definition: str
    sample: Samples | None = None
    total: Callable[[Trace], float | None] | None = None


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


def _tpot(r: RequestRecord) -> float | None:
    gap = _ms(r.first_s, r.last_s)
    left = (r.output_tokens or 0) - r.first_event_tokens
    return None if gap is None or left < 1 else gap / left


def good(trace: Trace) -> tuple[RequestRecord, ...]:
    return tuple(r for r in trace.records if r.outcome == OK)


def window_s(trace: Trace) -> float | None:
    """Seconds from the first send to the last token; None when nothing was answered."""
    ends = [r.last_s for r in good(trace) if r.last_s is not None]
    return max(ends) - min(r.sent_s for r in trace.records) if ends else None


def _per_second(count: Callable[[RequestRecord], int | None]) -> Callable[[Trace], float | None]:
    def total(trace: Trace) -> float | None:
        seconds, counts = window_s(trace), [count(r) for r in good(trace)]
        if not seconds or any(c is None for c in counts):
            return None
        return sum(c for c in counts if c is not None) / seconds

    return total


def _all_tokens(r: RequestRecord) -> int | None:
    return None if r.input_tokens is None or r.output_tokens is None else r.input_tokens + r.output_tokens


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("ttft_ms", "ms", "lower", "ttft.v1 = first token event - request sent", sample=lambda r: _ms(r.sent_s, r.first_s)),
        Metric("tpot_ms", "ms", "lower", "tpot.v1 = (last - first) / (n - n_first)", sample=_tpot),
        Metric("e2e_ms", "ms", "lower", "e2e.v1 = last token event - request sent", sample=lambda r: _ms(r.sent_s, r.last_s)),
        Metric("output_tok_s", "tok/s", "higher", "output_tok_s.v1 = output tokens / (last token - first send)",
               total=_per_second(lambda r: r.output_tokens)),
        Metric("total_tok_s", "tok/s", "higher", "total_tok_s.v1 = (input + output tokens) / (last token - first send)",
               total=_per_second(_all_tokens)),
        Metric("req_s", "req/s", "higher", "req_s.v1 = answered requests / (last token - first send)", total=_per_second(lambda r: 1)),
    )
}  # fmt: skip

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def find_metric(name: str) -> Metric:
    """The row of a metric or of one of its quantiles (`ttft_ms.p50`); SpecError with the known names."""
    base, _, quantile = name.partition(".")
    metric = METRICS.get(base)
    if metric and bool(quantile) == (metric.sample is not None) and (not quantile or quantile in QUANTILES):
        return metric
    known = [m.name if m.sample is None else f"{m.name}.{{{','.join(QUANTILES)}}}" for m in METRICS.values()]
    raise SpecError(f"no metric {name!r}; known: {', '.join(known)}")


def percentile(values: Sequence[float], q: float, *, failed: int = 0) -> float | None:
    """The inverted-CDF quantile (an observed value, no interpolation) of `values` with `failed` more at infinity.

    None when there is no value; infinity when the quantile falls among the failures: dropping slow or failed requests
    must never look like an improvement.
    """
    n = len(values) + failed
    if not n:
        return None
    rank = max(1, math.ceil(q * n - 1e-9))
    return sorted(values)[rank - 1] if rank <= len(values) else math.inf


def measure(trace: Trace) -> dict[str, float]:
    """Every metric of the table for one scenario in one run; what cannot be computed or is infinite is absent."""
    failed = len(trace.records) - len(good(trace))
    found: dict[str, float | None] = {}
    for metric in METRICS.values():
        if metric.total:
            found[metric.name] = metric.total(trace)
        elif metric.sample:
            values = [v for r in good(trace) if (v := metric.sample(r)) is not None]
            for name, q in QUANTILES.items():
                found[f"{metric.name}.{name}"] = percentile(values, q, failed=failed)
    return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}

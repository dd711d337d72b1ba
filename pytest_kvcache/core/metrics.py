"""The metric table: name, unit, direction, definition, formula. A trace becomes a measurement. Pure.

Definitions are those of the field (TTFT, TPOT, E2E as in the design); each has a definition id that baselines store,
and a changed definition is never compared with an old number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from .record import OK, RequestRecord, Trace
from .spec import SpecError

if TYPE_CHECKING:
    from .window import Window

Samples = Callable[[RequestRecord], float | None]


@dataclass(frozen=True)
class Metric:
    """A row of the table. `sample` gives one value a request (quantiles are taken of it), `total` one value a run; `pooled`
    ones have a value a token, counted in the trace. One with `drift` does not vary from run to run: its change of builds that may be made
    without a word (a fraction) is the margin of its gates on a baseline (`core.still`)."""

    name: str
    unit: str
    better: str
    definition: str
    sample: Samples | None = None
    total: Callable[[Window], float | None] | None = None
    pooled: bool = False
    drift: float | None = None

    @property
    def single(self) -> bool:
        """Whether a run has one value of it, not a distribution."""
        return self.total is not None or self.drift is not None


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3


def _tpot(r: RequestRecord) -> float | None:
    # Tokens that came with the first event took no time after it; how many is unknown here, and may be most of them.
    if "event_tokens_unknown" in r.notes and 2 * r.events < (r.output_tokens or 0):
        return None
    gap = _ms(r.first_s, r.last_s)
    left = (r.output_tokens or 0) - r.first_event_tokens
    return None if gap is None or left < 1 else gap / left


def good(trace: Trace) -> tuple[RequestRecord, ...]:
    return tuple(r for r in trace.records if r.outcome == OK)


def _per_second(count: Callable[[Window], float | None]) -> Callable[[Window], float | None]:
    def total(window: Window) -> float | None:
        n = count(window)
        return None if n is None or window.seconds <= 0 else n / window.seconds

    return total


def _all_tokens(window: Window) -> float | None:
    return None if window.input_tokens is None or window.output_tokens is None else window.input_tokens + window.output_tokens


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("ttft_ms", "ms", "lower", "ttft.v1 = first token event - request sent", sample=lambda r: _ms(r.start_s, r.first_s)),
        Metric("ttfa_ms", "ms", "lower", "ttfa.v1 = first token of answer text - request sent",
               sample=lambda r: _ms(r.start_s, r.answer_s)),
        Metric("tpot_ms", "ms", "lower", "tpot.v1 = (last - first) / (n - n_first)", sample=_tpot),
        Metric("itl_ms", "ms", "lower", "itl.v1 = gap to the event before / its tokens, once a token after the first event", pooled=True),
        Metric("e2e_ms", "ms", "lower", "e2e.v1 = last token event - request sent", sample=lambda r: _ms(r.start_s, r.last_s)),
        Metric("output_tok_s", "tok/s", "higher", "output_tok_s.v2 = output tokens that arrived in the window / its length",
               total=_per_second(lambda w: w.output_tokens)),
        Metric("total_tok_s", "tok/s", "higher", "total_tok_s.v2 = (output tokens + prompts first answered) in the window / its length",
               total=_per_second(_all_tokens)),
        Metric("req_s", "req/s", "higher", "req_s.v2 = requests answered in the window / its length",
               total=_per_second(lambda w: w.answered)),
        # Of one text and one build: BF16 in place of FP16 moves the ratio by 4e-4 (llama.cpp's table), other kernels by less.
        Metric("ppl", "", "lower", "ppl.v1 = exp(mean negative log-likelihood of the scored tokens)", drift=0.005),
        Metric("ppl_ratio", "", "lower", "ppl_ratio.v1 = ppl / that of the 16-bit reference on the same tokens", drift=0.002),
        Metric("kld.mean", "nats", "lower", "kld.mean.v1 = KL(reference || arm), whole vocabulary, mean of the scored tokens", drift=0.25),
        Metric("kld.p99", "nats", "lower", "kld.p99.v1 = KL(reference || arm), whole vocabulary, P99 of the scored tokens", drift=0.3),
        Metric("kld.p999", "nats", "lower", "kld.p999.v1 = KL(reference || arm), whole vocabulary, P99.9 of the scored tokens", drift=0.5),
        Metric("top1", "", "higher", "top1.v1 = share of scored tokens whose likeliest token is the reference's", drift=0.01),
        # A pool of a given size is the same to a block; one that a server sizes by what is free differs by parts in a thousand.
        Metric("kv_bytes_per_token", "B/tok", "lower", "kv_bytes_per_token.v1 = bytes of the KV pool / tokens that it holds, as the server"
               " tells both, on one GPU", drift=0.01),
        Metric("kv_tokens", "tok", "higher", "kv_tokens.v1 = tokens that the KV pool holds, as the server tells", drift=0.02),
        Metric("kv_size_ratio", "", "lower", "kv_size_ratio.v1 = kv_bytes_per_token / bytes of a token by the model's configuration and the"
               " precision asked for, scales included", drift=0.01),
    )
}  # fmt: skip

SIZES = ("kv_bytes_per_token", "kv_tokens", "kv_size_ratio")  # of what a cache holds; the others with `drift` are of a text
MIN_KNOWN = 0.8
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def find_metric(name: str) -> Metric:
    """The row of a metric or of one of its quantiles (`ttft_ms.p50`); SpecError with the known names."""
    if (metric := METRICS.get(name)) and metric.drift is not None:
        return metric
    base, _, quantile = name.partition(".")
    metric = METRICS.get(base)
    if metric and bool(quantile) != metric.single and (not quantile or quantile in QUANTILES):
        return metric
    known = [m.name if m.single else f"{m.name}.{{{','.join(QUANTILES)}}}" for m in METRICS.values()]
    raise SpecError(f"no metric {name!r}; known: {', '.join(known)}")


def quantile_of(name: str) -> float | None:
    """Which quantile a metric's full name asks for (`ttft_ms.p99`: 0.99); None for one that has no distribution."""
    return None if name in METRICS else QUANTILES.get(name.partition(".")[2])


def percentile(values: Sequence[float], q: float, *, failed: int = 0) -> float | None:
    """The inverted-CDF quantile (an observed value, no interpolation) of `values` with `failed` more at infinity.

    None when there is no value; infinity when the quantile falls among the failures: dropping slow or failed requests
    must never look like an improvement.
    """
    return quantile(sorted(values), None, q, failed)


def too_few(quantile: str, samples: int) -> bool:
    """Whether so few samples have no such quantile of their own: a P99 of fewer than 100 is their largest value."""
    return samples * (1 - QUANTILES[quantile]) < 1 - 1e-9


def token_gaps(trace: Trace) -> tuple[Sequence[float], Sequence[int]] | None:
    """The gaps per token of a trace in ms, ascending, and how many tokens had each.

    None unless they are known for MIN_KNOWN of the tokens after the first events: an answer whose tokens per event are
    unknown (a character that took two tokens came in one event, say) has no gaps per token, and few such say nothing of the
    others.
    """
    us, n = trace.itl.get("us") or (), trace.itl.get("n") or ()
    wanted = sum((r.output_tokens or 0) - r.first_event_tokens for r in good(trace))
    if not us or sum(n) < MIN_KNOWN * wanted:
        return None
    return [v / 1e3 for v in us], n


def measure(trace: Trace, window: Window | None = None) -> dict[str, float]:
    """Every metric of the table for one scenario in one run; what cannot be computed, is infinite or is not above zero is absent.

    `window` is `core.window.window_of(trace)`, where the caller has it already.
    """
    from .window import window_of

    answers, window = good(trace), window or window_of(trace)
    failed = len(trace.records) - len(answers)
    found: dict[str, float | None] = {}
    for metric in METRICS.values():
        if metric.drift is not None:
            continue
        if metric.total:
            found[metric.name] = metric.total(window) if window else None
            continue
        values: Sequence[float]
        counts: Sequence[int] | None
        if metric.sample:
            values = sorted(v for r in answers if (v := metric.sample(r)) is not None)
            counts, lost = None, failed
        else:
            values, counts = token_gaps(trace) or ((), ())
            lost = sum(max(0, trace.asked(r.index)[1] - 1) for r in trace.records if r.outcome != OK)
        for name, q in QUANTILES.items():
            found[f"{metric.name}.{name}"] = quantile(values, counts, q, lost)
    return {k: v for k, v in found.items() if v is not None and math.isfinite(v) and v > 0}


def quantile(values: Sequence[float], counts: Sequence[int] | None, q: float, failed: int = 0) -> float | None:
    """The quantile of ascending values, each counted once or `counts` times, with `failed` more at infinity."""
    n = (len(values) if counts is None else sum(counts)) + failed
    if not values:
        return math.inf if n else None
    rank = max(1, math.ceil(q * n - 1e-9))
    if rank > n - failed:
        return math.inf
    if counts is None:
        return values[rank - 1]
    return values[bisect_left(list(accumulate(counts)), rank)]

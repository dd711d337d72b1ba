"""Figures of one run: what a client reports beside what the server wrote. Pure arithmetic; all times ns of CLOCK_MONOTONIC.

* *Window*: first request at the server to the last answer's end, at the server or by the client's own clock, whichever is later.
  `events_s` and `requests_records_s` go on until the client's caller has decoded records (ours); a peer decodes as it reads and
  writes its report later, which is not held against it, so there both windows are the same.
* *Bias*: reported p50 or p99 minus the true one, quantiles by linear interpolation. Truth: TTFT = first token's write − request
  read, ITL = gaps between token chunks, TPOT = (last − first) / (n − tokens of the first chunk).
* *Lag*: arrival at the server − intended time, both in order.
* *Slot gap*: one answer's end to the next request in a full closed loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Truth(Protocol):
    """What is used of tests/mockserver's record of a request."""

    t_req: int
    t: tuple[int, ...]
    t_end: int
    n_tok: int
    conn: int
    aborted: bool

    @property
    def ttft_ms(self) -> float: ...
    @property
    def tpot_ms(self) -> float: ...
    @property
    def gaps_ms(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a client says about its run, in the same shape for ours and the peers. None: it does not say."""

    asked: int
    done: int | None
    tokens: int | None
    quantiles: dict[str, tuple[float, float]] = field(default_factory=dict)  # "ttft", "tpot", "itl": p50 and p99 in ms
    called_ns: int = 0  # run() was called (ours), the process was started (peers)
    last_ns: int | None = None  # the last answer's end by the client's clock
    records_ns: int | None = None  # its caller has the decoded records
    cpu_s: float | None = None  # load and decoding, all processes; None: to be read from cpu_samples
    cpu_samples: Sequence[tuple[int, float]] = ()  # (time, CPU seconds so far) of all its processes
    cpu_outside_s: float | None = None  # from call to return, start and end included
    due_ns: Sequence[float] = ()  # intended send times
    due_from_zero: bool = False  # they count from a moment that nobody knows
    notes: dict[str, Any] = field(default_factory=dict)


def quantiles(values: Sequence[float], counts: Sequence[int] | None = None) -> tuple[float, float]:
    """p50 and p99, linear; `counts` says how often each value was seen."""
    seen = np.asarray(values, dtype=float)
    if counts is not None:
        seen = np.repeat(seen, np.asarray(counts, dtype=np.int64))
    p50, p99 = np.percentile(seen, (50, 99)) if len(seen) else (np.nan, np.nan)
    return float(p50), float(p99)


def cpu_between(samples: Sequence[tuple[int, float]], begin: int, end: int) -> float:
    times, used = zip(*samples, strict=True)
    return float(np.interp(end, times, used) - np.interp(begin, times, used))


def ks_sqrt_n(arrivals: Sequence[int]) -> float:
    """Distance of the gaps from an exponential distribution of the same mean, times √n; 5 % of true ones are above 1.05."""
    gaps = np.sort(np.diff(np.sort(np.asarray(arrivals, dtype=float))))
    n = len(gaps)
    expected = -np.expm1(-gaps / gaps.mean())
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) * np.sqrt(n))


def lags_ms(arrivals: Sequence[int], due: Sequence[float], from_zero: bool) -> Any:
    """In order of each; where the zero of `due` is unknown, the 0.1 % quantile of the lag is taken as none."""
    lag = (np.sort(np.asarray(arrivals, dtype=float)) - np.sort(np.asarray(due, dtype=float))) / 1e6
    return lag - np.quantile(lag, 0.001) if from_zero else lag


def slot_gaps_ms(truths: Sequence[Truth], concurrency: int) -> list[float]:
    """By connection, where each slot kept its own; else the k-th end is followed by the (concurrency + k)-th request."""
    if len({t.conn for t in truths}) <= concurrency:
        by_connection: dict[int, list[Truth]] = {}
        for truth in sorted(truths, key=lambda t: t.t_req):
            by_connection.setdefault(truth.conn, []).append(truth)
        pairs = [(a.t_end, b.t_req) for row in by_connection.values() for a, b in itertools.pairwise(row)]
    else:
        pairs = list(zip(sorted(t.t_end for t in truths), sorted(t.t_req for t in truths)[concurrency:], strict=False))
    return [(after - before) / 1e6 for before, after in pairs]


def figures(truths: Sequence[Truth], report: Report, *, concurrency: int | None, rate: float | None, chunk: int) -> dict[str, float]:
    """Every figure that this run has; keys as in scenarios.FIGURES, and the counts themselves."""
    sent, tokens, aborted = len(truths), sum(t.n_tok for t in truths), sum(t.aborted for t in truths)
    begin = min(t.t_req for t in truths)
    end = max(max(t.t_end for t in truths), report.last_ns or 0)
    seconds, until_records = (end - begin) / 1e9, (max(end, report.records_ns or 0) - begin) / 1e9
    cpu = report.cpu_s if report.cpu_s is not None else cpu_between(report.cpu_samples, begin, end)
    found = {
        "asked": report.asked,
        "sent": sent,
        "done": sent if report.done is None else report.done,
        "aborted": aborted,
        "tokens": tokens,
        "tokens_reported": tokens if report.tokens is None else report.tokens,
        "load_s": seconds,
        "events_s": tokens / chunk / until_records,
        "events_load_s": tokens / chunk / seconds,
        "requests_s": sent / seconds,
        "requests_records_s": sent / until_records,
        "cpu_s": cpu,
        "cpu_s_per_mev": cpu / (tokens / chunk) * 1e6,
        "cpu_ms_per_request": cpu / sent * 1e3,
        "start_s": (begin - report.called_ns) / 1e9,
    }
    found["exact"] = float(
        found["asked"] == found["sent"] == found["done"] and not aborted and found["tokens"] == found["tokens_reported"],
    )
    if report.cpu_outside_s is not None:
        found["cpu_outside_s"] = report.cpu_outside_s
    if concurrency and sent > concurrency:
        found["slot_gap_p50_ms"], found["slot_gap_p99_ms"] = quantiles(slot_gaps_ms(truths, concurrency))
    if rate:
        found["ks_sqrt_n"] = ks_sqrt_n([t.t_req for t in truths])
        if len(report.due_ns) == sent:
            found["lag_p50_ms"], found["lag_p99_ms"] = quantiles(lags_ms([t.t_req for t in truths], report.due_ns, report.due_from_zero))
    stamped = [t for t in truths if len(t.t) > 1]
    if stamped:
        found |= _biases(stamped, report, chunk)
    return found


def _biases(truths: Sequence[Truth], report: Report, chunk: int) -> dict[str, float]:
    true = {
        "ttft": quantiles([t.ttft_ms for t in truths]),
        "tpot": quantiles([t.tpot_ms for t in truths]),
        "itl": quantiles([gap for t in truths for gap in t.gaps_ms]),
    }
    found: dict[str, float] = {}
    for name, said in report.quantiles.items():
        for quantile, mine, right in zip(("p50", "p99"), said, true[name], strict=True):
            found[f"{name}_bias_{quantile}_ms"] = mine - right
            found[f"{name}_true_{quantile}_ms"] = right
    if (
        chunk > 1
    ):  # two conventions each: a chunk's gap, or a token's share of it; (last − first) over n − 1, or over the tokens after the first chunk
        others = {
            "tpot_n1": ("tpot", quantiles([(t.t[-1] - t.t[0]) / (t.n_tok - 1) / 1e6 for t in truths])),
            "itl_per_token": ("itl", quantiles([gap / chunk for t in truths for gap in t.gaps_ms])),
        }
        for name, (said, right) in others.items():
            if said in report.quantiles:
                found |= {
                    f"{name}_bias_{q}_ms": mine - true for q, mine, true in zip(("p50", "p99"), report.quantiles[said], right, strict=True)
                }
    return found

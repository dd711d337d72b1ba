"""The measured window of a run: from when until when the load was steady, and what arrived inside it. Pure, on numpy.

Closed loop: from the first send to the last one. All that time every stream is busy; afterwards they run dry one by one
and the rate is no longer that of the load. Open loop: from the end of the initial transient, found by MSER-5 (White,
Cobb and Spratt 2000, "A comparison of five steady-state truncation heuristics"), to the last scheduled send. A load too
short for that is measured whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import NONE, Columns
from .metrics import QUANTILES, too_few
from .record import OK, Trace

Floats = np.ndarray[Any, np.dtype[np.float64]]

ROUNDS = 3  # a closed loop of fewer rounds than this, or
ARRIVALS = 50  # an open one of fewer requests, is measured whole
BATCH = 5
PEAK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """`start_s` to `end_s` on the clock of the records. `whole` when it is the whole load, up to the last token.

    `output_tokens` that arrived inside, `answered` requests whose last token did, `input_tokens` of those whose first
    token did; None where a count is unknown. `open` is the mean number of requests that were open, `peak_tok_s` the most
    output tokens of any second (None below three seconds). `unsteady` says in words why the load was not steady.
    """

    start_s: float
    end_s: float
    whole: bool
    output_tokens: float | None
    input_tokens: int | None
    answered: int
    open: float
    peak_tok_s: float | None = None
    unsteady: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def facts(trace: Trace, window: Window | None) -> dict[str, Any]:
    """What stands beside the figures of a trace: its window, and how many answers were odd in which way (see `core.answer`)."""
    odd = Counter(note for r in trace.records for note in r.notes)
    few = [q for q in QUANTILES if too_few(q, sum(r.outcome == OK for r in trace.records))]
    shown = {} if window is None else {
        "seconds": round(window.seconds, 3), "open": round(window.open, 3), "whole": window.whole, "peak_tok_s": window.peak_tok_s,
        "unsteady": window.unsteady or None,
    }  # fmt: skip
    told = {"window": {k: v for k, v in shown.items() if v is not None}, "answers": dict(sorted(odd.items()))}
    return told | ({"too_few_for": ", ".join(few)} if few else {})


def window_of(trace: Trace) -> Window | None:
    """The window of a trace; None when nothing was answered, or all at one moment."""
    sent = Columns(trace.records)
    good = _Answers.of(sent)
    if not len(good.last):
        return None
    start, end, whole, unsteady = _bounds(trace, sent, good)
    if not end > start:
        start, end, whole = _whole(sent, good)
    if not end > start:
        return None
    known_out, known_in = bool((good.output != NONE).all()), bool((good.input != NONE).all())
    tokens, peak = _tokens(trace, good, start, end, whole=whole) if known_out else (None, None)
    answered = (start <= good.last) & (good.last <= end)
    first = np.nan_to_num(good.first, nan=0.0)
    return Window(
        start_s=start, end_s=end, whole=whole, output_tokens=tokens, unsteady=unsteady,
        input_tokens=int(good.input[(start <= first) & (first <= end)].sum()) if known_in else None,
        answered=int(answered.sum()), open=_mean_open(sent, start, end), peak_tok_s=peak,
    )  # fmt: skip


@dataclass(frozen=True)
class _Answers:
    """The columns of the requests that count: answered, with a last token."""

    start: Floats
    first: Floats
    last: Floats
    input: Floats
    output: Floats
    first_tokens: Floats

    @classmethod
    def of(cls, sent: Columns) -> _Answers:
        counts = sent.ok & ~np.isnan(sent["last_s"])
        names = ("first_s", "last_s", "input_tokens", "output_tokens", "first_event_tokens")
        return cls(sent.start_s[counts], *(sent[name][counts] for name in names))


def _whole(sent: Columns, good: _Answers) -> tuple[float, float, bool]:
    return float(sent.start_s.min()), float(good.last.max()), True


def _bounds(trace: Trace, sent: Columns, good: _Answers) -> tuple[float, float, bool, str]:
    streams = trace.concurrency
    if trace.records[0].scheduled_s is not None:
        if len(good.last) < ARRIVALS:
            return *_whole(sent, good), ""
        order = np.argsort(good.start, kind="stable")
        starts, lasts = good.start[order], good.last[order]
        cut = truncation(lasts - starts)
        end = float(sent.start_s.max())
        return float(starts[cut]), end, False, _unsteady(starts, lasts, cut, end)
    if streams is None or len(sent) < ROUNDS * streams:
        return *_whole(sent, good), ""
    # Each load process has its share of the requests; when the first is through with its own, streams begin to run dry.
    part = sent["index"] % streams % trace.load.get("client", {}).get("workers", 1)
    through = min(float(sent["sent_s"][part == p].max()) for p in np.unique(part))
    return float(sent["sent_s"].min()), through, False, ""


def truncation(values: Sequence[float] | Floats) -> int:
    """How many of the first values belong to the initial transient (MSER-5); at most half of them."""
    n = len(values) // BATCH
    if n < 2:
        return 0
    means = np.asarray(values[: n * BATCH], dtype=float).reshape(n, BATCH).mean(axis=1)
    left = np.arange(n, 0, -1)
    tail = np.cumsum(means[::-1])[::-1] / left
    spread = np.cumsum((means**2)[::-1])[::-1] / left - tail**2
    error = np.maximum(spread, 0.0) / left
    return int(np.argmin(error[: max(1, n // 2)])) * BATCH


def _unsteady(starts: Floats, lasts: Floats, cut: int, end: float) -> str:
    """Whether more requests came than were answered: Little's law compares those open at both ends of the window."""
    if cut >= len(starts) // 2 - BATCH:
        return "latency was still changing half-way through the load"
    latency = (lasts - starts)[cut:]
    arrived, length = len(latency), end - float(starts[cut])
    mean_s = sum(latency.tolist()) / arrived
    behind = arrived - int((lasts[cut:] <= end).sum())
    # In balance about rate x latency are open at the end; three times that, and a twentieth of all, is a growing queue.
    fair = arrived / length * min(mean_s, _median(latency[: max(1, arrived // 4)]))
    if behind > 3 * fair + 3 and behind > 0.05 * arrived:
        return f"{behind} of {arrived} requests were still open at the end, about {fair:.0f} would be with a steady load"
    return ""


def _median(values: Floats) -> float:
    return float(np.sort(values)[len(values) // 2])


def _mean_open(sent: Columns, start: float, end: float) -> float:
    """Mean number of requests between their send and their end."""
    over = np.where(np.isnan(sent["end_s"]), sent["sent_s"], sent["end_s"])
    return float(np.clip(np.minimum(over, end) - np.maximum(sent["sent_s"], start), 0.0, None).sum() / (end - start))


def _tokens(trace: Trace, good: _Answers, start: float, end: float, *, whole: bool) -> tuple[float, float | None]:
    """Output tokens inside the window, by their arrival where that is known, and the most of any second."""
    total = float(good.output.sum())
    if not trace.arrivals.get("ms"):
        return (total if whole else sum(_shares(good, start, end).tolist())), None
    ms, n = np.asarray(trace.arrivals["ms"]), np.asarray(trace.arrivals["n"], dtype=float)
    # Arrivals are known by the millisecond. The last one counts: a stream's next send follows the token it waited for at once.
    first, last = math.floor(start * 1e3), math.floor(end * 1e3)
    inside = (ms >= first) & (ms <= last)
    counted = total if whole else float(n[inside].sum())
    bins = math.ceil((end - start) / PEAK_S)
    if bins < 3:
        return counted, None
    # Bins of equal length that make up the window: then no mean is above the peak.
    place = np.minimum((ms[inside] - first) * bins // (last + 1 - first), bins - 1).astype(int)
    return counted, float(np.bincount(place, weights=n[inside], minlength=bins).max() * bins / (end - start))


def _shares(good: _Answers, start: float, end: float) -> Floats:
    """Tokens of each request inside the window if they came evenly; for records that hold no arrivals."""
    at_first = np.where((start <= good.first) & (good.first <= end), good.first_tokens, 0)
    rest, length = good.output - good.first_tokens, good.last - good.first
    inside = np.maximum(0.0, np.minimum(good.last, end) - np.maximum(good.first, start))
    together = at_first + np.where((start <= good.last) & (good.last <= end), rest, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(length > 0, at_first + rest * inside / length, together)
    return np.where(np.isnan(good.first), 0.0, shares)

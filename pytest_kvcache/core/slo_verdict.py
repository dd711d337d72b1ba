"""What a trace says of a service level: which requests met it, and which of its limits are met, missed or not stated. Pure.

A limit on a percentile is met when the percentile, by inverted CDF over everything sent, is at or below it; a request that failed counts as
infinitely late. Of fewer requests than the limit needs (`core.slo.Limit.needed`) nothing is stated, nor where answers of unknown value
decide. `sure` says beside it whether LoadGen's own rule (inference_policies, early stopping) would pass the run: were the percentile beyond
the limit and requests independent, 1 % of runs at most would have so few requests over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .metrics import METRICS, MIN_KNOWN, good, quantile, token_gaps
from .record import OK, RequestRecord, Trace
from .samples import least_under
from .slo import CADENCES, ERRORS, GOODPUT, SHARES, Level, Limit
from .slo_search import MET, NOT_MET, NOT_STATED

if TYPE_CHECKING:
    from .window import Window


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Of `sent` requests `good` met every latency limit, of `unknown` more that cannot be told (as they may count tokens in no way known).
    `req_s` is the good ones whose last token came inside the window, a second of it; None without a window."""

    sent: int
    good: int
    unknown: int
    req_s: float | None

    @property
    def share(self) -> float | None:
        """`goodput_share`: good of all sent; what is unknown is not good."""
        return self.good / self.sent if self.sent else None


@dataclass(frozen=True, kw_only=True)
class LimitVerdict:
    """One limit on one trace. `value` is the percentile (infinite where it falls among failed requests) or the share, None where there is
    none; `over` the requests beyond a latency's limit, failed ones among them (None of itl_ms, whose values are tokens)."""

    limit: Limit
    state: str
    value: float | None
    requests: int
    over: int | None = None
    sure: bool | None = None
    reason: str = ""

    def __str__(self) -> str:
        unit = "" if self.limit.metric in SHARES else " ms"
        found = "" if self.value is None else ": failed requests" if math.isinf(self.value) else f": {self.value:.4g}{unit}"
        return f"{self.limit}{unit}{found}, {self.state}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class LevelVerdict:
    """A level on one trace: NOT_MET where a limit is not met, else NOT_STATED where one is not stated or the load was not steady (how, says
    `unsteady`: a queue that grows breaks every limit in the end), else MET."""

    level: Level
    limits: tuple[LimitVerdict, ...]
    goodput: Goodput
    unsteady: str = ""

    @property
    def state(self) -> str:
        states = {verdict.state for verdict in self.limits} | ({NOT_STATED} if self.unsteady else set())
        return next(state for state in (NOT_MET, NOT_STATED, MET) if state in states)

    def __str__(self) -> str:
        """One line: what decided."""
        decided = [str(v) for v in self.limits if v.state == self.state]
        if self.state == NOT_STATED and self.unsteady:
            decided.append(self.unsteady)
        return f"{self.level.name}: {self.state}: {'; '.join(decided)}"

    def plain(self) -> dict[str, Any]:
        """JSON-plain; an infinite value is null with `over` telling why."""
        rows = [
            {"limit": str(v.limit), "state": v.state, "value": None if v.value == math.inf else v.value, "requests": v.requests,
             "needed": v.limit.needed, "over": v.over, "sure": v.sure, "reason": v.reason} for v in self.limits
        ]  # fmt: skip
        figures = {"goodput_share": self.goodput.share, "goodput_req_s": self.goodput.req_s, "unknown": self.goodput.unknown}
        return {"level": self.level.name, "state": self.state, "unsteady": self.unsteady, "limits": rows, **figures}


def meets(level: Level, record: RequestRecord) -> bool | None:
    """Whether a request met every latency limit of a level at its own value; None where that cannot be told. A failed one met none.

    A record has no gaps of single tokens: itl_ms is held against their mean, tpot_ms, so that goodput is never below its true figure. An
    answer whose tokens all came in one event has no cadence and breaks no limit of it.
    """
    if record.outcome != OK:
        return False
    told: bool | None = True
    for metric, limit in level.per_request.items():
        value = _value(metric, record)
        if value is None:
            told = told if metric in CADENCES and _at_once(record) else None
        elif value > limit:
            return False
    return told


def goodput(level: Level, trace: Trace, window: Window | None = None) -> Goodput:
    """The requests of a trace that met every latency limit; `window` is `core.window.window_of(trace)`."""
    told = [meets(level, r) for r in trace.records]
    rate = None
    if window is not None and window.seconds > 0:
        ends = [r.last_s for t, r in zip(told, trace.records, strict=True) if t and r.last_s is not None]
        rate = sum(window.start_s <= end <= window.end_s for end in ends) / window.seconds
    return Goodput(sent=len(told), good=told.count(True), unknown=told.count(None), req_s=rate)


def judge(level: Level, trace: Trace, window: Window | None = None) -> LevelVerdict:
    """Every limit of a level on a trace that is valid otherwise; `window` is `core.window.window_of(trace)`, where the caller has it."""
    from .window import window_of

    window = window or window_of(trace)
    found = goodput(level, trace, window)
    limits = tuple(_share(limit, trace, found) if limit.metric in SHARES else _latency(limit, trace) for limit in level.limits)
    return LevelVerdict(level=level, limits=limits, goodput=found, unsteady=window.unsteady if window else "")


def _share(limit: Limit, trace: Trace, found: Goodput) -> LimitVerdict:
    failed = found.sent - len(good(trace))
    state, value = NOT_STATED, found.share if limit.metric == GOODPUT else failed / found.sent if found.sent else None
    reason = _too_few(limit, found.sent)
    if not reason and limit.metric == ERRORS:
        state = MET if failed <= limit.limit * found.sent + 1e-9 else NOT_MET
    elif not reason:
        least = limit.limit * found.sent - 1e-9
        state = MET if found.good >= least else NOT_MET if found.good + found.unknown < least else NOT_STATED
        reason = f"of {found.unknown} of {found.sent} requests it cannot be told" if state == NOT_STATED else ""
    return LimitVerdict(limit=limit, state=state, value=value, requests=found.sent, reason=reason)


def _latency(limit: Limit, trace: Trace) -> LimitVerdict:
    answers = good(trace)
    failed = len(trace.records) - len(answers)
    if limit.metric in CADENCES:
        answers = tuple(r for r in answers if not _at_once(r))
    n = len(answers) + failed
    if limit.metric == "itl_ms":
        state, value, unknown = _of_tokens(limit, trace)
        over = sure = None
    else:
        values = sorted(v for r in answers if (v := _value(limit.metric, r)) is not None)
        state, value = _of_requests(limit, values, hidden := len(answers) - len(values), failed)
        unknown = f"{limit.metric} of only {len(values)} of {len(answers)} answers is known"
        over = failed + sum(v > limit.limit for v in values)
        sure = least_under(over + hidden, limit.q) + over + hidden <= n
    if few := _too_few(limit, n):
        state, sure = NOT_STATED, None
    return LimitVerdict(
        limit=limit, state=state, value=value, requests=n, over=over, sure=sure, reason=few or (unknown if state == NOT_STATED else "")
    )


def _of_requests(limit: Limit, values: list[float], hidden: int, failed: int) -> tuple[str, float | None]:
    """What the percentile of ascending values is and says: the same wherever the `hidden` ones lie, or nothing."""
    value = quantile(values, None, limit.q, failed)
    worst = quantile(values, None, limit.q, failed + hidden)
    best = quantile([0.0] * hidden + values, None, limit.q, failed)
    if worst is not None and worst <= limit.limit:
        return MET, value
    return (NOT_MET if best is not None and best > limit.limit else NOT_STATED), value


def _of_tokens(limit: Limit, trace: Trace) -> tuple[str, float | None, str]:
    """The same of gaps, those of failed requests at infinity, and why nothing can be said. (Requests are what is counted elsewhere: the
    tokens of one are not independent.)"""
    gaps, counts = token_gaps(trace) or ((), ())
    lost = sum(max(0, trace.asked(r.index)[1] - 1) for r in trace.records if r.outcome != OK)
    value = quantile(gaps, counts, limit.q, lost)
    if not gaps and len(good(trace)):
        return NOT_STATED, None, f"{limit.metric} of fewer than {MIN_KNOWN:.0%} of the tokens is known"
    return MET if value is not None and value <= limit.limit else NOT_MET, value, ""


def _too_few(limit: Limit, n: int) -> str:
    return f"{n} requests, {limit.needed} are needed" if n < limit.needed else ""


def _value(metric: str, record: RequestRecord) -> float | None:
    sample = METRICS["tpot_ms" if metric == "itl_ms" else metric].sample
    return sample(record) if sample else None


def _at_once(record: RequestRecord) -> bool:
    """Whether no token came after the first event."""
    return record.output_tokens is not None and record.output_tokens - record.first_event_tokens < 1

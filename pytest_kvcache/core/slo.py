"""Service levels: limits, and the load under which they are to hold. Pure.

A limit on a percentile is stated from as many requests on as MLPerf LoadGen asks for (`core.samples.least_queries`: 662 for a P99). What a
trace says of a level is `core.slo_verdict`, the highest rate that meets one `core.slo_search`, the file that holds them `core.slo_file`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .lengths import Length, longest
from .samples import least_queries
from .scenarios import ClosedLoop, OpenLoop, Traffic
from .slo_search import Search, number
from .spec import SpecError

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
ERRORS, GOODPUT = "error_share", "goodput_share"
SHARES = (ERRORS, GOODPUT)
CADENCES = ("tpot_ms", "itl_ms")  # an answer of one token has none
MOST = 99.999  # a percentile beyond it takes more than a million requests


@dataclass(frozen=True, kw_only=True)
class Limit:
    """`percentile` (99: P99) of a latency is at most `limit` ms; or, of all requests sent, the share that failed (`error_share`) is at most
    `limit`, the share that met every latency limit (`goodput_share`) at least (0.01 is 1 %)."""

    metric: str
    limit: float
    percentile: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in (*LATENCIES, *SHARES):
            raise SpecError(f"metric {self.metric!r} is none of {', '.join((*LATENCIES, *SHARES))}")
        if self.metric in SHARES:
            if self.percentile is not None:
                raise SpecError(f"{self.metric} is one share of all requests and has no percentile: take that away")
            if not number(self.limit) or not (0 < self.limit <= 1 if self.metric == GOODPUT else 0 <= self.limit < 1):
                usual = "at least 95 %: limit = 0.95" if self.metric == GOODPUT else "at most 1 %: limit = 0.01"
                raise SpecError(f"{self.metric}: limit={self.limit!r} must be a share of all requests ({usual})")
            return
        if not (number(self.limit) and 0 < self.limit < math.inf):
            raise SpecError(f"{self.metric}: limit={self.limit!r} must be milliseconds above 0")
        if self.percentile is None or not (number(self.percentile) and 0 < self.percentile <= MOST):
            raise SpecError(f"{self.metric}: percentile={self.percentile!r} must lie above 0 and be {MOST} at most: write percentile = 99")

    @property
    def q(self) -> float:
        """The quantile; of a share the one that it is equivalent to: 1 % of errors at most is a P99 of failing that does not fail."""
        if self.metric == ERRORS:
            return round(1 - self.limit, 12)
        return self.limit if self.percentile is None else round(self.percentile / 100, 12)

    @property
    def needed(self) -> int:
        """The fewest requests that state it; 1 where none may break it, which no number of requests states of those to come."""
        return least_queries(self.q) if self.q < 1 else 1

    def __str__(self) -> str:
        if self.metric in SHARES:
            return f"{self.metric} {'>=' if self.metric == GOODPUT else '<='} {self.limit:g}"
        return f"P{self.percentile:g} {self.metric} <= {self.limit:g}"


@dataclass(frozen=True, kw_only=True)
class Level:
    """Limits and the load under which they are to hold: `rate` (requests a second, arriving by `arrivals` as in OpenLoop), `concurrency`
    (clients), or `search` for the highest rate that meets them; exactly one of the three. `isl` and `osl` as in a scenario. `requests` is
    the number in a run; None: as many as the limits need, and no less than the scenario's own default."""

    name: str
    limits: tuple[Limit, ...]
    isl: Length
    osl: Length
    rate: float | None = None
    concurrency: int | None = None
    search: Search | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    requests: int | None = None

    def __post_init__(self) -> None:
        if problem := self._limits_problem() or self._load_problem():
            raise SpecError(problem)
        self.scenario()  # says what is wrong with the lengths, the rate, the clients, the number of requests
        if longest(self.osl) < 2 and (none := [m for m in CADENCES if m in self.per_request]):
            raise SpecError(f"an answer of one token has no {none[0]}: raise osl or take that limit away")
        if self.search and self.requests is not None and self.requests < self.needed:
            raise SpecError(f"requests={self.requests} state nothing of any rate, the limits need {self.needed}: raise requests")

    def _limits_problem(self) -> str:
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "_.-") for c in self.name):
            return f"name={self.name!r} may hold letters, digits, '_', '.' and '-' only; it is part of every key"
        if not self.limits:
            return 'there are no limits: write limits = [{metric = "ttft_ms", percentile = 99, limit = 500}]'
        kinds = [(limit.metric, limit.percentile) for limit in self.limits]
        if twice := [str(limit) for limit, kind in zip(self.limits, kinds, strict=True) if kinds.count(kind) > 1]:
            return f"two limits are of one kind, {twice[0]} and {twice[1]}: keep one"
        if not self.per_request and any(limit.metric == GOODPUT for limit in self.limits):
            return f"{GOODPUT} counts the requests within the latency limits and there is none: add one, or limit {ERRORS}"
        return ""

    def _load_problem(self) -> str:
        if sum(load is not None for load in (self.rate, self.concurrency, self.search)) != 1:
            return "one load is needed: rate (requests a second), concurrency (clients), or search (bounds of a rate)"
        if self.concurrency is not None and (self.arrivals, self.burstiness) != ("poisson", 1.0):
            return "the clients of a concurrency do not arrive: take arrivals and burstiness away"
        return ""

    @property
    def needed(self) -> int:
        """The fewest requests of a run that state every limit."""
        return max(limit.needed for limit in self.limits)

    @property
    def per_request(self) -> dict[str, float]:
        """The limit of each latency that a single request is held to: that of its highest percentile. (A P50 beside a P99 is no limit of a
        request: half of them may lie above it.)"""
        ordered = sorted((limit for limit in self.limits if limit.percentile is not None), key=lambda limit: limit.percentile or 0)
        return {limit.metric: limit.limit for limit in ordered}

    def scenario(self, rate: float | None = None) -> Traffic:
        """The load as a scenario; at `rate` requests a second where the level is a search (default: its lowest)."""
        sizes: dict[str, Any] = {"isl": self.isl, "osl": self.osl, "requests": self.requests}
        loop: Traffic
        if self.concurrency is not None:
            loop = ClosedLoop(**sizes, concurrency=self.concurrency)
        else:
            asked: Any = self.rate if self.search is None else self.search.low if rate is None else rate
            loop = OpenLoop(**sizes, rate=asked, arrivals=self.arrivals, burstiness=self.burstiness)
        return loop if self.requests is not None or loop.n_requests >= self.needed else replace(loop, requests=self.needed)

"""A case of kind `load` on the product: its requests become records, a trace is measured and judged, the figures compared.

Where our rule differs from the case's (docs/client.md), our rule is checked and the case's figure derived from the
product's samples: quantiles are observed values with failures at infinity, the cases take the midpoint of the successes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pytest_kvcache.core.metrics import METRICS, QUANTILES, good, measure, percentile, too_few
from pytest_kvcache.core.record import OK, RequestRecord, Trace
from pytest_kvcache.core.validity import cache_problem, client_problem, hit_rate, requests_problem

from .catalogue import Close, Test, includes
from .load_records import LISTS, attempts, records_of, samples_metric

POLICIES = {"max_failure_rate", "warmup_requests", "expect_cold_prompts", "max_hit_rate", "allow_preemptions", "max_preemptions"}
RATES = {
    "output_tokens_per_s": "output_tok_s", "output_tok_s": "output_tok_s", "output_throughput": "output_tok_s",
    "requests_per_s": "req_s", "req_s": "req_s", "request_throughput": "req_s",
}  # fmt: skip
_STATISTIC = re.compile(
    r"(mean|median|min|max|p\d+)(?:_(ttft|ttfa|tpot|e2e|from_schedule|from_send|latency))?(?:_ms)?(?:_(linear|nearest_rank|must_not_exceed))?"
)
_SAMPLES = re.compile(r"(ttft|tpot|e2e)(?:_(from_schedule|from_send))?_ms")


@dataclass(frozen=True)
class Facts:
    """A case as the product sees it: the trace without its warm-up, and what its validity rules say."""

    case: Mapping[str, Any]

    @property
    def policy(self) -> Mapping[str, Any]:
        return self.case.get("policy", {})

    @cached_property
    def sent(self) -> tuple[RequestRecord, ...]:
        return records_of(self.case)

    @cached_property
    def trace(self) -> Trace:
        """Warm-up is sent and waited for before the load, so its requests are in no trace."""
        flagged = [r.get("warmup") for r in self.case.get("requests", ())] or [None] * len(self.sent)
        records = tuple(r for r, warm in zip(self.sent, flagged, strict=True) if not warm)[self.policy.get("warmup_requests", 0) :]
        osl = max((r.output_tokens or 0 for r in records), default=1)
        return Trace(scenario=self.case["case"], arm="base", run=1, workload="w", isl=1, osl=osl, records=records)

    @property
    def failed(self) -> int:
        return len(self.trace.records) - len(good(self.trace))

    @cached_property
    def problems(self) -> dict[str, str]:
        """What the product holds against the run, by the cases' names for it."""
        found = {"failure_rate": self._failures(), "client_backlog": client_problem(self.trace), **self._counters()}
        return {name: words for name, words in found.items() if words}

    def _failures(self) -> str | None:
        if not {"requests", *LISTS} & set(self.case):
            return None
        label = tuple(replace(r, output_tokens=self.trace.osl) if r.outcome == OK else r for r in self.trace.records)
        allowed = math.floor(self.policy.get("max_failure_rate", 0.0) * len(label) + 1e-9)
        return requests_problem(replace(self.trace, records=label), allowed_failures=allowed)

    def counters(self) -> tuple[dict[str, float], dict[str, float]]:
        def ours(name: str) -> str:
            return next(
                (to for part, to in (("preempt", "preemptions"), ("quer", "prefix_queries"), ("hit", "prefix_hits")) if part in name), name
            )

        return tuple({ours(k): v for k, v in self.case.get(side, {}).items() if v is not None} for side in ("before", "after"))

    def _counters(self) -> dict[str, str | None]:
        before, after = self.counters()
        policy = self.policy
        limit = {"max_hit_rate": policy["max_hit_rate"]} if "max_hit_rate" in policy else {}
        cold = policy.get("expect_cold_prompts", True)
        grown = grown_by(before, after, "preemptions") or 0
        allowed = bool(policy.get("allow_preemptions", grown <= policy.get("max_preemptions", 0)))

        def of(*names: str) -> str | None:
            mine = [{k: v for k, v in side.items() if k in names} for side in (before, after)]
            return cache_problem(*mine, cold=cold, preempted=allowed, **limit)

        return {"prefix_cache_hits": of("prefix_queries", "prefix_hits"), "preempted": of("preemptions")}


def grown_by(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """How far a counter went up; None where it is not there or fell."""
    if name not in before or name not in after or after[name] < before[name]:
        return None
    return after[name] - before[name]


def figures(case: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `expected` that are known here, as the product has them."""
    unknown = set(case.get("policy", {})) - POLICIES
    assert not unknown, f"this runner does not know the policy {sorted(unknown)}"
    facts = Facts(case)
    found = {key: of(facts, key) for key in case["expected"] if (of := _figure(key))}
    return found | {"warnings": warnings(facts)}


def _figure(key: str) -> Callable[[Facts, str], Any] | None:
    if key in COUNTS:
        return COUNTS[key]
    if key in RATES:
        return lambda facts, key: measure(facts.trace).get(RATES[key])
    if _SAMPLES.fullmatch(key):
        return listed
    return statistic if _STATISTIC.fullmatch(key) else None


COUNTS: dict[str, Callable[[Facts, str], Any]] = {
    **dict.fromkeys(("successes", "ok", "completed"), lambda f, _: len(good(f.trace))),
    **dict.fromkeys(("failures", "errors", "failed"), lambda f, _: f.failed),
    **dict.fromkeys(("failure_rate", "error_rate"), lambda f, _: f.failed / len(f.trace.records) if f.trace.records else None),
    **dict.fromkeys(("requests", "total", "samples", "n", "included"), lambda f, _: len(f.trace.records)),
    **dict.fromkeys(
        ("errors_by_class", "failures_by_class"), lambda f, _: dict(Counter(r.outcome for r in f.trace.records if r.outcome != OK))
    ),
    **dict.fromkeys(("retried", "retries"), lambda f, _: sum(attempts(r) - 1 for r in f.case.get("requests", ()))),
    "output_tokens": lambda f, _: sum(r.output_tokens or 0 for r in good(f.trace)),
    "excluded": lambda f, _: len(f.sent) - len(f.trace.records),
    "hit_rate": lambda f, _: hit_rate(*f.counters()),
    "preemptions": lambda f, _: grown_by(*f.counters(), "preemptions"),
    "verdict": lambda f, _: verdicts(f),
    "verdict_reason": lambda f, _: set(f.problems),
}


def verdicts(facts: Facts) -> set[str]:
    """What the product's judgement is called in the cases: a run that does not count is `invalid`, and `invalid` fails the test."""
    if set(facts.problems) & {"client_backlog", "prefix_cache_hits", "preempted"}:
        return {"invalid"}
    return {"fail", "invalid"} | ({"error"} if not good(facts.trace) else set()) if facts.problems else {"pass"}


def warnings(facts: Facts) -> set[str]:
    """The problems, and what is only noted. Nothing is ever retried (`core.load.Load`): a request that was is the case's own doing."""
    found = set(facts.problems) - {"failure_rate"}
    if any(attempts(r) > 1 for r in facts.case.get("requests", ())):
        found.add("retried")
    asked = {key.split("_")[0] for key in facts.case["expected"]} & set(QUANTILES)
    if any(too_few(q, len(facts.trace.records)) for q in asked):
        found.add("too_few_samples")
    return found


def _samples(trace: Trace, what: str | None, case: Mapping[str, Any]) -> tuple[str, list[float | None]]:
    """The product's sample of each request, None where it has none; failures have none."""
    metric = {"latency": "e2e_ms", "from_schedule": "ttft_ms", "from_send": "ttft_ms", None: samples_metric(case)}.get(what, f"{what}_ms")
    records = [replace(r, scheduled_s=None) for r in trace.records] if what == "from_send" else trace.records
    sample = METRICS[metric].sample
    assert sample is not None
    return metric, [sample(r) if r.outcome == OK else None for r in records]


def listed(facts: Facts, key: str) -> list[list[float | None]]:
    """The samples: those of the successes, and one of each request."""
    match = _SAMPLES.fullmatch(key)
    assert match
    each = _samples(facts.trace, match[2] or match[1], facts.case)[1]
    return [[v for v in each if v is not None], each]


def statistic(facts: Facts, key: str) -> Any:
    match = _STATISTIC.fullmatch(key)
    assert match
    name, what, rule = match.groups()
    metric, each = _samples(facts.trace, what, facts.case)
    values = [v for v in each if v is not None]
    if not values:
        return None
    if name in ("mean", "min", "max"):
        return {"mean": statistics.fmean, "min": min, "max": max}[name](values)
    quantile = "p50" if name == "median" else name
    q = int(quantile[1:]) / 100
    ours = percentile(values, q, failed=facts.failed)
    assert ours == _nearest_rank(values, q, facts.failed), f"{quantile}: our rule is another than documented"
    if quantile in QUANTILES and what != "from_send":
        assert measure(facts.trace).get(f"{metric}.{quantile}") == (ours if ours and math.isfinite(ours) else None)
    # Of the successes alone, as the cases have it.
    return percentile(values, q) if rule in ("nearest_rank", "must_not_exceed") else _linear(values, q)


def _nearest_rank(values: list[float], q: float, failed: int) -> float:
    """The smallest observed value that at least the share q of all is not above."""
    ranked = sorted([*values, *[math.inf] * failed])
    return next(v for v in ranked if sum(other <= v for other in ranked) >= q * len(ranked) - 1e-9)


def _linear(values: list[float], q: float) -> float:
    ranked, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    return ranked[low] + (at - low) * (ranked[min(low + 1, len(ranked) - 1)] - ranked[low])


_close = Close(0.1)
_LISTS = [f"{name}{of}_ms" for name in ("ttft", "tpot", "e2e") for of in ("", "_from_schedule", "_from_send")]
TESTS: dict[str, Test] = {
    "warnings": includes,
    "verdict": lambda found, wanted: wanted in found,
    "verdict_reason": lambda found, wanted: wanted in found,
    **{f"p{n}_must_not_exceed": lambda found, wanted: found is not None and found <= wanted for n in (50, 90, 95, 99)},
    **{key: lambda found, wanted: any(_close("_ms", f, wanted) for f in found) for key in _LISTS},
}

"""The requests or samples of a `load` case as records of the product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvcache.core.record import OK, RequestRecord

LISTS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2e_ms": "e2e_ms", "latency_ms": "e2e_ms", "samples_ms": "ttft_ms"}
TIMES = {"scheduled_ms", "sent_ms", "first_token_ms", "first_answer_ms", "last_token_ms", "ended_ms"}
REQUEST = TIMES | {
    "output_tokens", "input_tokens", "prompt_tokens", "outcome", "error_class", "http_status", "attempts", "retries", "first_event_tokens",
    "events", "warmup", "id", "index", "note",
}  # fmt: skip


def records_of(case: Mapping[str, Any]) -> tuple[RequestRecord, ...]:
    """One record a request, in the order sent; of sample lists one a position."""
    if "requests" in case:
        return tuple(_record(i, r) for i, r in enumerate(case["requests"]))
    lists = {LISTS[name]: values for name, values in case.items() if name in LISTS}
    rows = zip(*lists.values(), strict=True)
    return tuple(_sampled(i, dict(zip(lists, row, strict=True))) for i, row in enumerate(rows))


def samples_metric(case: Mapping[str, Any]) -> str:
    """The metric that a figure without a name is of."""
    return next((LISTS[name] for name in case if name in LISTS), "ttft_ms")


def attempts(request: Mapping[str, Any]) -> int:
    """How often a request was sent."""
    tries = request.get("attempts", 1)
    return len(tries) if isinstance(tries, list) else max(tries, 1 + request.get("retries", 0))


def _record(index: int, request: Mapping[str, Any]) -> RequestRecord:
    unknown = set(request) - REQUEST
    assert not unknown, f"this runner does not know the fields {sorted(unknown)} of a request"
    tries = request["attempts"] if isinstance(request.get("attempts"), list) else []
    for last in tries[-1:]:  # the whole runs from the first attempt to the end of the last
        request = {**last, **request, "sent_ms": request.get("sent_ms", tries[0].get("sent_ms"))}

    def seconds(name: str) -> float | None:
        return None if request.get(name) is None else request[name] / 1e3

    good = request.get("outcome", "ok") == "ok" and not request.get("error_class")
    scheduled, sent, tokens = seconds("scheduled_ms"), seconds("sent_ms"), request.get("output_tokens")
    return RequestRecord(
        index=index, sent_s=(scheduled or 0.0) if sent is None else sent, scheduled_s=scheduled, first_s=seconds("first_token_ms"),
        answer_s=seconds("first_answer_ms"), last_s=seconds("last_token_ms"), end_s=seconds("ended_ms") or seconds("last_token_ms"), input_tokens=1,
        output_tokens=tokens, first_event_tokens=request.get("first_event_tokens", 1), events=request.get("events", tokens or 0),
        status=request.get("http_status"), outcome=OK if good else request.get("error_class") or "stream_error", error="" if good else "failed",
    )  # fmt: skip


def _sampled(index: int, row: Mapping[str, float | None]) -> RequestRecord:
    """A record with these figures; a missing sample is a request that failed."""
    if None in [v for name, v in row.items() if name != "tpot_ms"]:
        return RequestRecord(index=index, sent_s=0.0, end_s=0.0, outcome="stream_error", error="no sample")
    ttft, tpot = row.get("ttft_ms", row.get("e2e_ms", 0.0)), row.get("tpot_ms")
    last = row.get("e2e_ms", ttft + (tpot or 0.0))
    # No cadence is an answer of one token, not a failure.
    tokens = 1 if tpot is None else 1 + round((last - ttft) / tpot) if tpot else 2
    return RequestRecord(
        index=index, sent_s=0.0, first_s=ttft / 1e3, answer_s=ttft / 1e3, last_s=last / 1e3, end_s=last / 1e3, input_tokens=1, output_tokens=tokens,
        events=tokens,
    )  # fmt: skip

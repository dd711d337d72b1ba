"""A case of kind `sse` on the product: its exchange on a virtual clock, and what the product makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pytest_kvcache.core.answer import Answer, Asked, read_exchange
from pytest_kvcache.core.load import Load
from pytest_kvcache.core.metrics import METRICS, good, measure, percentile
from pytest_kvcache.core.record import OK, RequestRecord, Trace
from pytest_kvcache.core.sse import ends_with_done
from pytest_kvcache.harness.digest import Digest
from pytest_kvcache.harness.incoming import Done

from .catalogue import Test, body, contains, includes

MS = 1_000_000
IDLE_MS = 120_000
TIMES = {
    "ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms", "last_token_ms", "event_gaps_ms", "itl_ms", "mean_itl_ms", "completes_before_ms",
}  # fmt: skip
# A record keeps counts, times and notes of an answer, not its text: these are compared on the virtual clock alone.
NOT_IN_A_RECORD = {"text", "reasoning_text", "finish_reason", "tokens_per_event", "event_gaps_ms"}


@dataclass(frozen=True)
class Play:
    """What the server of a case does: its head and its writes at their moments after the request (ms), and the end."""

    head: bytes
    writes: tuple[tuple[float, bytes], ...]
    how: str
    end_ms: float | None
    idle_ms: float

    @property
    def stall_ms(self) -> float:
        """When a client with this idle limit gives up."""
        return (self.writes[-1][0] if self.writes else 0.0) + self.idle_ms


def play_of(case: Mapping[str, Any]) -> Play:
    data, at, writes = body(case), 0, []
    for write in case["schedule"]:
        writes.append((write["at_ms"], data[at : at + write["bytes"]]))
        at += write["bytes"]
    assert at == len(data), "the schedule is the whole file"
    end = case["end"]
    idle = case["request"].get("idle_timeout_ms") or IDLE_MS
    return Play(head=_head(case, "connection: close"), writes=tuple(writes), how=end["how"], end_ms=end.get("at_ms"), idle_ms=idle)


def chunked(case: Mapping[str, Any], play: Play) -> Play:
    """The same answer in chunks on a connection that is kept: each write is one, the clean end is the last."""
    head = _head(case, "connection: keep-alive", "transfer-encoding: chunked")
    writes = [(at, b"%x\r\n%b\r\n" % (len(data), data)) for at, data in play.writes if data]
    last = play.end_ms if play.end_ms is not None else play.writes[-1][0]
    return replace(play, head=head, writes=(*writes, (last, b"0\r\n\r\n")), how="hold_open")


def _head(case: Mapping[str, Any], *more: str) -> bytes:
    http = case["http"]
    lines = [f"HTTP/1.1 {http['status']} X", *(f"{k}: {v}" for k, v in http["headers"].items()), *more]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def load_of(case: Mapping[str, Any]) -> Load:
    """The one request of a case as a load."""
    asked = case["request"]
    idle = asked.get("idle_timeout_ms") or IDLE_MS
    return Load(
        bodies=(b"{}",),
        osl=(asked["max_tokens"],),
        concurrency=1,
        ignore_eos=bool(asked.get("ignore_eos")),
        idle_timeout_s=idle / 1000,
        first_timeout_s=idle / 1000,
    )


@dataclass(frozen=True)
class Outcome:
    """What the product says of the one request: its record and the counts that go into the trace; its text where kept."""

    record: RequestRecord
    itl: dict[str, list[Any]]
    arrivals: dict[str, list[Any]]
    answer: Answer | None = None


def on_a_virtual_clock(case: Mapping[str, Any]) -> Outcome:
    """The exchange as the client's wire would have kept it if every write were one read at its moment, then digested."""
    play, load = play_of(case), load_of(case)
    reads = [play.head, *(data for _, data in play.writes)]
    stamps = [0, *(round(at * MS) for at, _ in play.writes)]
    done = Done(0, 0, 0, 0, stamps[-1], _end(play), reads, stamps)
    digest = Digest(load, (0,))
    digest(done)
    (row,) = digest.rows
    raw, ends = done.raw()
    asked = Asked(osl=load.osl[0], ignore_eos=load.ignore_eos)
    answer = read_exchange(raw, ends, stamps, done.end, asked, keep_text=True)
    return Outcome(record=RequestRecord(*row), **digest.counts(), answer=answer)


def _end(play: Play) -> str:
    """How the wire would say that it ended."""
    if play.how in ("close", "reset"):
        return play.how
    if play.how == "hold_open" and ends_with_done(b"".join(data for _, data in play.writes)[-64:]):
        return "complete"
    return f"stall: nothing for {play.idle_ms / 1000:g} s after {sum(len(d) for _, d in play.writes)} bytes"


def figures(case: Mapping[str, Any], seen: Outcome) -> dict[str, Any]:
    """Everything that `expected` of a case may name, in its words, as the product says it."""
    record, answer = seen.record, seen.answer
    trace = _trace(case, seen, record)
    counted = good(trace)
    found: dict[str, Any] = {
        "outcome": "ok" if record.outcome == OK else "error",
        "error_class": None if record.outcome == OK else record.outcome,
        "counts_in_metrics": counts_in_metrics(trace),
        "output_tokens": record.output_tokens,
        "output_tokens_source": "usage" if record.output_tokens is not None else None,
        "prompt_tokens": record.input_tokens,
        "partial_events": record.events,
        "token_events": record.events,
        "events": record.events,
        "first_event_tokens": record.first_event_tokens,
        "got_tokens": record.output_tokens,
        "asked_tokens": record.error,
        "http_status": record.status,
        "error_message_contains": record.error,
        "error_code": record.error,
        "body_kept_contains": record.error,
        "warnings": record.notes,
        "completes_before_ms": None if record.end_s is None else (record.end_s - record.sent_s) * 1e3,
        "itl_ms": itl_ms(trace),
    }
    found["mean_itl_ms"] = _mean(found["itl_ms"])
    for name in ("ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms"):
        (found[name],) = (METRICS[name].sample(r) for r in counted) if counted else (None,)
    found["last_token_ms"] = found["e2e_ms"]
    return found if answer is None else found | _of_answer(answer)


def _of_answer(answer: Answer) -> dict[str, Any]:
    gaps = answer.gaps()
    return {
        "text": answer.text,
        "reasoning_text": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "tokens_per_event": None if answer.tokens is None else list(answer.tokens),
        "event_gaps_ms": [(b - a) / MS for a, b in pairwise(answer.times)],
        # In the order in which they came; the trace only counts them.
        "itl_ms": None if gaps is None or answer.outcome != OK else [gap / n / MS for gap, n in gaps for _ in range(n)],
    }


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def itl_ms(trace: Trace) -> list[float] | None:
    """The gaps per token that a trace counts, ascending; None where the tokens of some event are unknown."""
    us, n = trace.itl.get("us", ()), trace.itl.get("n", ())
    wanted = sum((r.output_tokens or 0) - r.first_event_tokens for r in good(trace))
    return [gap / 1e3 for gap, times in zip(us, n, strict=True) for _ in range(times)] if good(trace) and sum(n) == wanted else None


def _trace(case: Mapping[str, Any], seen: Outcome, *records: RequestRecord) -> Trace:
    osl = case["request"]["max_tokens"]
    return Trace(
        scenario=case["case"], arm="base", run=1, workload="w", isl=1, osl=osl, records=records, itl=seen.itl, arrivals=seen.arrivals
    )


def counts_in_metrics(trace: Trace) -> bool | str:
    """Whether a request is in the figures (True) or in none of them but the share that failed (False); else in what it is amiss.

    It is measured alone, and beside another request that took a second for 11 tokens.
    """
    (record,) = trace.records
    long = max(1.0, 2 * ((record.last_s or 0.0) - record.sent_s))
    other = RequestRecord(
        index=1, sent_s=record.sent_s, first_s=record.sent_s + 0.5, last_s=record.sent_s + long, input_tokens=1, output_tokens=11
    )
    bare = replace(trace, itl={}, arrivals={})
    alone, companion, both = (measure(replace(bare, records=r)) for r in ((record,), (other,), (record, other)))
    if record.outcome == OK:
        known = record.output_tokens is not None
        added = "ttft_ms.p50" in alone and both["req_s"] > companion["req_s"] and known == ("output_tok_s" in both)
        return True if added else f"an answer that is in no figure: {alone}"
    infinite = percentile([500.0], 0.99, failed=1) == math.inf and "ttft_ms.p99" not in both
    throughput = all(both[name] == companion[name] for name in ("output_tok_s", "req_s"))
    return False if not alone and infinite and throughput else f"a failure in the figures: {alone}, {both} instead of {companion}"


def _before(found: float | None, limit: float) -> bool:
    return found is not None and found < limit


def _source(found: Any, wanted: Any) -> bool:
    """Counts are the server's; where a case would take the client's tokenizer we have none (see docs/client.md)."""
    return found == wanted or (wanted == "tokenizer" and found is None)


TESTS: dict[str, Test] = {
    "warnings": includes,
    "error_message_contains": contains,
    "error_code": contains,
    "body_kept_contains": contains,
    "asked_tokens": contains,
    "completes_before_ms": _before,
    "output_tokens_source": _source,
}

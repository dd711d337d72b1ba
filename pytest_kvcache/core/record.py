"""What was seen: requests, runs of a scenario. Plain values, so that they cross processes and files as they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

OK = "ok"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds on the run's own monotonic clock; a time that never came is None.

    `scheduled_s` when an open loop meant to send it · `sent_s` sent on an open connection · `connect_s` of the time before
    that, what opening a connection took (0 where one was open) · `first_s`/`last_s` first and last token event ·
    `answer_s` first token of answer text, after any reasoning · `end_s` stream closed · `input_tokens`/`output_tokens` from
    the server's usage · `first_event_tokens` tokens of the first event (1 unless continuous usage says otherwise) ·
    `events` token events seen · `status` HTTP status, if one came · `outcome` `ok` or a class of failure, `error` its first
    words · `notes` what is odd about an answer that counts (see `core.answer`).
    """

    index: int
    sent_s: float
    scheduled_s: float | None = None
    connect_s: float = 0.0
    first_s: float | None = None
    answer_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    first_event_tokens: int = 1
    events: int = 0
    status: int | None = None
    outcome: str = OK
    error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def start_s(self) -> float:
        """Where every latency begins: the scheduled moment of an open loop, else the moment of sending."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s


TRACE_NAMES = ("scenario", "arm", "run", "workload")  # what of a Trace says which one it is
REQUEST_COLUMNS = tuple(f.name for f in dataclasses.fields(RequestRecord))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Raw facts of one scenario in one run: the requests and what the machine did meanwhile.

    `load` is what the device watch saw (see `harness.device`) and what the client says of itself under `client`;
    `workload` the hash of the requests asked for; `concurrency` of a closed loop, None for an open one.
    `itl` counts the gap per token after the first, of requests whose tokens per event are known: `{"us": [gaps in
    microseconds], "n": [tokens]}`. `arrivals` counts output tokens by the millisecond in which they came:
    `{"ms": [...], "n": [...]}` on the clock of the records. `tokens` of a text, which has no requests: a number each of every scored token
    (`core.perplexity.Scores`): `nll`, `base_nll`, `kld`, `same` (0 or 1), `chunk`. `lengths` where the requests differ in theirs: `isl` and
    `osl` asked of each by its index; `isl` and `osl` are their means then.
    """

    scenario: str
    arm: str
    run: int
    workload: str
    isl: int
    osl: int
    records: tuple[RequestRecord, ...]
    concurrency: int | None = None
    load: dict[str, Any] = field(default_factory=dict)
    itl: dict[str, list[Any]] = field(default_factory=dict)
    arrivals: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[str, list[Any]] = field(default_factory=dict)
    lengths: dict[str, list[Any]] = field(default_factory=dict)

    def asked(self, index: int) -> tuple[int, int]:
        """Input and output tokens that a request was to have."""
        return (self.lengths["isl"][index], self.lengths["osl"][index]) if self.lengths else (self.isl, self.osl)

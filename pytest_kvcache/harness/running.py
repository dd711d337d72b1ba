"""Measure one scenario on a server that answers: calibrate, warm up, drive, watch the machine."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from ..core.address import as_chat
from ..core.framework import Framework
from ..core.lengths import mean
from ..core.load import Load, Seen, Target, plan_workers
from ..core.readings import Readings
from ..core.record import OK, RequestRecord, Trace
from ..core.scenarios import Capacity, ClosedLoop, OpenLoop, Scenario, Traffic
from ..core.spec import Arm, UserError
from ..core.validity import Spoiled, load_problem
from ..core.workload import WARM_UP, Request, make_requests, schedule, shortened
from . import page
from .asking import ask, opener
from .capacity import sized
from .counted import Broken, plain_counts
from .device import LoadWatch
from .gpu_watch import Cards
from .loadgen import Workers

Pids = Callable[[], set[int]]
Drive = Callable[[Load], Seen]
Measure = Callable[[str, int], Trace]


class Ask(Protocol):
    """Sends the requests of a closed loop and says what became of them."""

    def __call__(self, scenario: ClosedLoop, part: str, *, counted: bool = True) -> Asked: ...


GLANCE_S = 3.0  # while measuring, the machine is looked at this often; spoiled twice in a row ends the window
CALIBRATION_WORDS = 32
COUNTED_S = 900.0
HALF_A_CHARACTER = 3  # tokens more that llama.cpp's server makes where the last one asked for is a part of a character
WARM_UP_S = 5.0
BROKEN, GONE_S = ("connection_reset", "truncated_stream"), 10.0  # the supervisor takes its time to end what is left of an engine


class Serving(Protocol):
    """A server that answers: one of ours (`harness.server.Server`), or somebody else's, which has no processes and no end that could be
    seen."""

    @property
    def base_url(self) -> str:
        """`http://host:port`."""

    @property
    def start_s(self) -> float:
        """Seconds from its launch until it answered."""

    def pids(self) -> set[int]:
        """The processes that are no foreign load."""

    def failure(self) -> UserError | None:
        """Why it is gone, when it ended by itself."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What became of requests that were sent for what no speed decides; `short` says how a server that counts by plain answers only counts
    them otherwise than they were asked for."""

    records: tuple[RequestRecord, ...]
    load: dict[str, Any]
    short: str = ""


@dataclass(kw_only=True)
class RunningEngine:
    """A server that answers, of one arm in one run."""

    server: Serving
    framework: Framework
    model: str
    words: tuple[str, ...]
    ends: tuple[int, ...] = ()  # ids of the tokens that end a text
    arm: Arm
    run: int
    workload: Callable[[Scenario], str]
    device: str = "cpu"
    cards: Cards | None = None  # of a server on GPUs that can be looked at
    target: Target | None = None  # of a server that is reached otherwise than by its address alone
    textless: bool = False
    secrets: tuple[str, ...] = ()
    chat: bool = False
    salt: str = ""  # of a server that outlives us: what an earlier session has sent lies in its prefix cache
    resolved: Mapping[str, Any] = field(default_factory=dict)  # what the server made of its arguments, as it says itself
    _extra: int = field(default=0, init=False)  # words that a prompt is shorter by, see `_extra_tokens`
    config: Callable[[], Mapping[str, Any]] = dict  # what the model says of its shape (config.json); empty where it is not known
    tp: int = 1
    times: Counter[str] = field(default_factory=Counter)  # how often each scenario was measured here

    @property
    def start_s(self) -> float:
        """What its start took, in seconds."""
        return self.server.start_s

    def measure(self, scenario: Scenario) -> Trace:
        """Warm up with the scenario's own shape, then measure its requests; the same requests in every run.

        Measured again on one server, it sends others of the same shape, which no prefix cache knows yet.
        """
        if isinstance(scenario, Capacity):
            return sized(self, scenario)
        if not isinstance(scenario, Traffic):
            raise UserError(f"{scenario}: a text is not sent to a server; parametrize kv_scenario with it")
        with self.prepared(scenario) as window:
            return window("measured", scenario.n_requests)

    @contextmanager
    def prepared(self, scenario: Traffic) -> Iterator[Measure]:
        """The server warmed up and its client calibrated: a function that measures so many requests of a named part.

        Another server that lives beside it is foreign load: it is to be idle in this one's turn.
        """
        self.times[str(scenario)] += 1
        with ExitStack() as stack:
            workers = stack.enter_context(Workers())

            def own() -> set[int]:
                return self.server.pids() | workers.pids()

            glances = stack.enter_context(_Glances(own, self.server.failure, self.device, self.cards))
            drive = partial(workers.run, self._reached(), glance=glances.look, glance_s=GLANCE_S)
            with self._explained():
                needs = workers.replay()
                extra = self._extra_tokens(drive)
                self._check_counts(scenario, extra)
                warm = drive(self._load(scenario, self._requests(scenario, WARM_UP, warm_up_requests(scenario)), extra, part=WARM_UP))
                if failed := next((r for r in warm.records if r.outcome != OK), None):
                    if died := self._end_of(warm.records):
                        raise died
                    raise UserError(f"the warm-up of {scenario} failed: {failed.outcome}: {failed.error}")
                count, planned = plan_workers(*rates(warm.records), needs, os.cpu_count() or 1)
                workers.grow(count)
            client = needs | {"planned_cores": round(planned, 3)}

            def window(part: str, n: int) -> Trace:
                with self._explained():
                    glances.again()
                    requests = self._requests(scenario, part, n)
                    seen, load = self._window(drive, self._load(scenario, requests, extra, part=part), glances)
                seen = replace(seen, records=self._with_counts(requests, seen.records))
                told = load | {"client": seen.client | client, "extra_tokens": extra}
                return Trace(
                    scenario=str(scenario), arm=self.arm.name, run=self.run, workload=self.workload(scenario), records=seen.records,
                    concurrency=_streams(scenario), load=told, itl=seen.itl, arrivals=seen.arrivals, **_asked_for(requests),
                )  # fmt: skip

            yield window

    @contextmanager
    def asked(self) -> Iterator[Ask]:
        """A function that sends the requests of a closed loop, whatever else the machine does: what no speed decides. `counted`: the
        server must count them as they were asked for."""
        with Workers() as workers:
            drive = partial(workers.run, self._reached(), glance=self._alive, glance_s=GLANCE_S)
            with self._explained():
                self._extra = self._extra_tokens(drive)

            def sent(scenario: ClosedLoop, part: str, *, counted: bool = True) -> Asked:
                self.times[str(scenario)] += 1
                with self._explained():
                    short = self._short(scenario, self._extra) if counted else ""
                    requests = self._requests(scenario, part)
                    load = self._load(scenario, requests, self._extra, part=part)
                    before = self._readings()
                    seen = drive(load)
                    if died := self._end_of(seen.records):
                        raise died
                told = page.told(before, self._readings())
                return Asked(records=self._with_counts(requests, seen.records), load={"asked": len(load.bodies)} | told, short=short)

            yield sent

    def plainly(self, scenario: ClosedLoop, part: str, limit_s: float) -> tuple[int, str]:
        """Status and text of the answer to one request without a stream: a server whose streams begin at once can refuse nothing in one.
        OSError where there is no answer, TimeoutError where it is not whole in time."""
        (request,) = make_requests(scenario, self.words, part=part, salt=self.salt, n=1)
        body = self._body(shortened(request, self._extra), request.osl) | {"stream": False}
        body.pop("stream_options", None)
        target = self._reached()
        headers = {"Content-Type": "application/json", **target.headers}
        try:
            url, data = target.base_url + target.endpoint, json.dumps(body, ensure_ascii=False).encode()
            return ask(opener(target), url, limit_s=limit_s, headers=headers, body=data)
        except OSError as e:
            if died := self._end(patient=not isinstance(e, TimeoutError)):
                raise died from e
            raise

    def _alive(self) -> None:
        if died := self.server.failure():
            raise died

    def _short(self, scenario: ClosedLoop, extra: int) -> str:
        """How the server counts a request of this shape otherwise than it was asked for; empty when it does not."""
        try:
            self._check_counts(scenario, extra)
        except Broken:
            raise
        except UserError as e:
            return str(e)
        return ""

    def readings(self) -> Readings:
        """What the server's page says just now."""
        return self._readings()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A server that is gone is the reason of whatever else went wrong."""
        try:
            yield
        except UserError as e:
            raise self._end(patient=isinstance(e, Broken)) or e from e
        if died := self.server.failure():
            raise died

    def _end_of(self, records: Sequence[RequestRecord]) -> UserError | None:
        """Why the server is gone, when it is: the load is over at once then."""
        return self._end(patient=any(r.outcome in BROKEN for r in records))

    def _end(self, *, patient: bool) -> UserError | None:
        """The same; connections break a moment before the server's end is known, so that it is waited for where they did."""
        end = time.monotonic() + (GONE_S if patient else 0)
        while (died := self.server.failure()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return died

    def _window(self, drive: Drive, load: Load, glances: _Glances) -> tuple[Seen, dict[str, Any]]:
        before = self._readings()
        with glances.watch() as watch:
            seen = drive(load)
        if died := self._end_of(seen.records):
            raise died
        return seen, watch.seen | {"asked": len(load.bodies)} | page.told(before, self._readings())

    def _again(self, scenario: Traffic) -> str:
        """What the name of a part ends with where the scenario is measured here once more."""
        return f" {times}" if (times := self.times[str(scenario)]) > 1 else ""

    def _requests(self, scenario: Traffic, part: str, n: int | None = None) -> tuple[Request, ...]:
        return make_requests(scenario, self.words, part=part, salt=self._again(scenario) + self.salt, n=n)

    def _load(self, scenario: Traffic, requests: Sequence[Request], extra: int, *, part: str) -> Load:
        """Requests as bytes, each `extra` words shorter: the server adds that many tokens itself. UserError where nothing would be left."""
        if (short := min((r.isl for r in requests), default=extra + 1)) <= extra:
            why = f"the server adds {extra} tokens to every prompt, and one of {short} is among them"
            raise UserError(f"{scenario}: {why}; ask for {extra + 1} at least (`low` of drawn lengths)")
        bodies = (json.dumps(self._body(shortened(r, extra), r.osl), ensure_ascii=False).encode() for r in requests)
        due = schedule(scenario, part=part + self._again(scenario), n=len(requests)) if isinstance(scenario, OpenLoop) else None
        return Load(
            bodies=tuple(bodies), osl=tuple(r.osl for r in requests), concurrency=_streams(scenario), due_s=due,
            textless=self.textless, by_length=not self.framework.streams_usage, secrets=self.secrets,
        )  # fmt: skip

    def _body(self, prompt: str, osl: int) -> dict[str, Any]:
        body = self.framework.body(self.model, prompt, osl) | self.framework.without_end(self.ends)
        return as_chat(body) if self.chat else body

    def _reached(self) -> Target:
        return self.target or Target(base_url=self.server.base_url, endpoint=self.framework.endpoint)

    def _extra_tokens(self, drive: Drive) -> int:
        """How many tokens the server adds to every prompt (a BOS, say), by its own count of a prompt of known length."""
        shape = ClosedLoop(isl=CALIBRATION_WORDS, osl=2, concurrency=1, requests=1)
        if not self.framework.streams_usage:
            return max(0, self._counted(self._requests(shape, "counted", 1)[0], 0)[0] - CALIBRATION_WORDS)
        (record,) = drive(self._load(shape, self._requests(shape, "calibration"), 0, part="calibration")).records
        return max(0, (record.input_tokens or CALIBRATION_WORDS) - CALIBRATION_WORDS)

    def _counted(self, request: Request, extra: int) -> tuple[int, int]:
        """Input and output tokens of one request, by a plain answer."""
        body = self._body(shortened(request, extra), request.osl)
        return plain_counts(self._reached(), body, COUNTED_S, self.secrets)

    def _check_counts(self, scenario: Traffic, extra: int) -> None:
        """Where streams tell no counts: that requests of this shape, the longest of it, come out as long as they are asked for. UserError
        when not."""
        if self.framework.streams_usage:
            return
        (request,) = make_requests(scenario, self.words, part=f"{WARM_UP} counted", salt=self.salt, n=1)
        told = self._counted(request, extra)
        if told[0] != request.isl or not request.osl <= told[1] <= request.osl + HALF_A_CHARACTER:
            raise UserError(
                f"{scenario}: the server made {told[0]} input and {told[1]} output tokens of a request for {request.isl} and {request.osl}"
                + (": is its context too short?" if told[1] < request.osl else "")
            )

    def _with_counts(self, requests: Sequence[Request], records: tuple[RequestRecord, ...]) -> tuple[RequestRecord, ...]:
        """Where streams tell no counts, prompts are as long as the one that was counted."""
        if self.framework.streams_usage:
            return records
        return tuple(replace(r, input_tokens=r.input_tokens or requests[r.index].isl) if r.outcome == OK else r for r in records)

    def _readings(self) -> Readings:
        return page.read(self.server.base_url, self.framework, self.target)


class _Glances:
    """A look at server and machine every few seconds of a load; raises what the server died of, and Spoiled when others took
    the machine twice in a row."""

    def __init__(self, own: Pids, failure: Callable[[], Exception | None], device: str, cards: Cards | None) -> None:
        self.own, self._failure, self.device, self.cards, self._problems = own, failure, device, cards, 0

    def __enter__(self) -> Self:
        self._watch = self.watch().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, at)

    def watch(self) -> LoadWatch:
        return LoadWatch(own=self.own, device=self.device, cards=self.cards)

    def again(self) -> None:
        """Look from now on: what was before, in another server's turn, is no matter."""
        self._watch.__exit__(None, None, None)
        self._watch, self._problems = self.watch().__enter__(), 0

    def look(self) -> None:
        if died := self._failure():
            raise died
        self._watch.__exit__(None, None, None)
        seen = self._watch.seen
        self._watch = self.watch().__enter__()
        problem = load_problem(seen)
        self._problems = self._problems + 1 if problem else 0
        if problem and self._problems > 1:
            raise Spoiled(problem, seen)


def _asked_for(requests: Sequence[Request]) -> dict[str, Any]:
    """The lengths of a trace's requests: one, or of each its own beside the means."""
    each = {"isl": [r.isl for r in requests], "osl": [r.osl for r in requests]}
    means = {name: mean(lengths) for name, lengths in each.items()}
    return means if all(len(set(lengths)) == 1 for lengths in each.values()) else means | {"lengths": each}


def _streams(scenario: Traffic) -> int | None:
    return scenario.concurrency if isinstance(scenario, ClosedLoop) else None


def warm_up_requests(scenario: Traffic) -> int:
    """Requests of the scenario's own shape and load that are sent before the window: a round, or seconds of arrivals."""
    if isinstance(scenario, ClosedLoop):
        return max(2, scenario.concurrency)
    assert isinstance(scenario, OpenLoop)
    return max(2, min(scenario.n_requests, math.ceil(WARM_UP_S * scenario.rate)))


def rates(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Output tokens and requests a second over some records that were all answered."""
    seconds = max(r.end_s or 0.0 for r in records) - min(r.sent_s for r in records)
    return sum(r.output_tokens or r.events for r in records) / seconds, len(records) / seconds

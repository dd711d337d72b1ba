"""Measure one scenario on a server that answers: calibrate, warm up, drive, watch the machine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ..core.load import Load, Seen, Target, plan_workers
from ..core.record import OK, RequestRecord, Trace
from ..core.spec import Arm, ClosedLoop, Framework, OpenLoop, Scenario, UserError
from ..core.validity import Spoiled, load_problem
from ..core.workload import make_requests, schedule, shortened
from . import counters
from .device import LoadWatch
from .loadgen import Workers
from .server import Server

GLANCE_S = 3.0  # while measuring, the machine is looked at this often; spoiled twice in a row ends the window
CALIBRATION_WORDS = 32
WARM_UP_S = 5.0


@dataclass(kw_only=True)
class RunningEngine:
    """A server that answers, of one arm in one run."""

    server: Server
    framework: Framework
    model: str
    words: tuple[str, ...]
    arm: Arm
    run: int
    workload: Callable[[Scenario], str]
    resolved: Mapping[str, Any] = field(default_factory=dict)  # what the server made of its arguments, as it says itself

    @property
    def start_s(self) -> float:
        """What its start took, in seconds."""
        return self.server.start_s

    def measure(self, scenario: Scenario) -> Trace:
        """Warm up with the scenario's own shape, then measure its requests; the same requests in every run."""
        try:
            seen, load = self._measure(scenario)
        except UserError as e:
            raise self.server.failure() or e from e
        if died := self.server.failure():
            raise died
        return Trace(
            scenario=str(scenario), arm=self.arm.name, run=self.run, workload=self.workload(scenario), isl=scenario.isl,
            osl=scenario.osl, concurrency=_streams(scenario), records=seen.records, load=load, itl=seen.itl, arrivals=seen.arrivals,
        )  # fmt: skip

    def _measure(self, scenario: Scenario) -> tuple[Seen, dict[str, Any]]:
        with ExitStack() as stack:
            workers = stack.enter_context(Workers())
            glances = stack.enter_context(_Glances(lambda: self.server.pids() | workers.pids(), self.server.failure))

            def drive(load: Load) -> Seen:
                target = Target(base_url=self.server.base_url, endpoint=self.framework.endpoint)
                return workers.run(target, load, glance=glances.look, glance_s=GLANCE_S)

            needs = workers.replay()
            extra = self._extra_tokens(drive)
            warm = drive(self._load(scenario, extra, part="warm-up", n=warm_up_requests(scenario)))
            if failed := next((r for r in warm.records if r.outcome != OK), None):
                raise UserError(f"the warm-up of {scenario} failed: {failed.outcome}: {failed.error}")
            count, planned = plan_workers(*rates(warm.records), needs, os.cpu_count() or 1)
            workers.grow(count)
            load, before = self._load(scenario, extra), self._counters()
            with LoadWatch(own=glances.own) as watch:
                seen = drive(load)
            client = seen.client | needs | {"planned_cores": round(planned, 3)}
            told = {"client": client, "asked": len(load.bodies), "extra_tokens": extra}
            return seen, watch.seen | told | counters.told(before, self._counters())

    def _load(self, scenario: Scenario, extra: int, *, part: str = "measured", n: int | None = None) -> Load:
        """The requests of a scenario as bytes, each `extra` words shorter: the server adds that many tokens itself."""
        requests = make_requests(scenario, self.words, part=part, n=n)
        return Load(
            bodies=tuple(self._body(shortened(r, extra), r.osl) for r in requests), osl=tuple(r.osl for r in requests),
            concurrency=_streams(scenario), due_s=schedule(scenario, part=part, n=n) if isinstance(scenario, OpenLoop) else None,
        )  # fmt: skip

    def _body(self, prompt: str, osl: int) -> bytes:
        return json.dumps(self.framework.body(self.model, prompt, osl), ensure_ascii=False).encode()

    def _extra_tokens(self, drive: Callable[[Load], Seen]) -> int:
        """How many tokens the server adds to every prompt (a BOS, say), by its own count of a prompt of known length."""
        shape = ClosedLoop(isl=CALIBRATION_WORDS, osl=2, concurrency=1, requests=1)
        (record,) = drive(self._load(shape, 0, part="calibration")).records
        return max(0, (record.input_tokens or CALIBRATION_WORDS) - CALIBRATION_WORDS)

    def _counters(self) -> dict[str, float]:
        return counters.read(self.server.base_url + self.framework.metrics, self.framework.counters)


class _Glances:
    """A look at server and machine every few seconds of a load; raises what the server died of, and Spoiled when others took
    the machine twice in a row."""

    def __init__(self, own: Callable[[], set[int]], failure: Callable[[], Exception | None]) -> None:
        self.own, self._failure, self._problems = own, failure, 0

    def __enter__(self) -> Self:
        self._watch = LoadWatch(own=self.own).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, at)

    def look(self) -> None:
        if died := self._failure():
            raise died
        self._watch.__exit__(None, None, None)
        seen = self._watch.seen
        self._watch = LoadWatch(own=self.own).__enter__()
        problem = load_problem(seen)
        self._problems = self._problems + 1 if problem else 0
        if problem and self._problems > 1:
            raise Spoiled(problem, seen)


def _streams(scenario: Scenario) -> int | None:
    return scenario.concurrency if isinstance(scenario, ClosedLoop) else None


def warm_up_requests(scenario: Scenario) -> int:
    """Requests of the scenario's own shape and load that are sent before the window: a round, or seconds of arrivals."""
    if isinstance(scenario, ClosedLoop):
        return max(2, scenario.concurrency)
    assert isinstance(scenario, OpenLoop)
    return max(2, min(scenario.n_requests, math.ceil(WARM_UP_S * scenario.rate)))


def rates(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Output tokens and requests a second over some records that were all answered."""
    seconds = max(r.end_s or 0.0 for r in records) - min(r.sent_s for r in records)
    return sum(r.output_tokens or r.events for r in records) / seconds, len(records) / seconds

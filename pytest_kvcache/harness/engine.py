"""Runs on a real engine: start the server, drive the scenarios, note what the machine did meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..core.record import RequestRecord, Trace
from ..core.spec import Arm, ClosedLoop, Framework, Gpu, Launch, Model, UserError, json_hash
from ..core.validity import Spoiled, load_problem
from ..core.workload import Request, make_requests, single_token_words, workload_hash
from . import loadgen, weights
from .canary import canary
from .client import Client
from .device import LoadWatch
from .environment import fingerprint
from .server import Server, serve

T = TypeVar("T")
QUIET_S = 1.0  # how long the machine must be quiet before a server is started
QUIET_PATIENCE_S = 15.0
GLANCE_S = 3.0  # while measuring, the machine is looked at this often; spoiled twice in a row ends the window
START_TIMEOUT_S = {"cpu": 180.0, "gpu": 900.0}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which engine to run: the framework in its own interpreter or command, the model, the device."""

    framework: Framework
    model: Model
    gpu: Gpu
    python: str
    command: tuple[str, ...] = ()
    serve_args: tuple[str, ...] = ()
    start_timeout_s: float | None = None


def split_port(serve_args: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """A port that the user wishes (`--port N` or `--port=N` among the arguments passed on; else 0) and the other arguments."""
    port, rest, words = 0, [], iter(serve_args)
    for word in words:
        name, _, value = word.partition("=")
        if name != "--port":
            rest.append(word)
            continue
        value = value or next(words, "")
        if not value.isdecimal() or not 0 < int(value) < 65536:
            raise UserError(f"--kv-serve-arg=--port: {value!r} is no port")
        port = int(value)
    return port, tuple(rest)


def check_installed(spec: EngineSpec) -> None:
    """UserError with the pip line that cures it when the framework cannot be started at all."""
    split_port(spec.serve_args)
    if spec.command:
        return
    if missing := weights.missing_modules(spec.python, spec.framework.needs):
        where = f"{spec.framework.name}: {spec.python} has no {', '.join(missing)}"
        raise UserError(f"{where}; {spec.framework.cure}, or name its interpreter in the ini option kv_python_{spec.framework.name}")


class EngineRunner:
    """Fresh server starts of one engine. `start` gives a function that measures one scenario on the running server."""

    def __init__(self, spec: EngineSpec, *, session_id: str, logs: Path, say: Callable[[str], None]) -> None:
        self.spec, self.session_id, self.logs, self.say = spec, session_id, logs, say
        self.weights = weights.locate(spec.model, spec.framework, spec.python, say)
        self.words = single_token_words(self.weights.tokenizer)

    def launch(self, arm: Arm) -> Launch:
        port, serve_args = split_port(self.spec.serve_args)
        return Launch(
            python=self.spec.python, command=self.spec.command, model=self.weights.serve, port=port,
            device=self.spec.gpu.kind, arm=arm, serve_args=serve_args,
        )  # fmt: skip

    def environment(self, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
        """The fingerprint of what these arms run in; what an arm itself asks for is identity."""
        argv = tuple(self.spec.framework.argv(self.launch(arms[0])))
        found = fingerprint(
            python=self.spec.python, distributions=self.spec.framework.distributions, argv=argv, gpu_key=self.spec.gpu.key, env=self._env()
        )
        asked = {f"arm:{a.name}": json_hash(a.asked()) for a in arms if a.asked()}
        found["identity"] |= {**self.weights.identity, **asked}
        return found

    def _wait_for_quiet(self) -> None:
        """Start nothing while others use the processors; Spoiled when that does not end soon.

        An engine whose threads wait for each other runs many times slower beside one busy process: starting it would
        take minutes and prove nothing.
        """
        give_up, told = time.monotonic() + QUIET_PATIENCE_S, False
        while True:
            with LoadWatch() as watch:
                time.sleep(QUIET_S)
            if not (problem := load_problem(watch.seen)):
                return
            if not told:
                self.say(f"  waiting for the machine to be quiet: {problem}")
                told = True
            if time.monotonic() > give_up:
                raise Spoiled(problem, watch.seen)

    def canary(self) -> dict[str, float] | None:
        """Only for the processors so far: on a GPU the canary must run on the card."""
        return canary() if self.spec.gpu.kind == "cpu" else None

    def _env(self) -> dict[str, str]:
        offline = {"HF_HUB_OFFLINE": "1"} if self.weights.local else {}
        return dict(os.environ) | dict(self.spec.framework.env) | offline

    def workload(self, scenario: ClosedLoop) -> str:
        return workload_hash(make_requests(scenario, self.words), scenario.concurrency)

    @contextmanager
    def start(self, arm: Arm, run: int, attempt: int) -> Iterator[RunningEngine]:
        """One fresh server, stopped with its whole process tree on leaving."""
        log = (
            self.logs
            / f"{self.spec.framework.name}-{self.spec.model.key}-{arm.name}-run{run}{f'-attempt{attempt}' if attempt > 1 else ''}.log"
        )
        self._wait_for_quiet()
        timeout_s = self.spec.start_timeout_s or START_TIMEOUT_S[self.spec.gpu.kind]
        with serve(
            self.spec.framework, self.launch(arm), log=log, env=self._env(), timeout_s=timeout_s, session_id=self.session_id, say=self.say
        ) as server:
            yield RunningEngine(self, server, arm, run)


@dataclass
class RunningEngine:
    """A server that answers. `start_s` is what its start took, in seconds."""

    runner: EngineRunner
    server: Server
    arm: Arm
    run: int

    @property
    def start_s(self) -> float:
        return self.server.start_s

    def measure(self, scenario: ClosedLoop) -> Trace:
        """Warm up with the scenario's own shape, then measure its requests; the same requests in every run."""
        try:
            records, load, extra = asyncio.run(self._unless_spoiled(self._measure(scenario)))
        except UserError as e:
            raise self.server.failure() or e from e
        if died := self.server.failure():
            raise died
        return Trace(
            scenario=str(scenario), arm=self.arm.name, run=self.run, workload=self.runner.workload(scenario),
            isl=scenario.isl, osl=scenario.osl, records=tuple(records), load=load | {"extra_tokens": extra},
        )  # fmt: skip

    async def _measure(self, scenario: ClosedLoop) -> tuple[list[RequestRecord], dict[str, Any], int]:
        words, framework = self.runner.words, self.runner.spec.framework
        async with Client(self.server.base_url, framework.endpoint, self.runner.weights.serve, framework.body) as client:
            extra = await loadgen.extra_tokens(client, words)
            warm = _shortened(make_requests(scenario, words, part="warm-up", n=max(2, scenario.concurrency)), extra)
            if failure := await loadgen.warm_up(client, warm, scenario.concurrency):
                raise UserError(f"the warm-up of {scenario} failed: {failure}")
            requests = _shortened(make_requests(scenario, words), extra)
            with LoadWatch(own=self.server.pids) as watch:
                records = await loadgen.drive(client, requests, scenario.concurrency)
            return records, watch.seen, extra

    async def _unless_spoiled(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, given up with Spoiled when other processes take the machine meanwhile."""
        task, problems = asyncio.ensure_future(work), 0
        try:
            while not task.done():
                with LoadWatch(own=self.server.pids) as glance:
                    await asyncio.wait((task,), timeout=GLANCE_S)
                problem = load_problem(glance.seen) if not task.done() else None
                problems = problems + 1 if problem else 0
                if problem and problems > 1:
                    raise Spoiled(problem, glance.seen)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _shortened(requests: tuple[Request, ...], extra: int) -> tuple[Request, ...]:
    """The same requests with `extra` words fewer: the server adds that many tokens itself."""
    if not extra:
        return requests
    return tuple(Request(index=r.index, prompt=" " + " ".join(r.prompt.split()[: r.isl - extra]), isl=r.isl, osl=r.osl) for r in requests)

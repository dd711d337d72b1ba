"""Runs on a real engine: start the server, drive the scenarios, note what the machine did meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core import capacity
from ..core.canary import Reading
from ..core.checkpoints import as_served, checkpoint
from ..core.framework import Framework, Launch
from ..core.record import Trace
from ..core.resolved import not_applied
from ..core.scenarios import Capacity, ClosedLoop, Scenario, Text, Traffic
from ..core.spec import Arm, Gpu, Model, UserError, json_hash
from ..core.validity import Spoiled, load_problem
from ..core.workload import end_tokens, make_requests, single_token_words, workload_hash
from . import weights
from .canary import canary
from .capacity import config_reader
from .corpus import load_corpus
from .device import LoadWatch
from .environment import fingerprint
from .gpu_canary import NoCanary, gpu_canary
from .gpu_memory import given_back
from .gpu_watch import Cards, cards
from .interpreter import frameworks, installed
from .nvml import gpus_in_use
from .own_command import check_command
from .resolved import resolved_configuration
from .running import RunningEngine
from .server import Server, serve
from .texts import Scorer
from .turns import in_turns

QUIET_S = 1.0  # how long the machine must be quiet before a server is started
QUIET_HOLDS_S = 3.0  # from the canary to the start that follows it
QUIET_PATIENCE_S = 15.0
START_TIMEOUT_S = {"cpu": 300.0, "gpu": 900.0}  # vLLM took 180 s the first time on two cores, 60 s later


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which engine to run: the framework in its own interpreter or command, the model, the device. `other` is the interpreter that
    serves the arms of another build."""

    framework: Framework
    model: Model
    gpu: Gpu
    python: str
    command: tuple[str, ...] = ()
    serve_args: tuple[str, ...] = ()
    tp: int = 1
    other: str = ""
    start_timeout_s: float | None = None
    log_level: str = ""
    corpus: str = ""

    def python_of(self, arm: Arm) -> str:
        """The interpreter that serves an arm."""
        return self.other if arm.build else self.python


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
            said = value if re.fullmatch(r"-?\d{1,9}", value) else "what follows"  # anything else may be a secret at the wrong place
            raise UserError(f"--kv-serve-arg=--port: {said} is no port; write a number from 1 to 65535")
        port = int(value)
    return port, tuple(rest)


def check_installed(spec: EngineSpec, named_by: str = "") -> None:
    """UserError with the pip line that cures it when the framework cannot be started at all.

    `named_by` is the option that names its interpreter, where that is not the ini option.
    """
    split_port(spec.serve_args)
    if spec.tp > 1 and not spec.framework.tensor_parallel:
        raise UserError(f"--kv-tp={spec.tp}: {spec.framework.name} serves a model on one GPU here; leave it out")
    if spec.command:
        return
    try:
        missing = weights.missing_modules(spec.python, spec.framework.needs)
    except UserError as e:
        raise UserError(f"{named_by}={e}" if named_by else str(e)) from e
    if missing:
        where = f"{spec.framework.name}: {spec.python} has no {', '.join(missing)}"
        other = f"name another in {named_by}" if named_by else f"name its interpreter in the ini option kv_python_{spec.framework.name}"
        raise UserError(f"{where}; {spec.framework.cure}, or {other}")


@contextmanager
def own_folder(framework: Framework, launch: Launch) -> Iterator[None]:
    """The launch's own folder, new and empty but for what the framework reads from it; UserError when it cannot be written. It goes with
    the server: what that keeps on disk is no use to the next, and may be large."""
    folder = Path(launch.folder)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        for name, text in framework.files(launch).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror or e})") from e
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class EngineRunner:
    """Fresh server starts of one engine. `start` gives a function that measures one scenario on the running server."""

    def __init__(self, spec: EngineSpec, *, session_id: str, logs: Path, say: Callable[[str], None]) -> None:
        self.spec, self.session_id, self.logs, self.say = spec, session_id, logs, say
        self.weights = weights.locate(spec.model, spec.framework, spec.python, say)
        self.words = single_token_words(self.weights.tokenizer)
        self._checkpoints: dict[str, weights.Weights] = {}
        self._no_canary, self._quiet_until = False, 0.0

    def _weights(self, arm: Arm) -> weights.Weights:
        """What an arm's server loads."""
        named = checkpoint(self.spec.framework, self.spec.model, arm)
        if named and named not in self._checkpoints:
            self._checkpoints[named] = weights.quantised(named, self.spec.model, self.weights, self.spec.framework, self.spec.python)
        return self._checkpoints[named] if named else self.weights

    def _identity(self, arm: Arm) -> str:
        """Of an arm's weights; a checkpoint that cannot be had is that arm's fault alone, which its start says."""
        try:
            return self._weights(arm).identity["weights"]
        except UserError:
            return "not there"

    def launch(self, arm: Arm) -> Launch:
        port, serve_args = split_port(self.spec.serve_args)
        served, arm = self._weights(arm), as_served(self.spec.framework, self.spec.model, arm)
        if arm.memory_share < 1:  # another server lives beside it, and one port is for one
            port = 0
        python = self.spec.python_of(arm)
        folder = self.logs.parent / "launches" / f"{self.spec.framework.name}-{self.spec.model.key}-{arm.name}"
        return Launch(
            python=python, command=self.spec.command, model=served.serve, port=port, tp=self.spec.tp, dummy=self.spec.model.dummy,
            device=self.spec.gpu.kind, arm=arm, serve_args=serve_args, version=self._version(python), folder=str(folder),
            log_level=self.spec.log_level,
        )  # fmt: skip

    def _version(self, python: str) -> str:
        """The framework's version in an interpreter; unknown of a command, which may be anywhere."""
        asked = self.spec.framework.distributions
        if self.spec.command or not asked:
            return ""
        found = installed(python)["distributions"]
        its_own = asked[: asked.index("torch")] if "torch" in asked else asked  # what follows is what it is built on
        return next((str(found[name]) for name in frameworks(found, its_own)[:1]), "")

    def environment(self, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
        """The fingerprint of what these arms, all of one build, run in; what an arm itself asks for is identity."""
        launch = self.launch(arms[0])
        found = fingerprint(
            python=launch.python,
            distributions=self.spec.framework.distributions,
            argv=tuple(self.spec.framework.argv(launch)),
            gpu_key=self.spec.gpu.key,
            env=self._env(launch),
            tp=self.spec.tp,
        )
        asked = {f"arm:{a.name}": json_hash(a.asked()) for a in arms if a.asked()}
        parallel = {"tp": self.spec.tp} if self.spec.tp > 1 else {}
        others = {f"arm:{a.name}:weights": its for a in arms if (its := self._identity(a)) != self.weights.identity["weights"]}
        found["identity"] |= {**self.weights.identity, **parallel, **asked, **others}
        return found

    def _wait_for_quiet(self, cards: Cards | None) -> None:
        """Start nothing while others use the processors or the GPU; Spoiled when that does not end soon.

        An engine whose threads wait for each other runs many times slower beside one busy process: starting it would
        take minutes and prove nothing.
        """
        if time.monotonic() < self._quiet_until:
            return
        give_up, told = time.monotonic() + QUIET_PATIENCE_S, False
        while True:
            with LoadWatch(device=self.spec.gpu.kind, cards=cards) as watch:
                time.sleep(QUIET_S)
            if not (problem := load_problem(watch.seen)):
                self._quiet_until = time.monotonic() + QUIET_HOLDS_S
                return
            if not told:
                self.say(f"  waiting for the machine to be quiet, at most {QUIET_PATIENCE_S:.0f} s: {problem}")
                told = True
            if time.monotonic() > give_up:
                raise Spoiled(problem, watch.seen)

    def canary(self) -> Reading | None:
        """The state of what the engine computes on, once nobody else does; None where it stays busy. Why a GPU has none is said once."""
        on_a_gpu, env = self.spec.gpu.kind == "gpu", os.environ | dict(self.spec.framework.env)
        try:
            with cards(env, self.spec.tp) if on_a_gpu else nullcontext() as gpus:
                self._wait_for_quiet(gpus)
            return self._gpu_canary(env) if on_a_gpu else canary()
        except (Spoiled, UserError):  # the start that follows meets the same, and says so
            return None

    def _gpu_canary(self, env: Mapping[str, str]) -> Reading | None:
        if self._no_canary:  # asking again would cost its time limit again
            return None
        try:
            return gpu_canary(env, gpus_in_use(env)[0], self.spec.tp)
        except NoCanary as e:
            self.say(f"  the GPU's own state is not known (no canary: {e}): verdicts do without it")
            self._no_canary = True
            return None

    @property
    def _offline(self) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1"} if self.weights.local and not self.spec.model.checkpoints else {}

    def _env(self, launch: Launch) -> dict[str, str]:
        return dict(os.environ) | dict(self.spec.framework.env) | self.spec.framework.environ(launch) | self._offline

    def in_turns(self, servers: Sequence[RunningEngine], scenario: Scenario) -> list[Trace]:
        """One scenario on servers that live side by side, see `harness.turns`."""
        assert isinstance(scenario, ClosedLoop)  # as the plan sees to
        return in_turns(servers, scenario)

    @cached_property
    def _scorer(self) -> Scorer:
        spec = self.spec
        if spec.command:
            raise UserError(f"{spec.framework.name}: a text is scored in an interpreter: name one in kv_python_{spec.framework.name}")
        return Scorer(
            framework=spec.framework, python=spec.python, model=self.weights.serve, serves=self._serves,
            device="cuda" if spec.gpu.kind == "gpu" else "cpu",
            corpus=lambda: load_corpus(spec.corpus), folder=self.logs.parent / "texts" / f"{spec.framework.name}-{spec.model.key}",
            env=dict(os.environ) | dict(spec.framework.env) | self._offline, say=self.say,
        )  # fmt: skip

    def _serves(self, arm: Arm) -> tuple[Arm, str]:
        """An arm as its engine is told of it, and the weights that this loads where they are not the model's own."""
        its = self._weights(arm)
        return as_served(self.spec.framework, self.spec.model, arm), "" if its is self.weights else its.serve

    def score(self, scenario: Text, arms: Sequence[Arm]) -> list[Trace]:
        """A text through the caches of all arms, in the framework's own interpreter."""
        return self._scorer.score(scenario, arms)

    def workload(self, scenario: Scenario) -> str:
        if isinstance(scenario, Text):
            return self._scorer.workload(scenario)
        if isinstance(scenario, Capacity):
            return capacity.workload(scenario)
        assert isinstance(scenario, Traffic)
        return workload_hash(make_requests(scenario, self.words), scenario)

    @contextmanager
    def start(self, arm: Arm, run: int, attempt: int, *, anyway: bool = False) -> Iterator[RunningEngine]:
        """One fresh server, stopped with its whole process tree on leaving; started `anyway` where the machine stays busy."""
        log = (
            self.logs
            / f"{self.spec.framework.name}-{self.spec.model.key}-{arm.name}-run{run}{f'-attempt{attempt}' if attempt > 1 else ''}.log"
        )
        timeout_s = self.spec.start_timeout_s or START_TIMEOUT_S[self.spec.gpu.kind]
        launch = self.launch(arm)
        check_command(self.spec.framework, launch)
        env = self._env(launch)
        on_a_gpu = self.spec.gpu.kind == "gpu"
        with ExitStack() as stack:
            gpus = stack.enter_context(cards(env, self.spec.tp)) if on_a_gpu else None
            with suppress(*([Spoiled] if anyway else [])):
                self._wait_for_quiet(gpus)
            if on_a_gpu:
                stack.enter_context(given_back(env, self.say, self.spec.tp))
            stack.enter_context(own_folder(self.spec.framework, launch))
            server = stack.enter_context(
                serve(self.spec.framework, launch, log=log, env=env, timeout_s=timeout_s, session_id=self.session_id, say=self.say)
            )
            yield RunningEngine(
                server=server,
                framework=self.spec.framework,
                model=launch.model,
                words=self.words,
                ends=end_tokens(self.weights.tokenizer),
                arm=arm,
                run=run,
                workload=self.workload,
                device=self.spec.gpu.kind,
                cards=gpus,
                textless=self.spec.model.dummy,
                resolved=self._resolved(server, arm),
                config=config_reader(self.spec.model, launch.model, launch.python),
                tp=self.spec.tp,
            )

    def start_anyway(self, arm: Arm, run: int, attempt: int) -> AbstractContextManager[RunningEngine]:
        """A start for what no speed decides."""
        return self.start(arm, run, attempt, anyway=True)

    def _resolved(self, server: Server, arm: Arm) -> dict[str, Any]:
        """What a server made of its arguments, what it warns of said; ServerError when it did not do what the arm asks for."""
        found = resolved_configuration(self.spec.framework, server.log, server.base_url)
        problem = not_applied(found, arm)
        if self.spec.gpu.kind == "gpu" and (said := self.spec.framework.on_gpu) and said not in found:
            problem = f"it does not say that it uses the GPU ({said.replace('_', ' ')}): is it a build for processors?"
        if problem:
            raise server.broken(problem)
        for name in dict.fromkeys(name for name, _ in self.spec.framework.known_warnings if name in found):
            self.say(f"  {self.spec.framework.name} warns: {name.replace('_', ' ')}: {found[name]}")
        return found

"""One invocation of pytest: plan, measure each block once, collect what was found. Knows every package, imports no pytest.

Under xdist each worker has one of these over the same scratch folder; a block is measured by whichever asks first, and
the controller alone writes baselines and reports.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .blocks import measured, read
from .core.calibration import RUNS, SUFFIX
from .core.evidence import rule_of
from .core.gate import Rule, rule_for
from .core.masking import masked
from .core.plan import Block, Cost, GateSpec, cost, make_plan, plan_row, runs_range
from .core.spec import Arm, UserError
from .core.still import STILL
from .options import Engine, Settings
from .report import terminal

if TYPE_CHECKING:
    from .replay import StoredRun

RunnerFactory = Callable[[str, str], Any]


class KvSession:
    """State of a session. `say` prints a line for the user, `runner_for` may replace the real engine (see hookspecs)."""

    def __init__(self, settings: Settings, scratch: Path, say: Callable[[str], None], runner_for: RunnerFactory) -> None:
        self.settings, self.scratch, self.say, self.runner_for = settings, scratch, say, runner_for
        self.id = scratch.name.removeprefix("pytest-kvcache-")
        self.traces = scratch / "traces"  # files of raw traces, which block results name
        self.gate_rule: Rule = rule_for(settings.gpu.kind, settings.profile)
        calibrates = settings.calibrate or bool(settings.run and "noise" in settings.run[1])
        self.rule: Rule = replace(self.gate_rule, record_runs=RUNS) if calibrates else self.gate_rule
        self.blocks: dict[str, Block] = {}
        self.began = time.monotonic()
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._docs: dict[tuple[str, str], dict[str, Any]] = {}
        self._runners: dict[tuple[str, str], Any] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._by_hand = 0

    # -- before the first test ------------------------------------------------------------------------------------

    def preflight(self) -> None:
        """Everything that would fail later is said now, in one line: folder, files, engine, device."""
        from .harness.engine import check_installed

        if self.settings.report and find_spec("jinja2") is None:
            raise UserError("--kv-report needs jinja2: pip install 'pytest-kvcache[report]'")
        folder = self.settings.baselines
        needs_none = self.settings.record or self.settings.calibrate or self.settings.ab
        if self.settings.baselines_given and not folder.is_dir() and not needs_none:
            raise UserError(f"--kv-baselines={folder}: no such folder; add --kv-record=missing to create it")
        if self.settings.replay:
            self.stored_run  # noqa: B018 (read now, so that a damaged file is said now)
            return
        self._tell_orphans()
        for engine in self.settings.engines:
            for model in self.settings.models:
                self.document(engine.framework.name, model.key)
                self.noise(engine.framework.name, model.key)
                if self.runner_for(engine.framework.name, model.key) is None and not self.settings.endpoint:
                    self._check_device()
                    spec = self._spec(engine, model.key)
                    check_installed(spec)
                    if spec.other:
                        check_installed(replace(spec, python=spec.other), "--kv-ab")

    def _tell_orphans(self) -> None:
        """Servers that an earlier session has left, by its own mark; only said, since somebody may want them."""
        from .harness.ready import names
        from .harness.server import orphans

        if found := orphans():
            self.say(f"left by an earlier session: {names(found)}; to stop them: kill -9 {' '.join(map(str, found))}")

    def _check_device(self) -> None:
        if self.settings.gpu.kind == "cpu":
            return
        from .harness.nvml import gpus_in_use

        found = [str(g.get("name", "unknown")) for g in gpus_in_use(os.environ)]
        used = found[: self.settings.tp]
        if not used or not set(used) <= set(self.settings.gpu.nvml_names):
            cure = "" if set(found).isdisjoint(self.settings.gpu.nvml_names) else "; name those to use in CUDA_VISIBLE_DEVICES"
            raise UserError(f"--kv-gpu={self.settings.gpu.key}: the server would get {', '.join(used or found)} of this machine{cure}")

    @cached_property
    def stored_run(self) -> StoredRun:
        """The run that is judged again."""
        from .replay import load

        assert self.settings.run
        return load(*self.settings.run)

    def document(self, framework: str, model: str) -> dict[str, Any]:
        """The baseline document of an engine and a model, read once."""
        from .harness.baselines import load_baseline
        from .replay import without

        key = (framework, model)
        if key not in self._docs:
            doc = load_baseline(self.settings.baselines, self.settings.gpu.key, framework, model)
            self._docs[key] = without(doc, self.stored_run.document["session"]) if self.settings.replay else doc
        return self._docs[key]

    def noise(self, framework: str, model: str) -> dict[str, Any]:
        """The document of the sessions that calibrated this machine, read once; without any it has no entries."""
        return self.document(framework, model + SUFFIX)

    @cached_property
    def between_builds(self) -> list[str]:
        """What differs between the two interpreters of `--kv-ab`, a line each, the other one first; empty without it."""
        if self.settings.replay or not self.settings.ab:
            return []
        from .core.builds import SAME, distributions
        from .harness.interpreter import installed

        lines = []
        for engine in self.settings.engines:
            own, name = engine.python, engine.framework.name
            found = distributions(installed(self.settings.ab), installed(own), engine.framework.distributions)
            lines.append(
                f"{name}: other build {masked(self.settings.ab)}, this build {masked(own)}: " + (f"{len(found)} differ" if found else SAME)
            )
            lines += [f"  {line}" for line in found]
        return lines

    # -- the plan -------------------------------------------------------------------------------------------------

    def plan(self, wanted: Sequence[Any]) -> None:
        side_by_side = self.settings.gpu.kind == "cpu"  # the memory of a GPU holds one server
        self.blocks = {b.id: b for b in make_plan(wanted, self.rule.margin, side_by_side=side_by_side)}

    def cost(self, block: Block, *, read: bool) -> Cost:
        """Best and worst case of a block. `read` says whether baseline files may be looked at (not under --collect-only)."""
        gates = block.gates
        doc = self.document(block.framework, block.model) if read else {"entries": {g.key: None for g in gates}}
        kinds = {self._rough_need(g, doc["entries"].get(g.key), known=g.key in doc["entries"]) for g in gates}
        return cost(block, runs_range(STILL if block.still else self.rule, kinds), self.settings.gpu.kind)

    def _rough_need(self, gate: GateSpec, entry: dict[str, Any] | None, *, known: bool) -> str:
        """What a gate will probably need, before weights and environment are looked at."""
        record = self.settings.record
        if self.settings.calibrate:
            return "record"
        if gate.once:
            return "limit"
        if gate.against:
            return "report" if self.settings.profile == "smoke" else "pair"
        if self.settings.endpoint and not self.settings.endpoint.restart:
            return "attached"
        if record == "all" or (record == "missing" and (entry is None or len(entry["runs"]) < rule_of(gate, self.rule).base_runs)):
            return "record"
        return "report" if self.settings.profile == "smoke" else "judge" if known else "nothing"

    def show_plan(self, *, read: bool) -> None:
        """Say what will be measured and what it costs; also left in the scratch folder for the report, if anything runs."""
        from .harness.files import write_json
        from .harness.measure import clock

        blocks = list(self.blocks.values())
        if self.settings.replay:
            self.say(f"judging {len(blocks)} block(s) of {self.settings.replay} again; nothing is started or measured")
            if read:
                write_json(self.scratch / "plan.json", self.stored_run.document["plan"])
            return
        costs = [self.cost(b, read=read) for b in blocks]
        low, high = (sum(c.seconds[i] for c in costs) for i in (0, 1))
        starts = (sum(c.starts[0] for c in costs), sum(c.starts[1] for c in costs))
        scenarios, gates = sum(len(b.tasks) for b in blocks), sum(len(t.gates) for b in blocks for t in b.tasks)
        self.say(terminal.plan_line(len(blocks), starts, scenarios, gates, (clock(low), clock(high))))
        for block, one in zip(blocks, costs, strict=True):
            self.say(terminal.block_line(block.id, one.runs, [str(t.scenario) for t in block.tasks]))
        if read:
            for line in self.between_builds:
                self.say(f"  {line}")
            write_json(self.scratch / "builds.json", self.between_builds)  # as the plan: for the controller of xdist, which has none
            write_json(self.scratch / "plan.json", {"blocks": [plan_row(b, c) for b, c in zip(blocks, costs, strict=True)]})

    # -- measuring ------------------------------------------------------------------------------------------------

    def ensure(self, block_id: str) -> dict[str, Any]:
        """The block's result: measured now if nobody has, else read. Never raises but for an interrupt."""
        if block_id in self._results:
            return self._results[block_id]
        path = self._result_path(block_id)
        with self._alone():
            if not (found := read(path)) or not found["complete"]:
                found = measured(self, self.blocks[block_id], path)
        self._results[block_id] = found
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other worker of this session runs anything meanwhile; silent, since siblings only take turns.

        The turnstile lets a waiting measurement in before further tests.
        """
        with open(self.scratch / "turnstile.lock", "w") as turnstile, open(self.scratch / "session.lock", "w") as lock:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """An ordinary test of a worker: with others, but never beside a measurement, which would call it foreign load."""
        with open(self.scratch / "turnstile.lock", "w") as turnstile, open(self.scratch / "session.lock", "w") as lock:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_SH)
            fcntl.flock(turnstile, fcntl.LOCK_UN)
            yield

    def _result_path(self, block_id: str) -> Path:
        return self.scratch / "blocks" / f"{hashlib.sha256(block_id.encode()).hexdigest()[:16]}.json"

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Every device that is measured on, alone; in one order, so that no two sessions wait for each other."""
        from .harness.device import lease

        with ExitStack() as stack:
            for device in dict.fromkeys(self.devices()):
                stack.enter_context(lease(device, say=self.say))
            yield

    def devices(self) -> tuple[str, ...]:
        if self.settings.endpoint:
            return ("endpoint-" + re.sub(r"\W+", "-", self.settings.endpoint.address.origin),)
        if self.settings.gpu.kind == "cpu":
            return ("cpu",)
        from .core.cards import device_id
        from .harness.nvml import gpus_in_use

        found = gpus_in_use(os.environ)[: self.settings.tp]
        return tuple(sorted(str(device_id(d) or self.settings.gpu.key) for d in found))

    @contextmanager
    def by_hand(self, framework: str, model: str) -> Iterator[Any]:
        """A fresh server, alone on the device, for a test that measures by hand."""
        if self._by_hand:
            raise UserError("this test has a server by kv_endpoint or kv_drive already; use one of the two")
        self._by_hand += 1
        try:
            with (
                self._alone(),
                self.lease(),
                self.runner(framework, model).start(Arm(name="by-hand"), 1, 1) as running,
            ):
                yield running
        finally:
            self._by_hand -= 1

    def _spec(self, engine: Engine, model_key: str) -> Any:
        from .harness.engine import EngineSpec

        model = next(m for m in self.settings.models if m.key == model_key)
        return EngineSpec(
            framework=engine.framework, model=model, gpu=self.settings.gpu, python=engine.python,
            command=engine.command, serve_args=self.settings.serve_args, tp=self.settings.tp, other=self.settings.ab or "",
            start_timeout_s=self.settings.start_timeout_s, log_level=self.settings.log_level, corpus=self.settings.corpus,
        )  # fmt: skip

    def _attached(self, engine: Engine, model_key: str) -> Any:
        from .harness.attached import AttachedRunner

        s = self.settings
        model = next(m for m in s.models if m.key == model_key)
        assert s.endpoint
        return AttachedRunner(
            s.endpoint,
            engine.framework,
            model,
            s.gpu,
            engine.python,
            say=self.say,
            session_id=self.id,
            start_timeout_s=s.start_timeout_s,
        )

    def runner(self, framework: str, model: str) -> Any:
        """How runs of an engine and a model are made, once a session."""
        from .harness.engine import EngineRunner

        key = (framework, model)
        if key not in self._runners:
            engine = next(e for e in self.settings.engines if e.framework.name == framework)
            self._runners[key] = self.runner_for(*key) or (
                self._attached(engine, model)
                if self.settings.endpoint
                else EngineRunner(self._spec(engine, model), session_id=self.id, logs=self.scratch / "logs", say=self.say)
            )
        return self._runners[key]

    # -- afterwards -----------------------------------------------------------------------------------------------

    def found(self) -> list[dict[str, Any]]:
        """Every block result of this session, from all workers, in a stable order."""
        on_disk = (read(p) for p in (self.scratch / "blocks").glob("*.json"))
        results = {r["id"]: r for r in on_disk if r} | self._results
        return [results[name] for name in sorted(results)]

    def leave_nothing_empty(self) -> None:
        """Remove the scratch folder of a session that measured nothing (after a usage error, say)."""
        if not (self.scratch / "blocks").exists() and not (self.scratch / "error.log").exists():
            shutil.rmtree(self.scratch, ignore_errors=True)


def make_scratch() -> Path:
    """A fresh folder for this session; its name ends in the session's id (UTC time and process)."""
    import tempfile

    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = Path(tempfile.gettempdir()) / f"pytest-kvcache-{stamp}-{os.getpid():x}"
    folder.mkdir(mode=0o700)
    return folder

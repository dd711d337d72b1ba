"""How a block of a session comes to its result: measured on an engine, or judged again from a stored run."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import baseline as stored
from .core import builds
from .core.evidence import Evidence, changes, gather
from .core.gate import INVALID, Verdict
from .core.plan import Block, GateSpec
from .core.record import Trace
from .core.scenarios import Scenario
from .core.spec import SpecError, UserError

if TYPE_CHECKING:
    from .session import KvSession


def measured(session: KvSession, block: Block, path: Path) -> dict[str, Any]:
    """The block's result, also in the file `path` after every step. Never raises but for an interrupt: a fault is its `error`."""
    from .harness.files import write_json

    meter = None
    empty: dict[str, Any] = {
        "id": block.id, "environment": {}, "server_start_s": [], "spent_s": {}, "measurements": [], "traces": [],
        "evidence": {}, "broken": [],
    }  # fmt: skip
    try:
        if session.settings.replay:
            return _judge_again(session, block, path)
        with session.lease():
            meter = _meter(session, block, path)
            found: dict[str, Any] = meter.measure()
            return found
    except (UserError, SpecError) as e:
        error = str(e)
    except OSError as e:
        error = f"{e.filename or session.scratch}: {e.strerror or e}"
    except Exception as e:
        note = session.scratch / "error.log"
        note.write_text(traceback.format_exc())
        error = f"internal error: {e!r} (traceback in {note})"
    # What was measured before the fault is kept; its gates cannot be trusted.
    known = (meter.progress.plain() if meter else read(path) or {}) | {"complete": True, "error": error}
    found = empty | known | {"fault": True}
    found["verdicts"] = {g.key: _error_verdict(error, g.margin) for g in block.gates}
    with suppress(OSError):
        write_json(path, found)
    return found


def _judge_again(session: KvSession, block: Block, path: Path) -> dict[str, Any]:
    """The block of a stored run; against the baselines of then, or those of a folder that was named."""
    from .harness.files import write_json
    from .replay import evidence, judged, lost_row

    run = session.stored_run
    rows = run.rows(block.id)
    gates: Iterable[GateSpec] = block.gates
    known: dict[str, Evidence] = {}
    if session.settings.baselines_given:
        workloads = {row["scenario"]: row["workload"] for _, row, _ in rows if row["workload"]}
        wanted = {t.scenario: workloads.get(str(t.scenario), "") for t in block.tasks}
        known = _evidence(session, block, run.document["environments"][block.id], wanted)
        gates = [g for g in block.gates if g.against]  # no baseline has a part in these
    known |= evidence(run, block, gates, session.rule, smoke=session.settings.profile == "smoke")
    found = judged(run, block, known, session.rule)
    if session.settings.baselines_given:
        _compared(session, block, found, None)
    if session.settings.report:
        found["traces"] = [_keep(session, path.stem, trace) if trace else lost_row(row) for _, row, trace in rows]
    write_json(path, found)
    return found


def _meter(session: KvSession, block: Block, path: Path) -> Any:
    from .core.progress import Orders
    from .harness.files import write_json
    from .harness.measure import BlockMeter

    runner = session.runner(block.framework, block.model)
    environment = runner.environment(tuple(a for a in block.arms if not a.build))
    others = tuple(a for a in block.arms if a.build)
    other = runner.environment(others) if others else None
    evidence = _evidence(session, block, environment, {t.scenario: runner.workload(t.scenario) for t in block.tasks})
    deadline = session.began + session.settings.budget_s if session.settings.budget_s else None
    return BlockMeter(
        block, runner, Orders.against(evidence, session.rule, deadline), environment=environment,
        evidence={k: e.plain() for k, e in evidence.items()}, keep=lambda trace: _keep(session, path.stem, trace),
        save=lambda plain: write_json(path, _compared(session, block, plain, other)), say=session.say,
    )  # fmt: skip


def _compared(session: KvSession, block: Block, plain: dict[str, Any], other: Mapping[str, Any] | None) -> dict[str, Any]:
    """A block's result with what its environment has changed since each gate's baseline, or against that of the other build."""
    doc, now = session.document(block.framework, block.model), plain["environment"]
    between = builds.changes(other, now, block.arms) if other else None
    pairs = {g.key for g in block.gates if g.against}
    for key, evidence in plain["evidence"].items():
        if key not in pairs:
            evidence["changed"] = changes(doc, key, now)
        elif between is not None:
            evidence["changed"] = between
    return plain


def _evidence(session: KvSession, block: Block, environment: dict[str, Any], workloads: Mapping[Scenario, str]) -> dict[str, Evidence]:
    """What each gate of a block is judged against, from the baselines."""
    s = session.settings
    doc, noise = session.document(block.framework, block.model), session.noise(block.framework, block.model)
    record, smoke = "all" if s.calibrate else s.record, s.profile == "smoke"
    attached = bool(s.endpoint and not s.endpoint.restart)
    if s.replay:
        attached = any(e["need"] == "attached" for e in session.stored_run.document["blocks"][block.id]["evidence"].values())
    found = {}
    for task in block.tasks:
        now = stored.Current(environment=environment, workload=workloads[task.scenario])
        for gate in task.gates:
            found[gate.key] = gather(doc, gate, now, session.rule, record=record, smoke=smoke, noise=noise, attached=attached)
    return found


def _keep(session: KvSession, name: str, trace: Trace) -> dict[str, Any]:
    """The raw trace in a file, and the row that stands for it in the block's result."""
    from .harness.traces import keep

    row = keep(session.traces, name, trace)
    if row["lost"]:
        session.say(f"  {row['lost']}")
    return row


def _error_verdict(error: str, margin: float) -> dict[str, Any]:
    return dataclasses.asdict(Verdict(verdict=INVALID, reason=error, margin=margin))


def read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found
    except (OSError, ValueError):
        return None

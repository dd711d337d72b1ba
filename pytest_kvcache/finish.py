"""The end of a session, on the controller: store baselines, write the report, keep what an interrupt left."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .core import stale
from .core.calibration import Noise
from .core.gate import INVALID, false_alarms
from .core.lint import unclaimed
from .core.masking import masked
from .core.record import TRACE_NAMES
from .core.spec import UserError
from .recording import noise, record_block
from .report import terminal
from .report.quality_text import quality_table
from .rows import Rows, rerecord, settled
from .session import KvSession

Note = tuple[str, str]  # colour key of report.terminal, line
COUNTS = "kvcache/improvements"  # in pytest's cache, see core.stale


def finish(
    session: KvSession, verdicts: list[dict[str, Any]], *, exit_code: int, interrupted: str | None, cache: Any = None
) -> tuple[list[Note], bool]:
    """Record and report; the lines for the user, and whether something the user asked for could not be done.

    What the end of the session adds to a verdict joins its row's `remarks`. `cache` is pytest's own, None where it is off.
    """
    from . import __version__

    notes: list[Note] = []
    blocks = session.found()
    rows = _all_rows(session, blocks, verdicts)
    known: list[Noise] = []
    if (session.settings.record or session.settings.calibrate) and not interrupted:
        notes += record(session, blocks, rows, __version__)
        notes += _calibration(session, blocks, known)
    if session.settings.replay:
        notes += _as_stored(session, verdicts)
    notes += _outgrown(session, blocks, rows, cache) + _orphans(session, blocks)
    notes += [("", line) for line in quality_table(blocks)]
    failed = any(colour == "invalid" for colour, _ in notes)
    replay = session.settings.replay
    interrupted = interrupted or (session.stored_run.document["interrupted"] if replay else None)
    complete = not interrupted and all(b["complete"] for b in blocks)
    worth_it = blocks or interrupted  # a collection error must not replace an earlier report by an empty one
    target = session.settings.report if worth_it else None
    target = target or (session.scratch if blocks and not complete and not replay else None)
    if target:
        traces = trace_rows(blocks)
        files, problem = _requests(session, target, traces, blocks)
        failed = failed or bool(problem)
        notes += [("invalid", problem)] if problem else []
        code, every = 1 if failed else exit_code, list(rows.values())
        run = run_document(session, blocks, every, complete=complete, interrupted=interrupted, exit_code=code)
        run |= {"traces": traces} | files | _noise(session, known)
        if problem := _guarded(session, "writing the report", lambda: _write(session, target, run)):
            notes.append(("invalid", problem))
            failed = True
        else:
            notes.append(("", f"report: {target / 'report.html'} (data: {target / 'run.json'})"))
    if failed and not replay:
        notes.append(("inconclusive", f"nothing is lost: what was measured is kept in {session.scratch}"))
    elif blocks and not complete:
        kept = f"the stored run was not measured to its end ({interrupted})" if replay else f"what was measured is kept in {target}"
        notes.append(("inconclusive", f"incomplete: {kept}"))
    # The messages of a block that failed name files in the scratch folder: its log, a traceback.
    needed = (session.scratch / "error.log").exists() if replay else failed or any(b["error"] for b in blocks)
    if target != session.scratch and not needed:
        shutil.rmtree(session.scratch, ignore_errors=True)
    return notes, failed


def _as_stored(session: KvSession, verdicts: list[dict[str, Any]]) -> list[Note]:
    """Whether a run that was judged again came out as it did when it was measured, and whether all of it was.

    A verdict that got lost with its test is a fault (`invalid`) where the user did not select tests.
    """
    from .replay import compared, left_out, lost

    run, name = session.stored_run, session.settings.replay
    old = run.document["verdicts"]
    same, lines = compared(old, verdicts)
    notes = [("", f"{same} of {len(verdicts)} verdict(s) are those of {name}, to the last digit"), *(("", f"  {x}") for x in lines)]
    left, failed = left_out(old, verdicts)
    if left:
        fault = not session.settings.some and (failed or not verdicts)
        said = f"{left} verdict(s) of {name} were not judged again, {failed} of them failed then: no test here claims them"
        notes.append(("invalid" if fault else "", said))
    if gone := lost(run):
        notes.append(("inconclusive", f"{gone} of {len(run.traces)} measurements stand as they were stored: their requests are lost"))
    return notes


def _guarded(session: KvSession, what: str, step: Callable[[], object]) -> str:
    """Run a step of the end; its fault in one line, or an empty string. A fault of ours must not cost the measurements."""
    try:
        step()
    except UserError as e:
        return str(e)
    except Exception as e:
        note = session.scratch / "error.log"
        with suppress(OSError):
            note.write_text(traceback.format_exc())
        return f"internal error while {what}: {e!r} (traceback in {note})"
    return ""


def _all_rows(session: KvSession, blocks: Sequence[Mapping[str, Any]], verdicts: Sequence[dict[str, Any]]) -> Rows:
    """Verdicts that tests have read, and those that none has (after -x or an interrupt, say)."""
    rows = {(v["block"], v["key"]): v for v in verdicts}
    for block in blocks:
        for row in settled(session, dict(block)):
            rows.setdefault((row["block"], row["key"]), row)
    return rows


def _outgrown(session: KvSession, blocks: Sequence[Mapping[str, Any]], rows: Rows, cache: Any) -> list[Note]:
    """Count the sessions in a row in which a gate was better than its baseline, and warn of a stale one.

    What was not measured now, or not judged (smoke, recording), counts for nothing. Without a cache there is no count.
    """
    s = session.settings
    base = {(b["id"], key): e["base"] for b in blocks for key, e in b["evidence"].items() if e["need"] not in ("pair", "limit")}
    if cache is None or s.replay or s.profile == "smoke":
        return []
    found = {
        where: stale.Compared(name=" ".join((s.gpu.key, *where)), stored=stale.mark(base[where]["sessions"]), verdict=row["verdict"])
        for where, row in rows.items() if where in base and row["p_seq"] is not None and row["verdict"] != INVALID
    }  # fmt: skip
    counts: dict[str, dict[str, Any]] = {}
    # A cache that cannot be read or written costs the warning, not the session.
    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        counts = stale.counted(cache.get(COUNTS, {}), found.values())
        if found:
            cache.set(COUNTS, counts)
    old = 0
    for where, gate in found.items():
        n = counts.get(gate.name, {}).get("sessions", 0)
        if n >= stale.SESSIONS:
            words = f"stale baseline: an improvement in {n} sessions in a row; a later loss of the same size would pass"
            rows[where]["remarks"].append(words)
            old += 1
    return [("inconclusive", f"{old} gate(s) have a stale baseline; to store the better level: {rerecord(session)}")] if old else []


def _calibration(session: KvSession, blocks: list[dict[str, Any]], known: list[Noise]) -> list[Note]:
    """What the sessions that calibrated this machine tell of it by now, also into `known`; nothing in a session that did not."""
    if not session.settings.calibrate:
        return []
    problem = _guarded(session, "reading the calibration", lambda: known.extend(noise(session, blocks)))
    return [("invalid", problem)] if problem else [("", line) for line in terminal.noise_lines(known)]


def _orphans(session: KvSession, blocks: Sequence[Mapping[str, Any]]) -> list[Note]:
    """Stored numbers that no test of a whole session claims any more: what they guarded is guarded no longer.

    Only the profiles that hold every scenario can tell, and only when all tests were asked for.
    """
    s, notes = session.settings, list[Note]()
    if s.some or s.replay or s.ab or s.calibrate or s.record or s.profile not in ("full", "acceptance"):
        return []
    for framework, model in sorted({tuple(b["id"].split("/", 2)[:2]) for b in blocks}):
        claimed = [key for b in blocks if b["id"].startswith(f"{framework}/{model}/") for key in b["verdicts"]]
        if gone := unclaimed(session.document(framework, model)["entries"], claimed):
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            words = f"no test claims {gone[0]}{more} any more, stored for {framework}/{model}: renamed, or gone"
            notes.append(("inconclusive", words))
    return notes


def record(session: KvSession, blocks: list[dict[str, Any]], rows: Rows, plugin: str) -> list[Note]:
    """Store this session's runs, block by block; a note for each, `invalid` where a file could not be written."""
    notes: list[Note] = []
    for block in blocks:
        stored_in: list[str] = []

        def store(block: dict[str, Any] = block, into: list[str] = stored_in) -> None:
            into += record_block(session, block, rows, plugin)

        problem = _guarded(session, f"recording {block['id']}", store)
        notes += [("recorded", line) for line in stored_in] + ([("invalid", problem)] if problem else [])
    return notes


def trace_rows(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`traces` of `run.json`: what the column `trace` of the requests counts into."""
    return [{"block": b["id"], **{k: t[k] for k in TRACE_NAMES}} for b in blocks for t in b["traces"]]


def _requests(session: KvSession, target: Path, rows: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Every request into one file beside `run.json`: what that says of it, and what went wrong. A lost trace is marked in its row."""
    from .harness.traces import COLUMNS, merge

    known = [t for b in blocks for t in b["traces"]]
    sources = [session.traces / t["file"] if t["file"] else None for t in known]
    lost, files = {i: t["lost"] for i, t in enumerate(known) if t["lost"]}, {}

    def gather() -> None:
        digest, unread = merge(target / "records.npz", sources, [row["block"] for row in rows])
        files["records.npz"] = digest
        lost.update(unread)

    problem = _guarded(session, "writing the requests", gather)
    for i, reason in lost.items():
        rows[i]["lost"] = reason
    if lost and not problem:
        problem = next(iter(lost.values())) + (f" (and of {len(lost) - 1} more runs)" if len(lost) > 1 else "")
    return {"columns": COLUMNS, "files": files}, problem


def _write(session: KvSession, target: Path, run: dict[str, Any]) -> None:
    from .harness.storage import write_run
    from .report.html import render

    write_run(target, run, render(run) if find_spec("jinja2") else None)
    logs = session.scratch / "logs"
    if logs.is_dir() and target != session.scratch:
        _copy_logs(session, logs, target / "logs")


def _copy_logs(session: KvSession, logs: Path, target: Path) -> None:
    """The servers' logs, without what we gave them that is secret; a folder of a report is passed on."""
    from .core.commandline import secret_values
    from .harness.logs import copy_masked

    s = session.settings
    words = [w for e in s.engines for w in e.command] + list(s.serve_args)
    copy_masked(logs, target, secret_values(words, os.environ, *(e.framework.env for e in s.engines)))


def run_document(
    session: KvSession,
    blocks: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    *,
    complete: bool,
    interrupted: str | None,
    exit_code: int,
) -> dict[str, Any]:
    """`run.json` but for its requests: plan, environments, measurements, verdicts (`rows`)."""
    from . import __version__

    plan_file = session.scratch / "plan.json"
    plan = json.loads(plan_file.read_text()) if plan_file.is_file() else {"blocks": []}
    kept = ("complete", "error", "server_start_s", "spent_s", "measurements", "evidence", "broken", "fault")
    return {
        "schema": "pytest-kvcache/run/1", "complete": complete, "interrupted": interrupted,
        "session": session.id, "started": session.started, "seconds": round(time.monotonic() - session.began, 1),
        "command": session.settings.command, "exit_code": exit_code, "plugin": __version__, "gpu": session.settings.gpu.key,
        "profile": session.settings.profile, "plan": plan, "environments": {b["id"]: b["environment"] for b in blocks},
        "blocks": {b["id"]: {k: b[k] for k in kept if k in b} for b in blocks}, "verdicts": rows,
        **_builds(session), **_replayed(session), "expected_false_alarms": false_alarms(sum(r["p_seq"] is not None for r in rows)),
    }  # fmt: skip


def _noise(session: KvSession, known: Sequence[Noise]) -> dict[str, Any]:
    """`noise` of a session that calibrated; of a stored one as it was."""
    replayed = session.stored_run.document.get("noise") if session.settings.replay else None
    calibrates = session.settings.calibrate or replayed is not None
    return {"noise": replayed or [dataclasses.asdict(n) for n in known]} if calibrates else {}


def _builds(session: KvSession) -> dict[str, Any]:
    """The other interpreter of a comparison of two builds, and what differs between them."""
    ab, replay, told = session.settings.ab, session.settings.replay, session.scratch / "builds.json"
    if not ab:
        return {}
    lines = session.stored_run.document.get("builds", []) if replay else json.loads(told.read_text()) if told.is_file() else []
    return {"ab": masked(ab), "builds": lines}


def _replayed(session: KvSession) -> dict[str, Any]:
    """Where the figures of a run come from that was not measured."""
    if not session.settings.replay:
        return {}
    old = session.stored_run.document
    return {"replayed": {"file": str(session.stored_run.file)} | {k: old[k] for k in ("session", "started", "plugin")}}

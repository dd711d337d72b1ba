"""The end of a session, on the controller: store baselines, write the report, keep what an interrupt left."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .core import baseline as stored
from .core.gate import NO_BASELINE, false_alarms
from .core.metrics import find_metric
from .core.spec import UserError
from .rows import settled
from .session import KvSession

Note = tuple[str, str]  # colour key of report.terminal, line


def finish(session: KvSession, verdicts: list[dict[str, Any]], *, exit_code: int, interrupted: str | None) -> tuple[list[Note], bool]:
    """Record and report; the lines for the user, and whether something the user asked for could not be done."""
    from . import __version__

    notes: list[Note] = []
    blocks = session.found()
    if session.settings.record and not interrupted:
        notes += record(session, blocks, __version__)
    if session.settings.replay:
        notes += _as_stored(session, verdicts)
    failed = any(colour == "invalid" for colour, _ in notes)
    complete = not interrupted and all(b["complete"] for b in blocks)
    worth_it = blocks or interrupted  # a collection error must not replace an earlier report by an empty one
    target = session.settings.report if worth_it else None
    target = target or (session.scratch if blocks and not complete else None)
    if target:
        traces = trace_rows(blocks)
        files, problem = _requests(session, target, traces, blocks)
        failed = failed or bool(problem)
        notes += [("invalid", problem)] if problem else []
        run = run_document(session, blocks, verdicts, complete=complete, interrupted=interrupted, exit_code=1 if failed else exit_code)
        run |= {"traces": traces} | files
        if problem := _guarded(session, "writing the report", lambda: _write(session, target, run)):
            notes.append(("invalid", problem))
            failed = True
        else:
            notes.append(("", f"report: {target / 'report.html'} (data: {target / 'run.json'})"))
    if failed:
        notes.append(("inconclusive", f"nothing is lost: what was measured is kept in {session.scratch}"))
    elif blocks and not complete:
        notes.append(("inconclusive", f"incomplete: what was measured is kept in {target}"))
    # The messages of a block that failed name files in the scratch folder: its log, a traceback.
    if target != session.scratch and not failed and not any(b["error"] for b in blocks):
        shutil.rmtree(session.scratch, ignore_errors=True)
    return notes, failed


def _as_stored(session: KvSession, verdicts: list[dict[str, Any]]) -> list[Note]:
    """Whether a run that was judged again came out as it did when it was measured."""
    from .replay import compared

    same, lines = compared(session.stored_run.document["verdicts"], verdicts)
    return [
        ("", f"{same} of {len(verdicts)} verdict(s) are those of {session.settings.replay}, to the last digit"),
        *(("", f"  {x}") for x in lines),
    ]


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


def record(session: KvSession, blocks: list[dict[str, Any]], plugin: str) -> list[Note]:
    """Store this session's recorded runs, block by block; a note for each, `invalid` where a file could not be written.

    Only whole, valid evidence is stored: gates whose runs were all made and none of them spoiled.
    """
    notes: list[Note] = []
    for block in blocks:
        stored_in: list[str] = []
        problem = _guarded(session, f"recording {block['id']}", lambda b=block, s=stored_in: s.extend(_record(session, b, plugin)))  # type: ignore[misc]
        notes += [("recorded", line) for line in stored_in] + ([("invalid", problem)] if problem else [])
    return notes


def _record(session: KvSession, block: dict[str, Any], plugin: str) -> list[str]:
    """The file is read anew under a lock, so that two sessions that end together both keep their runs."""
    from .harness.baselines import load_baseline, locked, save_baseline

    s, recordings = session.settings, _recordings(session, block)
    if not block["complete"] or not recordings:
        return []
    framework, model, arms = block["id"].split("/", 2)
    about = {"started": session.started, "plugin": plugin, "environment": block["environment"]}
    with locked(s.baselines):
        doc = load_baseline(s.baselines, s.gpu.key, framework, model)
        name = f"{session.id}:{arms}"
        merged = stored.merge(doc, recordings, session=name, about=about, now_iso=session.started, replace=s.record == "all")
        path = save_baseline(s.baselines, merged)
    return [f"recorded {len(recordings)} gate(s) of {block['id']} in {path}"]


def _recordings(session: KvSession, block: dict[str, Any]) -> list[stored.Recording]:
    found, wanted = [], session.rule.record_runs
    workloads = {t["scenario"]: t["workload"] for t in block["traces"] if t["requests"]}
    for key, verdict in block["verdicts"].items():
        _, scenario, arm, metric = key.split("/")
        runs = [m for m in block["measurements"] if m["valid"] and (m["scenario"], m["arm"]) == (scenario, arm)]
        if verdict["verdict"] != NO_BASELINE or verdict["reason"] or len(runs) < wanted:
            continue
        rows = tuple(_run(m, metric) for m in runs[:wanted])
        found.append(stored.Recording(key=key, metric=find_metric(metric), workload=workloads[scenario], runs=rows))
    return found


def _run(m: dict[str, Any], metric: str) -> dict[str, Any]:
    """One run as a baseline stores it."""
    canary = {} if m["canary"] is None else {"canary": m["canary"]}
    return {"value": m["metrics"][metric], "n": m["requests"], "failed": m["failed"]} | canary


def trace_rows(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`traces` of `run.json`: what the column `trace` of the requests counts into."""
    return [{"block": b["id"], **{k: t[k] for k in ("scenario", "arm", "run", "workload")}} for b in blocks for t in b["traces"]]


def _requests(session: KvSession, target: Path, rows: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Every request into one file beside `run.json`: what that says of it, and what went wrong. A lost trace is marked in its row."""
    from .harness.traces import COLUMNS, merge

    known = [t for b in blocks for t in b["traces"]]
    sources = [session.traces / t["file"] if t["file"] else None for t in known]
    lost, files = {i: t["lost"] for i, t in enumerate(known) if t["lost"]}, {}

    def gather() -> None:
        digest, unread = merge(target / "records.npz", sources)
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
        shutil.copytree(logs, target / "logs", dirs_exist_ok=True)


def run_document(
    session: KvSession,
    blocks: list[dict[str, Any]],
    verdicts: list[dict[str, Any]],
    *,
    complete: bool,
    interrupted: str | None,
    exit_code: int,
) -> dict[str, Any]:
    """`run.json` but for its requests: plan, environments, measurements, verdicts. Verdicts no test has read yet are included."""
    from . import __version__

    plan_file = session.scratch / "plan.json"
    plan = json.loads(plan_file.read_text()) if plan_file.is_file() else {"blocks": []}
    rows = {(v["block"], v["key"]): v for v in verdicts}
    for block in blocks:
        for row in settled(session, block):
            rows.setdefault((row["block"], row["key"]), row)
    kept = ("complete", "error", "server_start_s", "spent_s", "measurements", "evidence", "broken")
    return {
        "schema": "pytest-kvcache/run/1", "complete": complete, "interrupted": interrupted,
        "session": session.id, "started": session.started, "seconds": round(time.monotonic() - session.began, 1),
        "command": session.settings.command, "exit_code": exit_code, "plugin": __version__, "gpu": session.settings.gpu.key,
        "profile": session.settings.profile, "plan": plan, "environments": {b["id"]: b["environment"] for b in blocks},
        "blocks": {b["id"]: {k: b[k] for k in kept} for b in blocks}, "verdicts": list(rows.values()),
        **_replayed(session), "expected_false_alarms": false_alarms(sum(r["p_seq"] is not None for r in rows.values())),
    }  # fmt: skip


def _replayed(session: KvSession) -> dict[str, Any]:
    """Where the figures of a run come from that was not measured."""
    if not session.settings.replay:
        return {}
    old = session.stored_run.document
    return {"replayed": {"file": str(session.stored_run.file)} | {k: old[k] for k in ("session", "started", "plugin")}}

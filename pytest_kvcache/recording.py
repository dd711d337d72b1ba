"""What is stored of a session: runs of gates without a baseline, and of those that passed against one that still gathers runs.

On the controller only, at the end of a session that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core import baseline as stored
from .core.calibration import SUFFIX, Noise, of_gates
from .core.evidence import from_plain
from .core.gate import MIN_BASE_RUNS, NO_BASELINE, PASS
from .core.metrics import find_metric
from .core.still import STILL
from .core.windows import runs_of
from .rows import Rows
from .session import KvSession

NOT_PASSED = "no run of it was added to the incomplete baseline: only those of a pass against it are"
REPLACED = "it passed, but no run of it was added: another session has changed its baseline meanwhile"


def record_block(session: KvSession, block: Mapping[str, Any], rows: Rows, plugin: str) -> list[str]:
    """Store what a block's gates leave to be stored; the lines for the user. What concerns one gate joins its row's `remarks`.

    The file is read anew under a lock, so that two sessions that end together both keep their runs. Only whole, valid evidence
    is stored: gates whose runs were all made and none of them spoiled. UserError where a file cannot be read or written.
    """
    from .harness.baselines import load_baseline, locked, save_baseline

    s, gathering = session.settings, _gathering(session, block)
    recordings = _recordings(session, block, gathering)
    if not block["complete"] or not (recordings or gathering):
        return []
    framework, model, arms = block["id"].split("/", 2)
    model += SUFFIX if s.calibrate else ""
    about = {"started": session.started, "plugin": plugin, "environment": block["environment"]}
    with locked(s.baselines):
        doc = load_baseline(s.baselines, s.gpu.key, framework, model)
        wanted = [r for r in recordings if stored.still_wanted(doc, r, block["environment"])]
        name = f"{session.id}:{arms}"
        doc = stored.merge(doc, wanted, session=name, about=about, now_iso=session.started, replace=s.record == "all")
        path = save_baseline(s.baselines, doc) if wanted else None
    remarks = dict.fromkeys(gathering, NOT_PASSED) | {r.key: REPLACED for r in recordings}
    remarks |= {r.key: _stored_words(r, len(doc["entries"][r.key]["runs"])) for r in wanted}
    for key, words in remarks.items():
        if words and (row := rows.get((block["id"], key))):
            row["remarks"].append(words)
    counts = {
        "calibrated" if s.calibrate else "recorded": sum(r.judged is None for r in wanted),
        "added runs to": sum(r.judged is not None for r in wanted),
    }
    return [f"{what} {n} gate(s) of {block['id']} in {path}" for what, n in counts.items() if n]


def noise(session: KvSession, blocks: list[dict[str, Any]]) -> list[Noise]:
    """What is known of the machine's noise after a session that calibrated it: of each gate that it measured, over all such sessions."""
    from .harness.baselines import load_baseline

    s, found = session.settings, []
    for block in blocks:
        framework, model, _ = block["id"].split("/", 2)
        margins = {key: v["margin"] for key, v in block["verdicts"].items()}  # the controller of xdist has no plan
        doc = load_baseline(s.baselines, s.gpu.key, framework, model + SUFFIX)
        found += of_gates(doc, margins, block["environment"], session.gate_rule)
    return found


def _stored_words(r: stored.Recording, total: int) -> str:
    if r.judged is not None:
        return f"it passed: its first {len(r.runs)} runs were added to the baseline, which has {total} now"
    if r.metric.drift is not None:
        return ""
    return f"{total} runs are stored: judged once there are {MIN_BASE_RUNS}" if total < MIN_BASE_RUNS else ""


def _gathering(session: KvSession, block: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Gates that were judged although their baseline still gathers runs, with the stored values they were judged against."""
    if session.settings.record != "missing":
        return {}
    bases = {key: from_plain(e).base for key, e in block["evidence"].items() if e["need"] == "judge"}
    still = {key for key in bases if find_metric(key.rsplit("/", 1)[1]).drift is not None}  # whole with its first run
    return {key: base.runs for key, base in bases.items() if key not in still and stored.incomplete(base, session.rule)}


def _recordings(session: KvSession, block: Mapping[str, Any], gathering: Mapping[str, tuple[float, ...]]) -> list[stored.Recording]:
    """What is to be stored: gates without a usable baseline, and those that passed against one that still gathers runs.

    An improvement is not added: a level between two would hide a part of a later loss. It takes the place of the old one only
    when that is asked for.
    """
    found = []
    workloads = {t["scenario"]: t["workload"] for t in block["traces"] if t["requests"]}
    for key, verdict in block["verdicts"].items():
        _, scenario, arm, metric = key.split("/")
        wanted = (session.rule if find_metric(metric).drift is None else STILL).record_runs
        runs = runs_of(block["measurements"], scenario, arm)
        fresh = verdict["verdict"] == NO_BASELINE and not verdict["reason"]
        passed = verdict["verdict"] == PASS and key in gathering
        if not (fresh or passed) or len(runs) < wanted:
            continue
        kept = tuple(_run(m, metric) for m in runs[:wanted])
        found.append(
            stored.Recording(
                key=key, metric=find_metric(metric), workload=workloads[scenario], runs=kept, judged=gathering[key] if passed else None
            )
        )  # fmt: skip
    return found


def _run(m: dict[str, Any], metric: str) -> dict[str, Any]:
    """One run as a baseline stores it."""
    canary = {} if m["canary"] is None else {"canary": m["canary"]}
    return {"value": m["metrics"][metric], "n": m["requests"], "failed": m["failed"]} | canary

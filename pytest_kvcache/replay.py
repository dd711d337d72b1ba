"""Judge a stored run again: from its requests to figures, validity and verdicts, by the rules of today and without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .core import baseline as baselines
from .core.evidence import Evidence, from_plain, rule_of
from .core.gate import INVALID, Base, Rule, Verdict
from .core.plan import Block, GateSpec
from .core.record import TRACE_NAMES, Trace
from .core.spec import UserError

NOT_STORED = "the stored run was judged without this gate"
FIGURES = ("verdict", "reason", "value", "baseline", "change", "low", "high", "margin", "p_seq", "runs", "baseline_runs", "notes")
CURE = "name the run.json of a folder that --kv-report has written"

Row = tuple[Mapping[str, Any], Mapping[str, Any], Trace | None]
"""A measurement, the row of `traces` that says what it is of, and its requests."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as it was written: the document and, in the order of its `traces`, the requests (None: lost when it was written)."""

    file: Path
    document: Mapping[str, Any]
    traces: Sequence[Trace | None]

    def rows(self, block: str) -> list[Row]:
        """Each measurement of a block, what it is of, and its requests: all in the order in which they were made.

        UserError where they are not of one number.
        """
        mine = [(row, t) for row, t in zip(self.document["traces"], self.traces, strict=True) if row["block"] == block]
        measured = self.document["blocks"][block]["measurements"]
        if len(mine) != len(measured):
            where = f"@ $.blocks[{block!r}].measurements"
            raise UserError(f"{self.file}: damaged: {len(measured)} measurements, but the requests of {len(mine)} {where}")
        return [(m, row, t) for m, (row, t) in zip(measured, mine, strict=True)]


def head(path: Path) -> tuple[Path, dict[str, Any]]:
    """`run.json` of a file or its folder, checked; UserError in one line for anything else."""
    from .harness.files import read_json, schema_problem

    file = path / "run.json" if path.is_dir() else path
    found = read_json(file, "the stored run", CURE)
    if problem := schema_problem(found, "run"):
        raise UserError(f"{file}: no run that can be judged again: {problem}; {CURE}")
    if not (plan := plan_of(found)):
        raise UserError(f"{file}: nothing was measured in this run; {CURE}")
    if lacking := [name for name in plan if name not in found["environments"]]:
        raise UserError(f"{file}: damaged: nothing on {lacking[0]} @ $.environments")
    if not found.get("files", {}).get("records.npz"):
        raise UserError(f"{file}: it names no file of requests, so nothing can be judged again")
    return file, found


def load(file: Path, found: Mapping[str, Any]) -> StoredRun:
    """The whole run whose `head` this is; UserError where the requests are missing, damaged, or not those that the run names."""
    from .harness.traces import blocks_of, digest, read

    records = file.with_name("records.npz")
    if digest(records) != found["files"]["records.npz"]:
        raise UserError(f"{records}: not the requests that {file} names (their SHA-256 differs)")
    run = StoredRun(file=file, document=found, traces=read(records))
    _check(run, blocks_of(records))
    return run


def _check(run: StoredRun, blocks: Sequence[str]) -> None:
    """That requests, their rows and the measurements belong together, one by one."""
    rows = run.document["traces"]
    if len(rows) != len(run.traces) or list(blocks) != [row["block"] for row in rows]:
        raise UserError(f"{run.file}: damaged: its rows are not those of records.npz @ $.traces")
    for i, (row, trace) in enumerate(zip(rows, run.traces, strict=True)):
        if row["block"] not in run.document["blocks"] or (trace and any(getattr(trace, k) != row[k] for k in TRACE_NAMES)):
            raise UserError(f"{run.file}: damaged: not what its requests are of @ $.traces[{i}]")
    for name in run.document["blocks"]:
        for i, (m, row, trace) in enumerate(run.rows(name)):
            same = all(m[k] == row[k] for k in ("scenario", "arm", "run"))
            if not same or (trace and not (trace.records or trace.tokens) and m["valid"]):
                raise UserError(f"{run.file}: damaged: not what its requests are of @ $.blocks[{name!r}].measurements[{i}]")


def evidence(run: StoredRun, block: Block, gates: Iterable[GateSpec], rule: Rule, *, smoke: bool) -> dict[str, Evidence]:
    """What gates of a block were judged against when it was measured, and what they need by the rule of today."""
    known = run.document["blocks"][block.id]["evidence"]
    found = {}
    for gate in gates:
        try:
            one = from_plain(known[gate.key]) if gate.key in known else Evidence(need="judge", base=Base(missing=NOT_STORED))
        except (TypeError, KeyError, AttributeError) as e:
            raise UserError(f"{run.file}: damaged @ $.blocks[{block.id!r}].evidence[{gate.key!r}] ({e})") from e
        if gate.once:
            one = Evidence(need="limit", base=Base())
        elif gate.against:
            one = replace(one, need="report" if smoke else "pair")
        elif one.need not in ("record", "attached"):
            one = replace(one, need=baselines.need(one.base, rule_of(gate, rule), record=None, smoke=smoke))
        found[gate.key] = one
    return found


def without(doc: Mapping[str, Any], session: str) -> dict[str, Any]:
    """A baseline document without the runs of a session: a run is not judged against itself."""
    entries = {key: {**e, "runs": [r for r in e["runs"] if r["session"].partition(":")[0] != session]} for key, e in doc["entries"].items()}
    return {**doc, "entries": entries}


def judged(run: StoredRun, block: Block, known: Mapping[str, Evidence], rule: Rule) -> dict[str, Any]:
    """The block's result as `BlockMeter.measure` gives it: all figures computed anew, every gate settled on all runs."""
    from .core.progress import Orders, Progress, settle

    stored = run.document["blocks"][block.id]
    progress = Progress(
        block=block, environment=run.document["environments"][block.id], complete=stored["complete"], error=stored["error"],
        server_start_s=stored["server_start_s"], spent_s=stored["spent_s"], evidence={k: e.plain() for k, e in known.items()},
    )  # fmt: skip
    progress.measurements = [again(m, trace) for m, _, trace in run.rows(block.id)]
    progress.broken = _broken(stored, progress.measurements)
    orders = Orders.against(known, rule)
    for gate in block.gates:
        # As the session did: while it measured, and when nothing more came. After a fault of ours it trusted nothing.
        verdict = None if stored.get("fault") else settle(gate, progress, orders, final=False)
        if verdict is None and stored["error"]:
            verdict = Verdict(verdict=INVALID, reason=stored["error"], margin=gate.margin)
        verdict = verdict or settle(gate, progress, orders, final=True)
        assert verdict is not None  # final
        progress.verdicts[gate.key] = verdict
    return progress.plain() | ({"fault": True} if stored.get("fault") else {})


def _broken(stored: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Scenario and arm that do not count: by the last attempt that was measured, or because the server failed without one."""
    was, now = ({(m["scenario"], m["arm"]): m for m in found} for found in (stored["measurements"], rows))
    told = {(b["scenario"], b["arm"]): b["reason"] for b in stored["broken"]}
    silent = {where: why for where, why in told.items() if where not in was or was[where]["valid"] or why != was[where]["invalid"]}
    # A window that was spoiled once and was to be measured again when the session ended is no verdict on its scenario.
    measured = {where: m["invalid"] for where, m in now.items() if not m["valid"] and (where in told or was[where]["valid"])}
    return measured | silent


def again(row: Mapping[str, Any], trace: Trace | None) -> dict[str, Any]:
    """A measurement from its requests; as it was stored where they are lost, or where nothing was measured (a lost server, say)."""
    from .core.measurement import measurement
    from .core.validity import trace_problem

    if trace is None or not (trace.records or trace.tokens):
        return dict(row)
    problem = trace_problem(trace)
    return measurement(trace, problem[0] if problem else None) | {"canary": row["canary"]}


def lost_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for a trace that was lost when the run was written, as `harness.traces.keep` gives it."""
    why = row.get("lost") or "its requests are not in the stored run"
    return {k: row[k] for k in TRACE_NAMES} | {"requests": 0, "file": None, "lost": why}


def plan_of(run: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The scenarios of each block of a run."""
    return {name: frozenset(b["scenarios"]) for b in run["plan"]["blocks"] if (name := b["id"]) in run["blocks"]}


def compared(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many verdicts are those of the stored run to the last digit, and for each other gate what differs."""
    was = {(v["block"], v["key"]): v for v in old}
    same, lines = 0, []
    for v in new:
        name, before = f"{v['block']} {v['key']}", was.get((v["block"], v["key"]))
        if before is None:
            lines.append(f"{name}: {v['verdict']}; the stored run has no verdict on it")
            continue
        different = [field for field in FIGURES if v.get(field) != before.get(field)]
        if not different:
            same += 1
        elif v["verdict"] != before["verdict"]:
            lines.append(f"{name}: {before['verdict']} -> {v['verdict']} (also different: {', '.join(different[1:]) or 'nothing'})")
        else:
            lines.append(f"{name}: {v['verdict']} as stored; different: {', '.join(different)}")
    return same, lines


def left_out(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many verdicts of the stored run no test has asked for again, and how many of them failed."""
    judged = {(v["block"], v["key"]) for v in new}
    left = [v for v in old if (v["block"], v["key"]) not in judged]
    return len(left), sum(v["outcome"] == "failed" for v in left)


def lost(run: StoredRun) -> int:
    """How many measurements stand as they were stored, because their requests are lost."""
    return sum(t is None for t in run.traces)

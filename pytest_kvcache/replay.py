"""Judge a stored run again: from its requests to figures, validity and verdicts, by the rules of today and without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .core.evidence import Evidence, from_plain
from .core.gate import INVALID, Base, Rule, Verdict
from .core.plan import Block
from .core.record import Trace
from .core.spec import UserError

NOT_STORED = "the stored run was judged without this gate"
FIGURES = ("verdict", "reason", "value", "baseline", "change", "low", "high", "margin", "p_seq", "runs", "baseline_runs", "notes")
CURE = "name the run.json of a folder that --kv-report has written"


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run as it was written: the document and, in the order of its `traces`, the requests (None: lost when it was written)."""

    file: Path
    document: Mapping[str, Any]
    traces: Sequence[Trace | None]

    def rows(self, block: str) -> list[tuple[Mapping[str, Any], Trace | None]]:
        """Each measurement of a block beside its requests: both are in the order in which they were made."""
        requests = [t for row, t in zip(self.document["traces"], self.traces, strict=True) if row["block"] == block]
        return list(zip(self.document["blocks"][block]["measurements"], requests, strict=True))


def head(path: Path) -> tuple[Path, dict[str, Any]]:
    """`run.json` of a file or its folder, checked; UserError in one line for anything else."""
    from .harness.files import read_json, schema_problem

    file = path / "run.json" if path.is_dir() else path
    found = read_json(file, "the stored run", CURE)
    if problem := schema_problem(found, "run"):
        raise UserError(f"{file}: no run that can be judged again: {problem}; {CURE}")
    if not plan_of(found):
        raise UserError(f"{file}: nothing was measured in this run; {CURE}")
    if not found.get("files", {}).get("records.npz"):
        raise UserError(f"{file}: it names no file of requests, so nothing can be judged again")
    return file, found


def load(path: Path) -> StoredRun:
    """The whole run; UserError where the requests are missing, damaged, or not those that the run names."""
    from .harness.traces import digest, read

    file, found = head(path)
    records = file.with_name("records.npz")
    if digest(records) != found["files"]["records.npz"]:
        raise UserError(f"{records}: not the requests that {file} names (their SHA-256 differs)")
    run = StoredRun(file=file, document=found, traces=read(records))
    for block in found["blocks"]:
        try:
            run.rows(block)
        except ValueError as e:
            raise UserError(f"{file}: damaged: its measurements and its requests are not of the same number @ $.blocks[{block!r}]") from e
    return run


def evidence(run: StoredRun, block: Block) -> dict[str, Evidence]:
    """What the gates of a block were judged against when it was measured."""
    known = run.document["blocks"][block.id]["evidence"]
    found = {}
    for gate in (g for t in block.tasks for g in t.gates):
        try:
            found[gate.key] = from_plain(known[gate.key]) if gate.key in known else Evidence(need="judge", base=Base(missing=NOT_STORED))
        except (TypeError, KeyError, AttributeError) as e:
            raise UserError(f"{run.file}: damaged @ $.blocks[{block.id!r}].evidence[{gate.key!r}] ({e})") from e
    return found


def judged(run: StoredRun, block: Block, known: Mapping[str, Evidence], rule: Rule) -> dict[str, Any]:
    """The block's result as `BlockMeter.measure` gives it: all figures computed anew, every gate settled on all runs."""
    from .harness.measure import Orders, Progress, settle

    stored = run.document["blocks"][block.id]
    progress = Progress(
        block=block, environment=run.document["environments"][block.id], complete=True, error=stored["error"],
        server_start_s=stored["server_start_s"], spent_s=stored["spent_s"], evidence={k: e.plain() for k, e in known.items()},
    )  # fmt: skip
    progress.measurements = [again(row, trace) for row, trace in run.rows(block.id)]
    progress.broken = _broken(stored, progress.measurements)
    orders = Orders(rule=rule, needs={k: e.need for k, e in known.items()}, bases={k: e.base for k, e in known.items()})
    for gate in (g for t in block.tasks for g in t.gates):
        # As the session did: while it measured, and when nothing more came.
        verdict = settle(gate, progress, orders, final=False)
        if verdict is None and stored["error"]:
            verdict = Verdict(verdict=INVALID, reason=stored["error"], margin=gate.margin)
        verdict = verdict or settle(gate, progress, orders, final=True)
        assert verdict is not None  # final
        progress.verdicts[gate.key] = verdict
    return progress.plain()


def _broken(stored: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Scenario and arm that do not count: by the last attempt that was measured, or because the server failed without one."""
    was, now = ({(m["scenario"], m["arm"]): m for m in found} for found in (stored["measurements"], rows))
    silent = {(b["scenario"], b["arm"]): b["reason"] for b in stored["broken"]}
    lost = {where: why for where, why in silent.items() if where not in was or was[where]["valid"]}
    return lost | {where: row["invalid"] for where, row in now.items() if not row["valid"]}


def again(row: Mapping[str, Any], trace: Trace | None) -> dict[str, Any]:
    """A measurement from its requests; as it was stored where they are lost, or where nothing was measured (a lost server, say)."""
    from .core.validity import trace_problem
    from .harness.measure import measurement

    if trace is None or not trace.records:
        return dict(row)
    problem = trace_problem(trace)
    return measurement(trace, problem[0] if problem else None) | {"canary": row["canary"]}


def lost_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for a trace that was lost when the run was written, as `harness.traces.keep` gives it."""
    kept = {k: row[k] for k in ("scenario", "arm", "run", "workload")}
    return kept | {"requests": 0, "file": None, "lost": row.get("lost") or "its requests are not in the stored run"}


def plan_of(run: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The scenarios of each block of a run."""
    return {name: frozenset(b["scenarios"]) for b in run["plan"]["blocks"] if (name := b["id"]) in run["blocks"]}


def compared(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many verdicts are those of the stored run to the last digit, and for each other gate what differs."""
    was = {(v["block"], v["key"]): v for v in old}
    same, lines = 0, []
    for v in new:
        before = was.get((v["block"], v["key"]))
        if before is None:
            lines.append(f"{v['key']}: {v['verdict']}; the stored run has no verdict on it")
            continue
        different = [name for name in FIGURES if v.get(name) != before.get(name)]
        if not different:
            same += 1
        elif v["verdict"] != before["verdict"]:
            lines.append(f"{v['key']}: {before['verdict']} -> {v['verdict']} (also different: {', '.join(different[1:]) or 'nothing'})")
        else:
            lines.append(f"{v['key']}: {v['verdict']} as stored; different: {', '.join(different)}")
    return same, lines

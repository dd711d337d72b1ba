"""What was measured, as the page shows it: a table for each scenario, curves over concurrency, the time it took."""

from __future__ import annotations

import re
from typing import Any

from . import plots
from .gates import Plain
from .numbers import finite, finites
from .scored import is_text

Starts = dict[str, dict[tuple[str, int], list[tuple[int, float]]]]  # metric: (arm, run): (concurrency, value)


def unique(values: Any) -> list[str]:
    """Texts once each, in the order in which they come."""
    return list(dict.fromkeys(str(v) for v in values))


def tables(run: Plain) -> list[Plain]:
    """For each block and scenario: a row for each figure, a column for each run, and which figures are gated."""
    gated = {(v["block"], v["scenario"], v["metric"]) for v in run["verdicts"]}
    found = []
    for block, what in run["blocks"].items():
        for scenario in unique(m["scenario"] for m in what["measurements"]):
            runs = [m for m in what["measurements"] if m["scenario"] == scenario]
            rows = {}
            for part in ("metrics", "load"):
                found_in = [_flat(m[part]) for m in runs]
                names = unique(name for figures in found_in for name in figures)
                rows[part] = [(name, (block, scenario, name) in gated, [figures.get(name) for figures in found_in]) for name in names]
            found.append({"block": block, "scenario": scenario, "runs": runs, "rows": rows, "text": is_text(runs[0])})
    return found


def _flat(figures: Plain, before: str = "") -> Plain:
    """Figures inside figures under the names of both: `client read_lag_ms p99`."""
    found: Plain = {}
    for name, value in figures.items():
        found |= _flat(value, f"{before}{name} ") if isinstance(value, dict) else {before + name: value}
    return found


def _shape(scenario: str) -> tuple[str, int] | None:
    """A scenario without its concurrency, and the concurrency."""
    match = re.search(r"-c([1-9]\d{0,5})(?=-|$)", scenario)
    return (scenario[: match.start()] + scenario[match.end() :], int(match[1])) if match else None


def curve_pairs(run: Plain) -> list[Plain]:
    """TTFT and TPOT against concurrency wherever one shape was measured at several concurrencies."""
    families: dict[tuple[str, str], list[str]] = {}
    for v in run["verdicts"]:
        if shape := _shape(v["scenario"]):
            families.setdefault((v["block"], shape[0]), []).append(v["family"])
    groups: dict[tuple[str, str], Starts] = {}
    for block, what in run["blocks"].items():
        for m in what["measurements"]:
            if m["valid"] and (shape := _shape(m["scenario"])):
                _add_points(groups.setdefault((block, shape[0]), {}), m, shape[1])
    return [
        {"block": where[0], "shape": where[1], "families": ", ".join(unique(families.get(where, []))), **pair}
        for i, (where, starts) in enumerate(groups.items())
        if (pair := _curve_pair(f"curve-{i}", where[1], starts))["pictures"]
    ]


def _add_points(starts: Starts, m: Plain, concurrency: int) -> None:
    for metric in ("ttft_ms.p50", "tpot_ms.p50"):
        value = finite(m["metrics"].get(metric))
        if value is not None and 1e-12 < value < 1e15:
            start = (m["arm"], int(m["run"] or 0))
            starts.setdefault(metric, {}).setdefault(start, []).append((concurrency, value))


def _curve_pair(ident: str, shape: str, group: Starts) -> Plain:
    arms = unique(arm for starts in group.values() for arm, _ in starts)
    pictures = []
    for metric, starts in group.items():
        series = [
            plots.Series(name=f"{arm} run {run}", style=arms.index(arm), points=tuple(sorted(points)))
            for (arm, run), points in starts.items()
        ]
        if len({c for s in series for c, _ in s.points}) > 1:
            title = f"{metric} against concurrency, {shape}"
            pictures.append((metric, plots.curves(f"{ident}-{metric[:4]}", title, "ms", series)))
    return {"arms": arms, "pictures": pictures}


def plan_rows(run: Plain) -> list[Plain]:
    """What was planned for each block, and what it took."""
    planned = {b["id"]: b for b in run["plan"]["blocks"]}
    rows = []
    for i, block in enumerate(unique([*planned, *run["blocks"]])):
        what = run["blocks"].get(block)
        starts = finites(what["server_start_s"]) if what else []
        items = [(f"{len(starts)} server {'start' if len(starts) == 1 else 'starts'}", sum(starts))] if starts else []
        if what:
            items += [(name, s) for name, v in what["spent_s"].items() if (s := finite(v)) is not None and s >= 0]
        picture = plots.bars(f"bars-{i}", f"Time spent on {block}", items) if items else ""
        rows.append({"id": block, "plan": planned.get(block), "starts": starts, "state": _state(what), "bars": picture})
    return rows


def _state(block: Plain | None) -> str:
    if block is None:
        return "not reached"
    return "not measured" if block["error"] else "complete" if block["complete"] else "not finished"

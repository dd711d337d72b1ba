"""A session as one HTML file that needs nothing else: the words and pictures are made here, the page in report.html.j2.

Formats, never computes: every statistic was made by the gate and is only written down.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterable
from typing import Any

from pytest_kvcache.core.gate import P_SEQ_LIMIT, VERDICTS
from pytest_kvcache.core.metrics import METRICS

from . import plots
from .numbers import brief, clean, duration, finite, finites, interval, moment, number, percent, probability, quantity, share

Plain = dict[str, Any]
Starts = dict[str, dict[tuple[str, int], list[tuple[int, float]]]]  # metric: (arm, run): points

MEANING = {
    "regression": "The metric is worse than its baseline by more than the margin, and chance does not explain it. Fails.",
    "invalid": "The run broke a validity rule, so its numbers were not compared: neither fast nor slow. Fails.",
    "no-baseline": "Nothing usable is stored to compare with. Fails, unless the session records or is a smoke test.",
    "inconclusive": "The interval reaches beyond the margin: too few runs or too much noise. Warns; fails in acceptance.",
    "improvement": "Better than the baseline by more than the margin. Passes; the baseline is worth recording again.",
    "pass": "A loss as large as the margin is ruled out. Passes.",
}
SHORT = {"regression": "regressed", "no-baseline": "without a baseline", "improvement": "improved"}
LAYERS = (
    ("subject", "Subject", "what an upgrade may change"),
    ("identity", "Identity", "what must match the baseline"),
    ("context", "Context", "recorded, never compared"),
)


def render(run: Plain) -> str:
    """The report of a session from its run.json."""
    import jinja2  # here, so that a session without a report never loads it

    run = clean(run)
    several = len(run.get("blocks") or {}) > 1
    gates = [_gate(v, i, several) for i, v in enumerate(run.get("verdicts") or [])]
    worst_first = sorted(gates, key=lambda g: VERDICTS.index(g["kind"]))
    view = {
        "run": run, "head": _headline(run, gates), "facts": _facts(run), "gates": worst_first, "meaning": MEANING,
        "failures": _failures(worst_first), "remarks": _grouped(g for g in worst_first if _is_remark(g)),
        "broken": [(name, b["error"]) for name, b in (run.get("blocks") or {}).items() if b.get("error")],
        "forest": plots.forest([g["drawn"] for g in gates]) if gates else "", "strips": [g for g in gates if g["strip"]],
        "measured": _measured(run), "curves": _curves(run), "environments": _environments(run), "plan": _plan(run),
        "definitions": _definitions(gates), "p_limit": number(P_SEQ_LIMIT, 1), "chance": number(run.get("expected_false_alarms"), 1), "layers": LAYERS,
    }  # fmt: skip
    source = importlib.resources.files(__package__).joinpath("report.html.j2").read_text("utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    page.globals |= {"glyph": plots.glyph}
    page.filters |= {"number": number, "duration": duration, "scalar": _scalar}
    return page.from_string(source).render(view).lstrip()


def _gate(v: Plain, index: int, several: bool) -> Plain:
    """A verdict with every number written out, its picture and its place in the forest."""
    kind = v.get("verdict") if v.get("verdict") in VERDICTS else "invalid"
    place = " \N{MIDDLE DOT} ".join(str(v.get(k)) for k in ("scenario", "arm") if v.get(k))
    unit, better = v.get("unit") or "", v.get("better")
    old, new = finites(v.get("baseline_runs")), finites(v.get("runs"))
    gate: Plain = {
        "raw": v, "kind": kind, "word": str(v.get("verdict")), "place": place, "failed": v.get("outcome") == "failed",
        "block": v.get("block") if several else None, "metric": str(v.get("metric")), "family": str(v.get("family")),
        "value": quantity(v.get("value"), unit), "baseline": quantity(v.get("baseline"), unit), "change": percent(v.get("change")),
        "interval": interval(v.get("low"), v.get("high")), "margin": share(v.get("margin")), "p": probability(v.get("p_seq")),
        "amount": _amount(v), "counts": (len(new), len(old)), "changed": [_change(text) for text in v.get("changed") or []],
        "reason": str(v.get("reason") or ""), "notes": v.get("notes") or [], "better": better, "anchor": f"gate-{index}",
    }  # fmt: skip
    gate["strip"] = _strip(gate, f"strip-{index}", old, new)
    gate["card_strip"] = _strip(gate, f"card-{index}", old, new)
    gate["drawn"] = _drawn(gate)
    return gate


def _amount(v: Plain) -> str:
    """The change in words, without a sign that could be read either way."""
    change = finite(v.get("change"))
    if change is None:
        return ""
    worse = (change < 0) == (v.get("better") == "higher")
    return "unchanged" if not change else f"{share(change)} {'worse' if worse else 'better'}"


def _change(text: str) -> tuple[str, str | None, str | None]:
    """`name: old -> new` as its parts; any other text whole."""
    match = re.fullmatch(r"(.*?): (.*) -> (.*)", text, re.DOTALL)
    return match.group(1, 2, 3) if match else (text, None, None)  # type: ignore[return-value]


def _drawn(gate: Plain) -> plots.Gate:
    """The gate turned so that + is worse."""
    v = gate["raw"]
    change, low, high = (finite(v.get(k)) for k in ("change", "low", "high"))
    if v.get("better") == "higher":
        change, low, high = (None if x is None else -x for x in (change, high, low))
    group = gate["family"] + (f" \N{MIDDLE DOT} {gate['block']}" if gate["block"] else "")
    return plots.Gate(
        group=group, metric=gate["metric"], place=gate["place"], kind=gate["kind"], word=gate["word"], change=gate["change"],
        worse=change, low=low, high=high, margin=finite(v.get("margin")),
    )  # fmt: skip


def _strip(gate: Plain, ident: str, old: list[float], new: list[float]) -> str:
    """The picture of the gate's runs; empty when there are none, or none that a scale could hold."""
    v = gate["raw"]
    baseline, margin = finite(v.get("baseline")), finite(v.get("margin"))
    limit = None
    if baseline is not None and margin is not None:
        limit = baseline * (1 - margin if gate["better"] == "higher" else 1 + margin)
    drawn = [x for x in (*old, *new, baseline, finite(v.get("value"))) if x]
    if not old + new or any(not 1e-12 < abs(x) < 1e15 for x in drawn):
        return ""
    return plots.strip(
        ident, f"Runs of {gate['metric']}, {gate['place']}", kind=gate["kind"], unit=v.get("unit") or "", old=old, new=new,
        baseline=baseline, value=finite(v.get("value")), limit=limit,
    )  # fmt: skip


def _headline(run: Plain, gates: list[Plain]) -> Plain:
    """The verdict of the session in words, the kind whose colour and shape it wears, and the counts."""
    counts = [(k, n) for k in VERDICTS if (n := sum(g["kind"] == k for g in gates))]
    broken = sum(bool(b.get("error")) for b in (run.get("blocks") or {}).values())
    found = dict(counts)
    bad = [k for k in ("regression", "invalid", "no-baseline", "inconclusive") if k in found]
    fine = found.get("pass", 0) + found.get("improvement", 0)
    plural = "gate" if len(gates) == 1 else "gates"
    if not gates:
        words, kind = "No gate was judged", "invalid" if broken else "no-baseline"
    elif bad and bad[0] != "inconclusive":
        words, kind = f"{found[bad[0]]} of {len(gates)} {plural} {SHORT.get(bad[0], bad[0])}", bad[0]
    else:
        words, kind = f"{fine} of {len(gates)} {plural} {'passes' if len(gates) == 1 else 'pass'}", "pass"
        extra = [k for k in ("inconclusive", "improvement") if k in found]
        words, kind = words + "".join(f", {found[k]} {SHORT.get(k, k)}" for k in extra), extra[0] if extra else kind
    also = [f"{broken} {'block' if broken == 1 else 'blocks'} could not be measured: the server failed."] if broken else []
    if not run.get("complete", True):
        why = str(run.get("interrupted") or "the session did not finish")
        also.insert(0, f"So far: {words[0].lower()}{words[1:]}.")
        words, kind = f"Incomplete: {why if ' ' in why else f'interrupted by {why}'}", kind if bad else "inconclusive"
    elif run.get("exit_code") and not broken and not any(g["failed"] for g in gates):
        also.append(f"No gate failed, yet pytest ended with exit code {run['exit_code']}: look at the other tests.")
    return {"words": words, "kind": kind, "also": also, "counts": counts, "tally": plots.tally(counts) if counts else ""}


def _unique(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(v) for v in values if v not in (None, "")))


def _facts(run: Plain) -> list[tuple[str, str]]:
    """What was tested, where and when."""
    plan = (run.get("plan") or {}).get("blocks") or []
    subjects = []
    for block in plan:
        version = ((run.get("environments") or {}).get(block["id"], {}).get("subject") or {}).get(f"dist:{block['framework']}")
        subjects.append(f"{block['framework']} {version or '(version unknown)'}")
    return [
        ("Subject under test", ", ".join(_unique(subjects)) or "none planned"),
        ("Model", ", ".join(_unique(b["model"] for b in plan)) or "none planned"),
        ("Device", str(run.get("gpu") or "not named")),
        ("Profile", str(run.get("profile") or "not named")),
        ("Started", moment(run.get("started"))),
        ("Took", duration(run.get("seconds"))),
    ]


def _is_remark(gate: Plain) -> bool:
    return not gate["failed"] and gate["kind"] in ("inconclusive", "improvement", "no-baseline")


def _grouped(gates: Iterable[Plain]) -> list[list[Plain]]:
    """Gates that share block, verdict, reason, cure and changes, told once."""
    groups: dict[str, list[Plain]] = {}
    for g in gates:
        same = [g["raw"].get("block"), g["word"], g["reason"], g["raw"].get("cure"), g["changed"], g["notes"]]
        groups.setdefault(json.dumps(same), []).append(g)
    return list(groups.values())


def _failures(gates: list[Plain]) -> list[list[Plain]]:
    """A card for each regression; other failures of one cause share a card."""
    failed = [g for g in gates if g["failed"]]
    alone = [[g] for g in failed if g["kind"] == "regression"]
    return alone + _grouped(g for g in failed if g["kind"] != "regression")


def _measured(run: Plain) -> list[Plain]:
    """For each block and scenario a table: a row for each metric, a column for each run."""
    gated = {(v.get("block"), v.get("scenario"), v.get("metric")) for v in run.get("verdicts") or []}
    tables = []
    for name, block in (run.get("blocks") or {}).items():
        found = block.get("measurements") or []
        for scenario in _unique(m.get("scenario") for m in found):
            runs = [m for m in found if m.get("scenario") == scenario]
            rows = {
                part: [
                    (k, (name, scenario, k) in gated, [(m.get(part) or {}).get(k) for m in runs])
                    for k in _unique(k for m in runs for k in m.get(part) or {})
                ]
                for part in ("metrics", "load")
            }
            tables.append({"block": name, "scenario": scenario, "runs": runs, "rows": rows})
    return tables


def _shape(scenario: str) -> tuple[str, int] | None:
    """A scenario without its concurrency, and the concurrency."""
    match = re.search(r"-c([1-9]\d{0,5})(?=-|$)", scenario)
    return (scenario[: match.start()] + scenario[match.end() :], int(match[1])) if match else None


def _curves(run: Plain) -> list[Plain]:
    """TTFT and TPOT against concurrency wherever one shape was measured at several concurrencies."""
    families: dict[tuple[str, str], list[str]] = {}
    for v in run.get("verdicts") or []:
        if (shape := _shape(str(v.get("scenario")))) is not None:
            families.setdefault((str(v.get("block")), shape[0]), []).append(str(v.get("family")))
    groups: dict[tuple[str, str], Starts] = {}
    for name, block in (run.get("blocks") or {}).items():
        for m in block.get("measurements") or []:
            if m.get("valid") and (shape := _shape(str(m.get("scenario")))) is not None:
                _add_points(groups.setdefault((name, shape[0]), {}), m, shape[1])
    return [
        {"block": where[0], "shape": where[1], "families": ", ".join(_unique(families.get(where, [])))} | pair
        for i, (where, starts) in enumerate(groups.items())
        if (pair := _curve_pair(f"curve-{i}", where[1], starts))["pictures"]
    ]


def _add_points(starts: Starts, m: Plain, concurrency: int) -> None:
    for key in ("ttft_ms.p50", "tpot_ms.p50"):
        value = finite((m.get("metrics") or {}).get(key))
        if value is not None and 0 <= value < 1e15:
            start = (str(m.get("arm")), int(m.get("run") or 0))
            starts.setdefault(key, {}).setdefault(start, []).append((concurrency, value))


def _curve_pair(ident: str, shape: str, group: Starts) -> Plain:
    arms = _unique(arm for starts in group.values() for arm, _ in starts)
    pictures = []
    for key, starts in group.items():
        series = [
            plots.Series(name=f"{arm} run {run}", style=arms.index(arm), points=tuple(sorted(points)))
            for (arm, run), points in starts.items()
        ]
        if len({c for s in series for c, _ in s.points}) > 1:
            pictures.append((key, plots.curves(f"{ident}-{key[:4]}", f"{key} against concurrency, {shape}", "ms", series)))
    return {"arms": arms, "pictures": pictures}


def _scalar(value: Any) -> str:
    """A value of the environment as text."""
    if value is None:
        return "unknown"
    if finite(value) is not None:
        return brief(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environments(run: Plain) -> list[Plain]:
    """Each environment once, with the blocks that share it and what the baseline had instead."""
    shared: dict[str, Plain] = {}
    for name, env in (run.get("environments") or {}).items():
        entry = shared.setdefault(json.dumps(env, sort_keys=True), {"blocks": [], "env": env, "was": {}})
        entry["blocks"].append(name)
        changed = (_change(t) for v in run.get("verdicts") or [] if v.get("block") == name for t in v.get("changed") or [])
        entry["was"] |= {key: old for key, old, _ in changed if old is not None}
    return list(shared.values())


def _plan(run: Plain) -> list[Plain]:
    """What was planned for each block, and what it took."""
    planned = {b["id"]: b for b in (run.get("plan") or {}).get("blocks") or []}
    done = run.get("blocks") or {}
    rows = []
    for i, name in enumerate(_unique([*planned, *done])):
        block, plan = done.get(name) or {}, planned.get(name) or {}
        starts = finites(block.get("server_start_s"))
        spent = [(k, s) for k, v in (block.get("spent_s") or {}).items() if (s := finite(v)) is not None and s >= 0]
        items = ([(f"{len(starts)} server {'start' if len(starts) == 1 else 'starts'}", sum(starts))] if starts else []) + spent
        rows.append({
            "id": name, "plan": plan, "starts": starts, "state": _state(name in done, block),
            "bars": plots.bars(f"bars-{i}", f"Time spent on {name}", items) if items else "",
        })  # fmt: skip
    return rows


def _state(reached: bool, block: Plain) -> str:
    if not reached:
        return "not reached"
    return "failed" if block.get("error") else "complete" if block.get("complete") else "not finished"


def _definitions(gates: list[Plain]) -> list[str]:
    """How the gated metrics are defined."""
    return [METRICS[m].definition for m in _unique(g["metric"].partition(".")[0] for g in gates) if m in METRICS]

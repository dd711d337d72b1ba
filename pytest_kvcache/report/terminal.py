"""Verdicts as plain text lines: the verdict first, then value, baseline, change, interval, cause, cure. Formats only.

Reasons, causes and notes may quote a log, a file or another process. Here they become text of a terminal, so here what would forge
a line or a colour is shown as an escape, and lines that are quoted begin with QUOTED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.calibration import Noise
from ..core.gate import NO_BASELINE, VERDICTS
from ..core.spec import OTHER
from ..core.text import one_line
from . import engines
from .numbers import MINUS, NONE, THIN, digits, interval, number, percent, probability, quantity, share

_PLAIN = str.maketrans({MINUS: "-", THIN: " ", NONE: "-"})
_LABEL_WIDTH = max(map(len, VERDICTS))
COLOURS = {
    "regression": {"red": True, "bold": True},
    "invalid": {"red": True},
    "no-baseline": {"yellow": True},
    "recorded": {"cyan": True},
    "inconclusive": {"yellow": True},
    "improvement": {"cyan": True},
    "pass": {"green": True},
}
CHANGED_SHOWN = 8
QUOTED = "  | "


def plain(text: str) -> str:
    """ASCII signs and spaces, for terminals and JUnit."""
    return text.translate(_PLAIN)


def told(text: str) -> str:
    """A text of ours that may quote another: its first line, and each further one marked as quoted."""
    return ("\n" + QUOTED).join(map(one_line, text.rstrip("\n").split("\n")))


def label(v: Mapping[str, Any]) -> str:
    """The word shown for a verdict: a missing baseline that was recorded is `recorded`."""
    return "recorded" if v["verdict"] == NO_BASELINE and v["outcome"] == "passed" and not v["reason"] else str(v["verdict"])


def order(v: Mapping[str, Any]) -> tuple[int, str]:
    """Worst first, then by key."""
    return VERDICTS.index(v["verdict"]), v["key"]


def beside(v: Mapping[str, Any]) -> str:
    """What a gate was measured in turns with, in place of a baseline: `the other build`, or an arm's name; else empty."""
    arm = str(v.get("against") or "")
    return "the other build" if arm.endswith(f".{OTHER}") else arm


def shares_environment(v: Mapping[str, Any]) -> bool:
    """Whether both sides of a gate ran in one environment: arms of one build."""
    return bool(beside(v)) and beside(v) == v.get("against")


def runs(n: int, v: Mapping[str, Any]) -> str:
    """A number of runs, or of rounds where two arms are measured in turns."""
    return f"{n} round{'' if n == 1 else 's'}" if beside(v) else _count(n)


def claim(v: Mapping[str, Any]) -> str:
    """`margin 5 %`, or the gain that is claimed in place of one."""
    return f"at least {v['at_least']:g} times as good claimed" if v.get("at_least") else f"margin {share(v['margin'])}"


def figures(v: Mapping[str, Any]) -> str:
    """`54.1 tok/s against 112 tok/s: -51.8 % (-60 to -42 %; margin 15 %; 3 runs against 5; p <= 0.0001)`."""
    if v["value"] is None:
        return ""
    n = digits(v.get("metric"))
    text = quantity(v["value"], v["unit"], n)
    if v.get("limit") is not None:
        ends = [v["limit"] * (1 + v[end]) for end in ("low", "high") if v[end] is not None]
        span = f"{number(ends[0], n)} to {number(ends[1], n)}, " if len(ends) == 2 else ""
        return plain(f"{text} ({span}limit {quantity(v['limit'], v['unit'], n)})")
    if v["baseline"] is None:
        return plain(f"{text} ({runs(len(v['runs']), v)})")
    other = beside(v)
    text += f" against {quantity(v['baseline'], v['unit'], n)}{' of ' if other else ''}{other}: {percent(v['change'])}"
    inside = [] if v["low"] is None else [interval(v["low"], v["high"])]
    inside += [claim(v), runs(len(v["runs"]), v) + ("" if other else f" against {len(v['baseline_runs'])}")]
    if v["verdict"] == "regression" and v["p_seq"] is not None:
        inside.append(f"p {probability(v['p_seq'])}")
    return plain(f"{text} ({'; '.join(inside)})")


def line(v: Mapping[str, Any], of: str = "") -> str:
    """One gate on one line; `of` is the engine, where there are several."""
    parts = [f"{label(v):{_LABEL_WIDTH}}  {of + ': ' if of else ''}{v['key']}", figures(v)]
    if v["verdict"] not in ("pass", "improvement", "regression") or v.get("at_least"):
        parts.append(v["reason"].partition("\n")[0])
    return one_line("  ".join(p for p in parts if p))


def details(v: Mapping[str, Any]) -> list[str]:
    """What a failed or undecided gate must say besides: cause, what moved with it, what would settle it, the cure."""
    lines: list[str] = []
    if v["verdict"] == "regression":
        lines += _changed(v)
        if v["moved_with"]:
            lines.append("moved with it: " + ", ".join(v["moved_with"]))
    if v["verdict"] == "inconclusive":
        if v["more_runs"]:
            lines.append(f"about {runs(v['more_runs'], v)} more would settle it")
        if v["certifiable"] is not None:
            lines.append(plain(f"the smallest margin these runs could certify is {share(v['certifiable'])}"))
    if v["cure"]:
        lines.append(f"to cure it: {v['cure']}")
    return [one_line(text) for text in lines]


def _changed(v: Mapping[str, Any]) -> list[str]:
    """What the environment has changed since the baseline, or one build against the other; two arms share theirs."""
    changed = v["changed"]
    if shares_environment(v) or v.get("limit") is not None:
        return []
    since = "differs from the other build" if beside(v) else "changed since the baseline"
    if not changed:
        return [f"{since}: nothing that is recorded of the environment"]
    more = f" (and {len(changed) - CHANGED_SHOWN} more in the report)" if len(changed) > CHANGED_SHOWN else ""
    return [f"{since}: " + "; ".join(changed[:CHANGED_SHOWN]) + more]


def _log(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines after the first of reasons that have several (the end of a server's log, say), each reason once."""
    rest = dict.fromkeys(v["reason"].partition("\n")[2].rstrip("\n") for v in verdicts)
    return [QUOTED + one_line(text) for lines in rest if lines for text in lines.split("\n")]


def _notes(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes and remarks on gates, each once with the number of gates it is about."""
    counts = Counter(note for v in verdicts for note in (*v["notes"], *v.get("remarks", ())))
    return [one_line(f"note on {n} gate(s): {note}") for note, n in counts.items()]


def failure(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The text of a failed test: every gate of it, the failing ones first and explained."""
    lines: list[str] = []
    for v in sorted(verdicts, key=lambda v: (v["outcome"] != "failed", *order(v))):
        lines.append(line(v))
        if v["outcome"] == "failed":
            lines += ["    " + text for text in details(v)]
    return "\n".join(lines + _notes(verdicts) + _log(verdicts))


def headline(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """`2 of 6 gates regressed, 4 pass`; the counts of every verdict, worst first."""
    counts = Counter(map(label, verdicts))
    total = len(verdicts)
    words = [f"{counts[w]} {w}" for w in (*VERDICTS[:3], "recorded", *VERDICTS[3:]) if counts[w]]
    return f"{total} {'gate' if total == 1 else 'gates'}: " + ", ".join(words)


def summary(verdicts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(colour key, line) pairs for the end of the session, worst first."""
    rows: list[tuple[str, str]] = []
    called = engines.names(verdicts)
    for v in sorted(verdicts, key=order):
        rows.append((label(v), line(v, called[engines.engine(v)])))
        if v["verdict"] not in ("pass", "invalid", "no-baseline"):
            rows += [("", "    " + text) for text in details(v)]
    cures = dict.fromkeys(v["cure"] for v in verdicts if v["cure"] and v["verdict"] in ("no-baseline", "invalid"))
    return rows + [("", text) for text in _notes(verdicts) + _log(verdicts)] + [("", one_line(f"to cure it: {cure}")) for cure in cures]


def side_by_side(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What several engines give for the same claims, as a table; empty with one."""
    names, rows = engines.table(verdicts)
    if not rows:
        return []
    cells = [[one_line(plain(cell)) for cell in row] for row in (["", *names], *([key, *found] for key, found in rows))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    head = "engines side by side (means of the runs, the difference is to the first; no verdict):"
    return [head, *("  " + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)]


def noise_lines(found: Sequence[Noise]) -> list[str]:
    """What restarts and sessions of a machine differ by, gate by gate, and the margins that this certifies."""
    if not found:
        return []
    sessions = max(n.sessions for n in found)
    lines = [f"noise of this machine by {sessions} session(s), and the margin that 9 of 10 equal builds pass:"]
    for n in found:
        certified = ", ".join(f"{share(margin)} with {_count(runs)}" for runs, margin in n.certifiable)
        assumed = "" if n.sessions > 1 else " (assumed)"
        small = "" if n.certifiable[-1][1] < n.margin else f"; its margin of {share(n.margin)} is too small"
        lines.append(plain(f"  {n.key}  restarts {share(n.restart_sd)}, sessions {share(n.session_sd)}{assumed}: {certified}{small}"))
    if sessions < 2:
        lines.append(
            "how much sessions differ is not known from one: calibrate again at another hour, the gate takes it from the second on"
        )
    return [one_line(text) for text in lines]


def _count(n: int) -> str:
    return f"{n} run" if n == 1 else f"{n} runs"


def junit(v: Mapping[str, Any]) -> str:
    """One gate as a JUnit property's value."""
    return one_line(" ".join(f"{label(v)} {figures(v)}".split()))


def _span(low: object, high: object) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def plan_line(blocks: int, starts: tuple[int, int], scenarios: int, gates: int, seconds: tuple[str, str]) -> str:
    """What will be measured and what it costs from best to worst case."""
    what = f"{blocks} block(s), {scenarios} scenario(s), {gates} gate(s)"
    return f"plan: {what}; {_span(*starts)} server start(s), {_span(*seconds)}"


def block_line(block: str, runs: tuple[int, int], scenarios: Sequence[str]) -> str:
    return one_line(f"  {block}: {_span(*runs)} run(s) of {', '.join(scenarios)}")

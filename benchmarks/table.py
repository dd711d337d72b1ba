"""The table for the documentation: median [min .. max] over the rounds, per scenario, figure and client, beside the targets."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
from collections.abc import Mapping, Sequence

from .scenarios import FIGURES, SCENARIOS, TARGETS

Rows = Mapping[tuple[str, str], Sequence[Mapping[str, float]]]  # (scenario, client) -> the figures of each round

_ALWAYS = ("exact", "start_s", "cpu_outside_s")
_SHOWN = {
    "ceiling": ("events_s", "events_load_s", "cpu_s_per_mev", *_ALWAYS),
    "requests": ("requests_records_s", "requests_s", "cpu_ms_per_request", *_ALWAYS),
    "accuracy": (
        *("ttft_bias_p50_ms", "ttft_bias_p99_ms", "tpot_bias_p50_ms", "tpot_bias_p99_ms", "tpot_n1_bias_p50_ms"),
        *("itl_bias_p50_ms", "itl_bias_p99_ms", "itl_per_token_bias_p50_ms", "itl_per_token_bias_p99_ms"),
        *("slot_gap_p50_ms", "slot_gap_p99_ms", "cpu_s_per_mev", "requests_s", "exact", "start_s"),
    ),
    "pacing": (
        *("lag_p50_ms", "lag_p99_ms", "ks_sqrt_n", "requests_s", "ttft_bias_p50_ms", "ttft_bias_p99_ms"),
        *("tpot_bias_p50_ms", "tpot_bias_p99_ms", "cpu_ms_per_request", "exact", "start_s"),
    ),
}


def shown(scenario: str) -> tuple[str, ...]:
    """The figures that say something of this scenario."""
    of = SCENARIOS[scenario]
    if of.flood:
        return _SHOWN["requests" if of.tokens < 10 else "ceiling"]
    return _SHOWN["pacing" if of.rate else "accuracy"]


def number(value: float) -> str:
    """Three significant digits; large ones in thousands."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.2f}M"
    if size >= 1e4:
        return f"{value / 1e3:.0f}k"
    if size < 0.9995:
        return f"{value:.3f}" if size < 0.0995 else f"{value:.2f}"
    return f"{value:.{max(0, 2 - int(math.log10(size) + 1e-9))}f}"


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return number(values[0])
    return f"{number(statistics.median(values))} [{number(min(values))} .. {number(max(values))}]"


def cell(figure: str, rounds: Sequence[Mapping[str, float]]) -> str:
    values = [r[figure] for r in rounds if figure in r]
    if figure != "exact":
        return spread(values)
    if all(values):
        return "yes" if values else "–"
    r = next(r for r in rounds if not r["exact"])
    counts = f"asked {r['asked']:.0f}, sent {r['sent']:.0f}, done {r['done']:.0f}, aborted {r['aborted']:.0f}"
    return f"no: {counts}, tokens {r['tokens']:.0f}, said {r['tokens_reported']:.0f}"


def bound(scenario: str, figure: str, which: int) -> str:
    if figure == "exact":
        return "yes"
    limit = TARGETS.get((scenario, figure), (None, None))[which]
    return "" if limit is None else f"{FIGURES[figure].sense} {number(limit)}" if limit >= 1e4 else f"{FIGURES[figure].sense} {limit:g}"


def markdown(rows: Rows, clients: Sequence[str]) -> str:
    """One table; a client without a run of a scenario has a dash there."""
    present = [c for c in clients if any(client == c for _, client in rows)]
    lines = [f"| scenario | figure | must | goal | {' | '.join(present)} |", f"|---|---|---|---|{'---|' * len(present)}"]
    for scenario in SCENARIOS:
        of = {client: rows.get((scenario, client), ()) for client in present}
        if not any(of.values()):
            continue
        for figure in shown(scenario):
            if not any(figure in r for rounds in of.values() for r in rounds):
                continue
            cells = [cell(figure, rounds) for rounds in of.values()]
            must, goal = bound(scenario, figure, 0), bound(scenario, figure, 1)
            lines.append(f"| {scenario} | {FIGURES[figure].title} | {must} | {goal} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def versions() -> str:
    """Of what ours runs on."""
    names = ("pytest-kvcache", "uvloop", "msgspec", "aiohttp", "numpy", "pytest", "pytest-benchmark")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)

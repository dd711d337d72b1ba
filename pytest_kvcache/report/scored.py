"""The texts that a block scored, as rows: the arms, the reference first, and the two controls. Read from measurements, which may lack
anything; nothing is computed but how many bytes a token has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .numbers import NONE, THIN, brief, digits, finite, number

Plain = Mapping[str, Any]
FIGURES = {
    "ppl": "ppl", "ppl_ratio": "ppl ratio", "kld.mean": "mean KLD", "kld.p99": "KLD P99", "kld.p999": "KLD P99.9", "top1": "same top token",
}  # fmt: skip
CONTROLS = {"floor": "16 bits in one pass", "negative": "a cache made worse on purpose"}
_WINDOW = re.compile(r"w([1-9]\d{0,8})-")


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm or a control. `bounds` as in run.json; `problem` is why its figures do not count. `answers`: what it wrote by
    prompt, `parts_at` the token at which that leaves the reference's, `tasks` how many of how many it got right."""

    name: str
    reference: bool = False
    precision: str = ""
    figures: Plain
    bounds: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    bytes_per_token: float | None = None
    problem: str = ""
    answers: Mapping[str, str] = field(default_factory=dict)
    parts_at: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)

    def ends(self, metric: str) -> tuple[float | None, float | None]:
        """The ends that the figure of 5 % of texts lies beyond, each by itself."""
        bounds = self.bounds.get(metric) or ()
        return (finite(bounds[0]), finite(bounds[1])) if len(bounds) == 2 else (None, None)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A text: what was scored, and its rows. `controls` by their kind."""

    scenario: str
    corpus: str
    digest: str
    scheme: str
    windows: int | None
    tokens: int | None
    note: str
    arms: tuple[Row, ...]
    controls: Mapping[str, Row]


def figure(metric: str, value: Any) -> str:
    """A figure of a text with as many digits as it is judged by: 1.0042, 0.00391, 98.73 %."""
    x = finite(value)
    if metric == "top1" and x is not None:
        return f"{number(100 * x, digits(metric))}{THIN}%"
    return number(x, digits(metric))


def cell(row: Row, metric: str) -> str:
    """A figure of a row; the reference does not diverge from itself."""
    return NONE if row.reference and metric.startswith("kld.") else figure(metric, row.figures.get(metric))


def size(row: Row) -> str:
    """Bytes a token."""
    return brief(row.bytes_per_token if row.bytes_per_token is None or row.bytes_per_token < 1000 else round(row.bytes_per_token))


def in_a_gib(row: Row) -> str:
    """How many tokens a GiB of such a cache holds."""
    return number(finite(2**30 // row.bytes_per_token)) if row.bytes_per_token else NONE


def is_text(m: Plain) -> bool:
    """Whether a measurement is of a text."""
    return "bounds" in m or "scheme" in m["load"]


def texts_of(block: Plain) -> list[Scored]:
    """Every text of a block, in the order of its measurements."""
    found: dict[str, dict[str, Plain]] = {}
    for m in filter(is_text, block["measurements"]):
        arms = found.setdefault(m["scenario"], {})
        if m["arm"] not in arms or (m["valid"] and not arms[m["arm"]]["valid"]):
            arms[m["arm"]] = m
    return [_text(scenario, list(arms.values())) for scenario, arms in found.items()]


def _text(scenario: str, measured: Sequence[Plain]) -> Scored:
    first, arms = measured[0], sorted(map(_arm, measured), key=lambda row: not row.reference)
    told: Plain = next((m["load"]["controls"] for m in measured if isinstance(m["load"].get("controls"), dict)), {})
    tokens = [m["requests"] for m in measured if m["requests"]]
    return Scored(
        scenario=scenario, corpus=_word(first, "corpus"), digest=_word(first, "corpus_hash")[:12], scheme=_word(first, "scheme"),
        windows=next((m["load"]["windows"] for m in measured if finite(m["load"].get("windows"))), None), tokens=next(iter(tokens), None),
        note=_word(first, "kld"), arms=tuple(arms), controls={kind: _control(kind, told.get(kind)) for kind in CONTROLS if kind in told},
    )  # fmt: skip


def _word(m: Plain, name: str) -> str:
    value = m["load"].get(name)
    return value if isinstance(value, str) else ""


def _arm(m: Plain) -> Row:
    bounds = m.get("bounds")
    problem = "" if m["valid"] else m["invalid"] or _word(m, "refused") or "invalid, no reason recorded"
    return Row(
        name=m["arm"], reference=not {"controls", "precision"} & set(m["load"]), precision=_word(m, "precision"),
        figures=m["metrics"] if m["valid"] else {}, bounds=bounds if isinstance(bounds, dict) else {},
        bytes_per_token=_bytes_per_token(m["load"]), problem=problem,
        **{name: told if isinstance(told := m["load"].get(name), dict) else {} for name in ("answers", "parts_at", "tasks")},
    )  # fmt: skip


def _control(kind: str, told: Any) -> Row:
    figures = told if isinstance(told, dict) else {}
    return Row(name=CONTROLS[kind], figures={name: pair[0] for name, pair in figures.items() if isinstance(pair, list) and pair})


def _bytes_per_token(load: Plain) -> float | None:
    """Of the cache of one window, whose length is in the scheme's id."""
    total, window = finite(load.get("cache_bytes")), _WINDOW.match(str(load.get("scheme") or ""))
    return total / int(window[1]) if window and total and total > 0 else None


def engine_of(block: str) -> str:
    """Framework and model of a block: its arms stand in the table."""
    return "/".join(block.split("/")[:2])

"""The figures that must hold, and the tables of the simulation as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .gate_rules import (
    BLOCKS,
    CAUGHT,
    CI,
    CVS,
    FULL,
    LOSSES,
    OPEN,
    OTHER,
    PASSED,
    RULES,
    Condition,
    Tally,
    condition,
    mean_error,
    of_one_cv,
    rate_bounds,
)

Results = Mapping[Condition, Mapping[str, Tally]]


@dataclass(frozen=True, kw_only=True)
class Must:
    """A figure of our rule and its limit: the share of the gates that was caught or passed; without a loss, alarms a session."""

    loss: float
    cv: float
    code: int
    limit: float
    least: bool = False  # whether the limit is the least allowed, else the most

    @property
    def name(self) -> str:
        what = {CAUGHT: "caught", PASSED: "passed"}[self.code]
        return f"{percent(self.loss)} % worse, {what}" if self.loss else "nothing changed, false alarms a session"

    def found(self, results: Results, rule: str) -> tuple[float, float, float]:
        """The figure and its 95 % bounds."""
        tally = results[condition(self.loss, self.cv)][rule]
        if not self.loss:
            return alarms(tally)
        share, error = mean_error(tally.shares(self.code))
        return share, share - error, share + error

    def holds(self, results: Results, rule: str) -> bool:
        value = self.found(results, rule)[0]
        return value >= self.limit if self.least else value <= self.limit

    def row(self, results: Results, rule: str) -> tuple[str, ...]:
        found = self.found(results, rule)
        word = "holds" if self.holds(results, rule) else "**does not hold**"
        close = ", within the error of the simulation" if found[1] < self.limit < found[2] else ""
        value, low, high, limit = (f"{100 * v:.1f} %" if self.loss else f"{v:.3f}" for v in (*found, self.limit))
        return self.name, percent(self.cv), rule, value, f"{low} to {high}", f"{'≥' if self.least else '≤'} {limit}", word + close


MUSTS = (
    Must(loss=0.0, cv=0.02, code=CAUGHT, limit=0.02),
    Must(loss=0.10, cv=0.02, code=CAUGHT, limit=0.96, least=True),
    Must(loss=0.10, cv=0.035, code=CAUGHT, limit=0.75, least=True),
    Must(loss=0.05, cv=0.02, code=PASSED, limit=0.03),
    Must(loss=0.05, cv=0.035, code=PASSED, limit=0.03),
)


def alarms(tally: Tally) -> tuple[float, float, float]:
    """False alarms a session where nothing changed, with 95 % bounds."""
    events, sessions = int(tally.counts[:, CAUGHT].sum()), len(tally.counts)
    return events / sessions, *rate_bounds(events, sessions)


def percent(share: float) -> str:
    return f"{100 * share:.3g}"


def alarm_cell(tally: Tally) -> str:
    rate, low, high = alarms(tally)
    return f"{rate:.3f} ({low:.3f} to {high:.3f})" if rate < 0.2 else f"{rate:.1f}"


def share_cell(tally: Tally, code: int) -> str:
    share, error = mean_error(tally.shares(code))
    return f"{100 * share:.1f} ± {100 * error:.1f}" if error else f"{100 * share:.0f}"


def block_cell(tally: Tally) -> str:
    return f"{tally.block_runs.mean():.1f}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _truth(results: Results, loss: float) -> str:
    """One truth: each CV under each rule."""

    def row(cv: float, rule: str) -> tuple[str, ...]:
        t = results[condition(loss, cv)][rule]
        called = share_cell(t, CAUGHT) if loss else alarm_cell(t)
        return percent(cv), rule, called, share_cell(t, PASSED), share_cell(t, OPEN), f"{t.runs.mean():.1f}", block_cell(t)

    called = "caught, %" if loss else "false alarms a session"
    head = ("median CV, %", "rule", called, "passed, %", "inconclusive, %", "new runs a gate", "new runs a block of 30")
    return markdown(head, (row(cv, rule) for cv in CVS for rule in RULES))


def _blocks(results: Results) -> str:
    def row(cv: float, shared: float) -> tuple[str, ...]:
        tallies = [results[of_one_cv(cv, shared)][rule] for rule in (FULL, CI)]
        return percent(cv), f"{percent(shared)} %", *map(block_cell, tallies)

    return markdown(("CV of all gates, %", "restart variance common to the block", FULL, CI), (row(*block) for block in BLOCKS))


def _other(results: Results) -> str:
    def row(other: str, cv: float) -> tuple[str, ...]:
        same, at_margin, twice = (results[condition(loss, cv, other)][FULL] for loss in (0.0, 0.05, 0.10))
        return other, percent(cv), alarm_cell(same), share_cell(same, PASSED), share_cell(at_margin, PASSED), share_cell(twice, CAUGHT)

    head = (
        "noise",
        "median CV, %",
        "false alarms a session",
        "nothing changed: passed, %",
        "5 % worse: passed, %",
        "10 % worse: caught, %",
    )
    return markdown(head, (row(other, cv) for other in OTHER for cv in CVS))


def sections(results: Results) -> Iterator[tuple[str, str]]:
    """Title and table."""
    head = ("truth and figure", "median CV, %", "rule", "found", "95 % bounds", "limit", "")
    yield "What must hold", markdown(head, (m.row(results, rule) for m in MUSTS for rule in (FULL, CI)))
    for loss in LOSSES:
        yield (f"Every gate {percent(loss)} % worse" if loss else "Nothing changed"), _truth(results, loss)
    yield "New runs of a block of 30 gates where nothing changed, all of one CV", _blocks(results)
    yield "Our rule under other noise", _other(results)


def failed(results: Results) -> list[str]:
    """The figures that must hold and do not."""
    pairs = [(m, rule) for m in MUSTS for rule in (FULL, CI)]
    return [f"{m.name}, median CV {percent(m.cv)} %, {rule}" for m, rule in pairs if not m.holds(results, rule)]

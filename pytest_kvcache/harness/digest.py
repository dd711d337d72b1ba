"""Finished requests to rows and counts: what a load worker tells of what it kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from ..core.answer import Answer, Asked, read_exchange
from ..core.load import Load
from ..core.masking import masked
from ..core.record import OK, REQUEST_COLUMNS
from .incoming import Done

FINE_US = 100_000  # gaps below are counted to the microsecond, above to four digits: what is stored stays small


@dataclass(slots=True)
class Digest:
    """Rows in the order of `RequestRecord`'s fields, the gaps per token and the tokens per millisecond of one worker.

    `zero` is the origin of all times, in ns; `index` the number of each request in the whole load.
    """

    load: Load
    index: Sequence[int]
    zero: int = 0
    OUTCOME: ClassVar[int] = REQUEST_COLUMNS.index("outcome")
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    arrivals: Counter[int] = field(default_factory=Counter)

    def __call__(self, done: Done) -> None:
        raw, read_ends = done.raw()
        load = self.load
        asked = Asked(osl=load.osl[done.i], ignore_eos=load.ignore_eos, textless=load.textless, by_length=load.by_length)
        self.add(done, read_exchange(raw, read_ends, done.stamps, done.end, asked))

    def add(self, done: Done, answer: Answer) -> None:
        zero, times = self.zero, answer.times

        def seconds(ns: int | None) -> float | None:
            return None if ns is None else (ns - zero) / 1e9

        good = answer.outcome == OK
        self.rows.append((
            self.index[done.i], seconds(done.sent), seconds(done.due or None), done.connect / 1e9,
            seconds(times[0]) if times else None, seconds(answer.answer_at), seconds(times[-1]) if times else None, seconds(done.ended),
            answer.input_tokens, answer.output_tokens, answer.first_event_tokens, len(times), answer.status, answer.outcome,
            masked(answer.error, self.load.secrets) if answer.error and self.load.secrets else answer.error, answer.notes,
        ))  # fmt: skip
        if not good:
            return
        if answer.tokens is None or any(n != 1 for n in answer.tokens):
            self._many(answer)
        else:
            self.gaps.update([(b - a + 500) // 1000 for a, b in pairwise(times)])
            self.arrivals.update([(t - zero) // 1_000_000 for t in times])

    def _many(self, answer: Answer) -> None:
        """Events of several tokens: a gap counts once a token, shared among them; unknown tokens are spread evenly."""
        for gap, n in answer.gaps() or ():
            if n:
                self.gaps[(gap + 500 * n) // (1000 * n)] += n
        each = (answer.output_tokens or len(answer.times)) / len(answer.times)
        for i, at in enumerate(answer.times):
            self.arrivals[(at - self.zero) // 1_000_000] += answer.tokens[i] if answer.tokens else each  # type: ignore[assignment]

    def counts(self) -> dict[str, dict[str, list[Any]]]:
        """The gaps and arrivals as `core.record.Trace` has them, values ascending."""
        coarse: Counter[int] = Counter()
        for us, n in self.gaps.items():
            coarse[_four_digits(us)] += n
        return {"itl": _columns("us", coarse), "arrivals": _columns("ms", self.arrivals)}


def _four_digits(us: int) -> int:
    if us < FINE_US:
        return us
    step: int = 10 ** (len(str(us)) - 4)
    return round(us / step) * step


def _columns(name: str, counts: Counter[int]) -> dict[str, list[Any]]:
    keys = sorted(counts)
    return {name: keys, "n": [counts[k] for k in keys]}

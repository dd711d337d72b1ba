"""Internal fragmentation of a paged cache: what requests hold of their last blocks without using it. Pure.

The wasted share is 1 - tokens with keys and values / tokens of the blocks that hold them. Only the last block of a sequence is not full.
The newest token of an answer is written in the step after it, so a request of `isl` and `osl` tokens holds `isl` + `osl` - 1 at its end,
and lives through as many lengths as it has output tokens: `isl`, `isl` + 1, and so on, each for one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)
MOST_WASTE = 0.04  # what the authors of paged attention found to be left of the waste (Kwon et al. 2023, SOSP, "under 4 %")


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """A row of the table: what blocks of so many tokens waste, as shares of what is allocated. `at_end` of all requests at full length,
    `over_life` averaged over their steps, `expected` by the formula for lengths that end anywhere in a block."""

    block_size: int
    at_end: float
    over_life: float
    expected: float


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """The largest candidate that wastes no more than `most` over the life of the requests (`block_size` None where none does: `reason`)."""

    block_size: int | None
    most: float
    table: tuple[BlockSize, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Fragmentation by a server's readings: the wasted share of all blocks that were in use at them. `low` and `high` hold it with the
    confidence asked for: ratio estimate, Student's t over the readings, widened by their resolution, which may err to the same side each
    time. Of one reading only the resolution is known. Where `reason` is not empty there is no figure."""

    wasted: float | None = None
    low: float | None = None
    high: float | None = None
    readings: int = 0
    reason: str = ""


# -- by arithmetic ------------------------------------------------------------------------------------------------------


def _checked(values: Iterable[int], what: str) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")


def wasted_at(lengths: Sequence[int], block_size: int) -> float:
    """The wasted share of sequences of these lengths in tokens."""
    _checked((block_size, *lengths), "a length")
    return 1 - sum(lengths) / (block_size * sum(-(-length // block_size) for length in lengths)) if lengths else 0.0


def wasted_over_life(requests: Sequence[tuple[int, int]], block_size: int) -> float:
    """The wasted share of requests (isl, osl) averaged over their steps, which all take as long."""
    _checked((block_size, *(n for request in requests for n in request)), "a length")
    used = sum(osl * isl + osl * (osl - 1) // 2 for isl, osl in requests)
    taken = block_size * sum(_blocks_through(isl + osl - 1, block_size) - _blocks_through(isl - 1, block_size) for isl, osl in requests)
    return 1 - used / taken if requests else 0.0


def _blocks_through(length: int, block_size: int) -> int:
    """The sum of the blocks that each of the lengths 1, 2, ... `length` takes."""
    full, rest = divmod(length, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def expected_waste(block_size: int, mean_length: float) -> float:
    """The wasted share to expect of sequences whose ends fall anywhere in a block: (block - 1) / 2 tokens a sequence, of that and the mean
    length."""
    unused = (block_size - 1) / 2
    return unused / (mean_length + unused)


def recommend(requests: Sequence[tuple[int, int]], candidates: Iterable[int] = BLOCK_SIZES, *, most: float = MOST_WASTE) -> Recommended:
    """The block size for requests (isl, osl), which may stand for those to come, and the table of all candidates, ascending: larger blocks
    are fewer to manage, so the largest that does not waste too much."""
    if not requests:
        return Recommended(block_size=None, most=most, table=(), reason="there is no request to go by")
    steps = sum(osl for _, osl in requests)
    mean_length = sum(osl * isl + osl * (osl - 1) / 2 for isl, osl in requests) / steps
    table = tuple(
        BlockSize(
            block_size=size, at_end=wasted_at([isl + osl - 1 for isl, osl in requests], size), over_life=wasted_over_life(requests, size),
            expected=expected_waste(size, mean_length),
        )
        for size in sorted(set(candidates))
    )  # fmt: skip
    fitting = [row.block_size for row in table if row.over_life <= most]
    if fitting:
        return Recommended(block_size=fitting[-1], most=most, table=table)
    least = min((row.over_life for row in table), default=math.nan)
    return Recommended(block_size=None, most=most, table=table, reason=f"each candidate wastes more than {most:g}, at least {least:.3g}")


# -- by what a server says ----------------------------------------------------------------------------------------------


def measured(
    readings: Sequence[tuple[float, float]], capacity_tokens: float, *, resolution: float = 0.0, confidence: float = 0.95
) -> Measured:
    """Fragmentation from readings (share of the pool in use, tokens truly held at that moment).

    `capacity_tokens` is what a share of 1 stands for (vLLM: blocks - 1, one being its null block; `BlockPool.get_usage` at c59cb7941).
    `resolution` is the smallest step of the share as it is read (0.01 where it is told in whole per cent). Tokens that requests share are
    held once. Readings should lie a request's life apart, or they are not as many as they seem. Of an empty pool nothing is learnt.
    """
    good = [(share * capacity_tokens, held) for share, held in readings if share > 0 and held > 0]
    if any(not (math.isfinite(taken) and math.isfinite(held)) for taken, held in good) or len(good) == 0:
        return Measured(reason="no reading has a share of the pool and a number of tokens above 0")
    taken, held = math.fsum(t for t, _ in good), math.fsum(h for _, h in good)
    ratio, n = held / taken, len(good)
    half = 0.0
    if n > 1:
        from scipy.special import stdtrit

        squares = math.fsum((h - ratio * t) ** 2 for t, h in good)
        half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * math.sqrt(squares / (n * (n - 1))) / (taken / n)
    # The sum of the shares may be off by half a step each, all on one side.
    step = n * resolution / 2 * capacity_tokens
    low_ratio = (ratio - half) * taken / (taken + step)
    high_ratio = (ratio + half) * taken / (taken - step) if taken > step else math.inf
    return Measured(wasted=1 - ratio, low=1 - high_ratio if math.isfinite(high_ratio) else None, high=1 - low_ratio, readings=n)

"""Short generated tasks whose right answer stands in the prompt, and what a loss of right answers is worth. Pure.

To copy from far back is what a cache is for, so it is what a damaged one fails first. The prompts are few-shot texts to complete, with
answers of a few tokens, because the smallest models know no instructions. All texts are our own, drawn from a seed: item `i` is the same
on every machine, whatever the number of items.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TASKS_VERSION = "tasks.v1"
DEPTHS = (10, 50, 90)  # where a needle stands, in percent of its filler

_NAMES = (
    *("Agnes", "Bruno", "Clara", "Daniel", "Emma", "Felix", "Grace", "Henry", "Irene", "Jacob", "Karen", "Louis"),
    *("Maria", "Nora", "Oscar", "Paula", "Quentin", "Rosa", "Simon", "Tessa", "Victor", "Wendy"),
)
_CODES = (
    *("anchor", "basket", "candle", "desert", "engine", "feather", "pillow", "hammer", "island", "jacket", "kettle", "ladder"),
    *("marble", "needle", "orange", "pepper", "ribbon", "saddle", "tunnel", "velvet", "window", "yellow"),
)
_WHO = ("The baker", "A neighbour", "The old teacher", "My cousin", "The postman", "A young doctor", "The gardener", "Our captain")
_DID = ("walked to", "came back from", "was late for", "spoke about", "waited near", "took a picture of", "cleaned", "dreamed of")
_WHAT = ("the market", "the harbour", "the long bridge", "the village school", "the railway station", "the small museum", "the mill")
_WHEN = ("in the morning", "before the rain began", "after lunch", "on a quiet Sunday", "while the snow fell", "late in the evening")
_KEYS = (
    *(
        "apple",
        "banana",
        "carrot",
        "date",
        "eggplant",
        "fig",
        "grape",
        "honey",
        "kiwi",
        "lemon",
        "mango",
        "nut",
        "olive",
        "peach",
        "quince",
    ),
    *("rice", "spinach", "tomato", "vanilla", "walnut"),
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One task: `answer` is how the text after `prompt` must begin. `name` is unique among the items of all kinds of one seed."""

    kind: str
    name: str
    prompt: str
    answer: str


def items(kind: str, n: int, seed: int, *, words: int = 120) -> tuple[Item, ...]:
    """`n` items of a kind. `words` is about how many words stand before the question; it makes filler, examples or table rows of them.
    ValueError for a kind that is none of TASKS."""
    if kind not in _MAKERS:
        raise ValueError(f"{kind!r} is none of {', '.join(TASKS)}")
    # A generator for each item, so that the first ones stay the same when more are asked for.
    return tuple(_MAKERS[kind](random.Random(f"{TASKS_VERSION}|{kind}|{seed}|{i}"), i, words) for i in range(n))


def _draw(rng: random.Random, pool: Sequence[str], n: int = 1) -> list[str]:
    """`n` different ones of a pool. By `randrange` alone: what `sample` and `shuffle` make of a seed may change between versions."""
    left = list(pool)
    return [left.pop(rng.randrange(len(left))) for _ in range(n)]


def _filler(rng: random.Random, words: int) -> list[str]:
    """Sentences of at least `words` words in all."""
    found: list[str] = []
    while words > 0:
        found.append(" ".join(_draw(rng, part)[0] for part in (_WHO, _DID, _WHAT, _WHEN)) + ".")
        words -= len(found[-1].split())
    return found


def _needle(rng: random.Random, i: int, words: int) -> Item:
    depth = DEPTHS[i % len(DEPTHS)]
    names, codes = _draw(rng, _NAMES, 2), _draw(rng, _CODES, 2)
    text = _filler(rng, words)
    # A second fact, of another name, stands before or after: whoever answers with just any code word is not right.
    text.insert(round(len(text) * depth / 100), f"The secret word of {names[0]} is {codes[0]}.")
    text.insert(rng.randrange(len(text) + 1), f"The secret word of {names[1]} is {codes[1]}.")
    prompt = " ".join(text) + f"\n\nRemember: the secret word of {names[1]} is {codes[1]}. The secret word of {names[0]} is"
    return Item(kind="needle", name=f"needle-d{depth}-{i // len(DEPTHS)}", prompt=prompt, answer=codes[0])


def _arithmetic(rng: random.Random, i: int, words: int) -> Item:
    pairs = [(a, b) for a in range(2, 20) for b in range(2, 10)]
    a, b = pairs.pop(rng.randrange(len(pairs)))
    shown = [pairs.pop(rng.randrange(len(pairs))) for _ in range(min(max(4, words // 5), len(pairs)))]
    prompt = "".join(f"{x} + {y} = {x + y}\n" for x, y in shown) + f"{a} + {b} ="
    return Item(kind="arithmetic", name=f"arithmetic-{i}", prompt=prompt, answer=str(a + b))


def _code(rng: random.Random, i: int, words: int) -> Item:
    keys = _draw(rng, _KEYS, min(max(4, words // 4), len(_KEYS)))
    prices = [100 + rng.randrange(900) for _ in keys]
    table = "".join(f'    "{key}": {price},\n' for key, price in zip(keys, prices, strict=True))
    asked = _draw(rng, [str(k) for k in range(len(keys))], 4)
    *shown, last = map(int, asked)
    checks = "".join(f'assert PRICES["{keys[k]}"] == {prices[k]}\n' for k in shown)
    prompt = f'PRICES = {{\n{table}}}\n\n{checks}assert PRICES["{keys[last]}"] =='
    return Item(kind="code", name=f"code-{i}", prompt=prompt, answer=str(prices[last]))


_MAKERS: dict[str, Callable[[random.Random, int, int], Item]] = {"needle": _needle, "arithmetic": _arithmetic, "code": _code}
TASKS = tuple(_MAKERS)


def scored(item: Item, text: str) -> bool:
    """Whether a continuation is right: it begins with the answer, in the same case, and it ends there (19 is neither 190 nor 19.5)."""
    rest = text.strip()
    if not rest.startswith(item.answer):
        return False
    after = rest[len(item.answer) :]
    return not after[:1].isalnum() and not re.match(r"[.,]\d", after)


def _lost_gained(base: Sequence[bool], new: Sequence[bool]) -> tuple[int, int]:
    """Items that only the base, and that only the new one has right."""
    if len(base) != len(new) or len(base) < 2:
        raise ValueError(f"{len(base)} and {len(new)} items: at least two are needed, the same on both sides")
    both = list(zip(base, new, strict=True))
    return sum(b and not n for b, n in both), sum(n and not b for b, n in both)


def paired(base: Sequence[bool], new: Sequence[bool]) -> tuple[float, float]:
    """The mean difference of right answers, new less base (a share), and its standard error, from the differences of single items.

    Where no item differs the error is 0, which is not certainty: a claim is judged by `worse_p` and `most_lost`.
    """
    lost, gained = _lost_gained(base, new)
    n = len(base)
    mean = (gained - lost) / n
    return mean, math.sqrt(max(0.0, lost + gained - n * mean * mean) / (n * (n - 1)))


def worse_p(base: Sequence[bool], new: Sequence[bool]) -> float:
    """How likely so many lost items are, or more, when new is as good as base (McNemar's test, exact and one-sided): small means worse.

    Of the items that differ each is lost or gained with 1/2 then. Whole numbers until the last division: no number of items is too large.
    """
    lost, gained = _lost_gained(base, new)
    n = lost + gained
    return sum(math.comb(n, k) for k in range(lost, n + 1)) / (1 << n)


def most_lost(base: Sequence[bool], new: Sequence[bool], alpha: float = 0.05) -> float:
    """The largest net loss (a share of the items, base less new) that is not excluded at 1 - `alpha`: new is not worse by more than X when
    this is below X. Exact, and so wide: no loss among 60 items still allows 6 %, among 20 items 17 %.

    Clopper-Pearson bounds of the share of lost and of gained items, half of `alpha` each (Bonferroni).
    """
    lost, gained = _lost_gained(base, new)
    n = len(base)
    return _upper(lost, n, alpha / 2) - (1 - _upper(n - gained, n, alpha / 2))


def _upper(k: int, n: int, alpha: float) -> float:
    """The largest probability at which `k` or fewer of `n` are seen with `alpha`; by halving."""
    if k >= n:
        return 1.0
    low, high = k / n, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(k, n, middle) > alpha else (low, middle)
    return high


def _at_most(k: int, n: int, p: float) -> float:
    """P(X <= k) of a binomial, by logarithms: the coefficients of a thousand items are no float."""
    log_p, log_q = math.log(p) if p else -math.inf, math.log1p(-p)
    terms = (math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) + (j and j * log_p) + (n - j) * log_q for j in range(k + 1))
    return math.fsum(map(math.exp, terms))

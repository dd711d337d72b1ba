"""Whether greedy texts through a quantised cache are text at all. Pure; texts are sequences of token ids.

No margin widens this: a cache that makes garbage of every prompt fails whatever loss of quality is allowed. But small models loop in greedy
decoding with 16 bits too, and a healthy int4 leaves the reference's text after a few tokens, so every rule compares many prompts with
the same prompts of the reference, and none looks at a single one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

SPOILED = "the cache produces garbage"
RUN = 16  # tokens in a row that are one and the same
MOST = 0.6  # of a text of at least SHORT tokens
SHORT = 32
TAIL, PERIOD, FILLED = 64, 8, 0.75  # a loop of at most PERIOD tokens fills that share of the last TAIL
FEW = 1 / 8  # different tokens among all: four among 32, eight among 64
OPENING = 8  # two prompts whose texts agree this far get the same text
LONG = 8  # tokens after which a text did not stop at once; a shorter one of the reference says nothing
EARLY, NEARLY_ALL = 2, 0.8  # texts that leave the reference at their first or second token, and the share of prompts that is no chance
PROMPTS_NEEDED = 4  # fewer say nothing about where texts part

PROMPTS: Mapping[str, str] = {
    "story": "The lighthouse keeper had not spoken to anyone for eleven days. On the twelfth morning a small boat came into the bay, and",
    "list": "The days of the week in order:\n1. Monday\n2. Tuesday\n3. Wednesday\n4.",
    "code": 'def count_words(text):\n    """Return how often each word occurs."""\n    counts = {}\n    for word in text.split():\n',
    "dialogue": '"Where did you leave the keys?" asked Martha.\n"On the kitchen table," said Paul.\n"They are not there now," said',
    "recipe": "Pancakes for four people\n\nIngredients:\n- 2 eggs\n- 300 ml of milk\n- 200 g of flour\n- a pinch of salt\n\nMethod:\n1.",
    "facts": "Five facts about water:\n1. Water freezes at zero degrees Celsius.\n2. Water boils at one hundred degrees Celsius.\n3.",
    "letter": "Dear Mrs. Whitfield,\n\nThank you very much for your letter of the third of May. I am glad to tell you that",
    "table": "| country | capital |\n|---|---|\n| France | Paris |\n| Italy | Rome |\n| Spain |",
}

Texts = Mapping[str, Sequence[int]]  # by the name of the prompt


def first_divergence(base: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts of the same prompt part: the index of the first token that differs, or at which one of them had ended. None where
    they are equal."""
    shared = next((i for i, (b, o) in enumerate(zip(base, other, strict=False)) if b != o), min(len(base), len(other)))
    return None if shared == len(base) == len(other) else shared


def degenerate(tokens: Sequence[int]) -> str:
    """Why a text is no text, whatever its tokens mean; empty where it may be one. Says nothing of a cache: see `garbage`."""
    return _one_token(tokens) or _loops(tokens)


def _one_token(tokens: Sequence[int]) -> str:
    longest = _longest([b == a for a, b in pairwise(tokens)]) + 1
    if longest >= RUN:
        return f"one token {longest} times in a row"
    often = max(Counter(tokens).values(), default=0)
    if len(tokens) >= SHORT and often > MOST * len(tokens):
        return f"{often} of {len(tokens)} tokens are one and the same"
    return ""


def _loops(tokens: Sequence[int]) -> str:
    if len(tokens) < SHORT:
        return ""
    tail = tokens[-TAIL:]
    for period in range(1, PERIOD + 1):
        if _longest([tail[i] == tail[i - period] for i in range(period, len(tail))]) + period >= FILLED * len(tail):
            return f"a loop of {period} tokens"
    different = len(set(tokens))
    return f"only {different} different tokens of {len(tokens)}" if different <= FEW * len(tokens) else ""


def _longest(flags: Sequence[bool]) -> int:
    """How many true ones stand in a row at most."""
    return max((sum(1 for _ in group) for flag, group in groupby(flags) if flag), default=0)


def no_reference(base: Texts) -> str:
    """Why the 16-bit texts are none to compare with (an engine that is broken at 16 bits too makes equal texts); empty when they are."""
    if not base:
        return "there is no text of the reference"
    for count, what in (
        (sum(not t for t in base.values()), "stop at once"),
        (sum(bool(_one_token(t)) for t in base.values()), "repeat one token"),
        (_same(base) if len(base) > 1 else 0, "get the same text"),
    ):
        if 2 * count > len(base):
            return f"the reference itself is no text: {count} of {len(base)} prompts {what}"
    return ""


def garbage(base: Texts, other: Texts) -> str:
    """Why a precision's texts are garbage where the reference's are not, in one line; empty otherwise. ValueError where the prompts differ.

    Equal texts never are: ask `no_reference` first. The limits stand between what SmolLM2-135M did in 24 prompts (48 tokens, float32 with
    a bfloat16 cache as reference, 2026-12-01; four of PROMPTS were worded otherwise then). Two sorts of int4, a scale for each token and
    head: 4 and 4 of 24 texts left it at the first or second token (median index 4 and 5), 0 and 4 were none, 0 and 1 of these repeated one
    token. int4 with swapped nibbles, and heads in a wrong order: 23 and 23 left it there, 12 and 14 repeated one token. Of 2000 draws of
    eight of the prompts no healthy one was called garbage, and every spoiled one, after 16 tokens as after 48.
    """
    if not base or base.keys() != other.keys():
        raise ValueError(f"texts of the same prompts are needed, got {sorted(base)} and {sorted(other)}")
    found = (rule(base, other) for rule in (_stop, _alike, _repeat, _loop_more, _part))
    return next((f"{SPOILED}: {why}" for why in found if why), "")


def _stop(base: Texts, other: Texts) -> str:
    stopped = sum(len(other[name]) <= 1 and len(text) >= LONG for name, text in base.items())
    return f"{stopped} of {len(base)} texts stop at once, the reference's go on" if 2 * stopped > len(base) else ""


def _same(texts: Texts) -> int:
    """How many prompts get one and the same text, at most."""
    return max(Counter(tuple(t[:OPENING]) for t in texts.values() if len(t)).values(), default=0)


def _alike(base: Texts, other: Texts) -> str:
    same = _same(other)
    return f"{same} of {len(base)} different prompts get the same text" if 2 * same > len(base) and same > max(1, _same(base)) else ""


def _repeat(base: Texts, other: Texts) -> str:
    why = [found for name, text in base.items() if (found := _one_token(other[name])) and not _one_token(text)]
    return f"{len(why)} of {len(base)} texts repeat one token ({why[0]}), the reference's do not" if len(why) > len(base) / 3 else ""


def _loop_more(base: Texts, other: Texts) -> str:
    """A net count, of more than half: where both loop by chance in half of the prompts, a third more than the reference is no rarity."""
    why = [found for name, text in base.items() if (found := degenerate(other[name])) and not degenerate(text)]
    cured = sum(bool(degenerate(text)) and not degenerate(other[name]) for name, text in base.items())
    return f"{len(why)} of {len(base)} texts are none ({why[0]}), the reference's are" if len(why) - cured > len(base) / 2 else ""


def _part(base: Texts, other: Texts) -> str:
    places = [first_divergence(text, other[name]) for name, text in base.items() if len(text) >= LONG]
    early = sum(place is not None and place < EARLY for place in places)
    if len(places) < PROMPTS_NEEDED or early < NEARLY_ALL * len(places):
        return ""
    return f"{early} of {len(places)} texts leave the reference at their first or second token"

"""The likeliest continuation of prompts through several caches: what a precision does to an answer, not to a score.

A prompt goes in by steps of `step` tokens, so that a quantised cache is read back before the first new token; the new ones go in one by
one. Only one step's logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from asked import Vocabulary
from lockstep import Begin, Walker, timed


def prompts_of(request: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, list[int]]:
    """The request's prompts as tokens; a text is tokenised, without special tokens. SystemExit where there is nothing to continue, or
    an arm that cannot: a window in one pass knows its tokens beforehand."""
    found = {name: list(vocabulary.encode(p) if isinstance(p, str) else p) for name, p in request["prompts"].items()}
    if min(new_of(request, name) for name in found) < 1 or request["step"] < 1 or not all(found.values()):
        raise SystemExit("greedy: a prompt needs a token, and `new` and `step` are at least 1")
    if any(arm.get("one_pass") for arm in request["arms"].values()):
        raise SystemExit("greedy: an arm of one pass cannot continue a prompt; the fault `fresh` is one that never reads its cache")
    return found


def new_of(request: Mapping[str, Any], name: str) -> int:
    """How many tokens are asked of a prompt: `new` is a number for all, or one for each."""
    new = request["new"]
    return int(new[name] if isinstance(new, dict) else new)


def likeliest(rows: Any) -> int:
    """Of the last of these rows. ValueError where a logit is none: numpy would call a NaN the greatest."""
    if not np.isfinite(rows[-1].max()):
        raise ValueError("the engine's logits are not finite")
    return int(rows[-1].argmax())


def continuation(walker: Walker, prompt: list[int], new: int, step: int, ends: Collection[int]) -> list[int]:
    """At most `new` tokens; the one that ends an answer is the last of them."""
    for start in range(0, len(prompt), step):
        rows = walker.logits(prompt[start : start + step])
    found = [likeliest(rows)]
    while len(found) < new and found[-1] not in ends:
        found.append(likeliest(walker.logits(found[-1:])))
    return found


def greedy(
    request: Mapping[str, Any], prompts: Mapping[str, list[int]], begin: Mapping[str, Begin], vocabulary: Vocabulary
) -> dict[str, Any]:
    """`ARM/NAME`, int32, of each prompt through each arm; told are the seconds of each arm and the texts."""
    seconds, arrays = dict.fromkeys(begin, 0.0), {}
    texts: dict[str, dict[str, str]] = {arm: {} for arm in begin}
    for arm, begins in begin.items():
        for name, prompt in prompts.items():
            with timed(seconds, arm):
                found = continuation(begins(prompt), prompt, new_of(request, name), request["step"], vocabulary.ends)
            arrays[f"{arm}/{name}"] = np.array(found, np.int32)
            texts[arm][name] = vocabulary.decode(found)
    return arrays | {"told": {"seconds": seconds, "texts": texts}}

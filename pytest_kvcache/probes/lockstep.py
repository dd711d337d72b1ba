"""Walks a text through several caches side by side, a step at a time, so that no logits need be kept: one step of each is all there is.

Runs in an engine's interpreter. A request is JSON: `windows` (`tokens`, `first`), `step`, `arms` by name with what each asks for,
`reference` (the arm that the others are compared with), `model`, and what the engine's script needs beside these. The answer is an .npz:
for each arm `nll`, `kld` and `same` of every scored token, `chunk` (the window of each), and `told`, JSON of seconds, versions and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from divergence import Tokens, log_softmax


class Walker(Protocol):
    """One arm within one window."""

    def logits(self, tokens: list[int]) -> Any:
        """Of the next tokens: [tokens, vocabulary]; the cache has grown by them afterwards."""

    def cache_bytes(self) -> int:
        """What the cache takes now; 0 where that cannot be told."""


Begin = Callable[[list[int]], Walker]  # given the whole window, for those that take it in one pass


def walk(request: Mapping[str, Any], begin: Mapping[str, Begin]) -> dict[str, Any]:
    """The arrays and what is told beside them."""
    reference, names = request["reference"], list(begin)
    order = [reference, *(n for n in names if n != reference)]
    scores = {name: Tokens() for name in order}
    seconds, sizes, chunks = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0), []
    for number, window in enumerate(request["windows"]):
        tokens, first = window["tokens"], window["first"]
        walkers = {}
        for name in order:
            with timed(seconds, name):
                walkers[name] = begin[name](tokens)
        for start in range(0, len(tokens), request["step"]):
            step = tokens[start : start + request["step"]]
            # The logits of a token predict the one after it; those before the first scored one are needed by the cache only.
            rows = [i for i in range(len(step)) if first <= start + i + 1 < len(tokens)]
            targets = np.array([tokens[start + i + 1] for i in rows], dtype=np.int64)
            base = None
            for name in order:
                with timed(seconds, name):
                    found = walkers[name].logits(step)
                if not rows:
                    continue
                kept = found[rows[0] : rows[-1] + 1]
                if base is None:
                    base = log_softmax(kept)
                scores[name].add(base, kept, targets)
            chunks += [number] * len(rows)
        for name in order:
            sizes[name] = max(sizes[name], walkers[name].cache_bytes())
    arrays = {key: value for name in order for key, value in scores[name].arrays(name).items()}
    told = {"seconds": seconds, "compare_s": {n: s.seconds for n, s in scores.items()}, "cache_bytes": sizes}
    return arrays | {"chunk": np.array(chunks, dtype=np.int32), "told": told}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds what the block took."""
    began = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - began

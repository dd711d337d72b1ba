"""One arm in a process of its own, of an engine that holds one cache: its scores, then what it goes on to write.

An engine's script says how it starts (`Start`); what it answers is the same for all of them (`walked`): `nll`, `top_ids` and
`top_logprobs` of every scored token, `chunk` (the window of each), the new tokens of each prompt, and `told`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from asked import Vocabulary
from greedy import new_of, prompts_of
from lockstep import timed

TOP = 20
Place = tuple[float, list[tuple[int, float]]]  # where a token was predicted: its log-probability; the likeliest ones and theirs, falling


class Engine(Protocol):
    """An engine with one arm's cache, for one text at a time."""

    def scored(self, tokens: list[int], first: int) -> list[Place]:
        """One for each token from the `first` on (at least 1)."""

    def written(self, prompt: list[int], new: int) -> list[int]:
        """The `new` likeliest tokens, also after one that ends an answer."""

    def told(self) -> dict[str, Any]:
        """What it decided, `kv_bytes_per_token` among it."""


Start = Callable[[Mapping[str, Any], Mapping[str, Any], int], Engine]  # of a request and its arm, for texts of at most so many tokens


@contextmanager
def in_one_line() -> Iterator[None]:
    """What an engine refuses ends in one line, not in its traceback."""
    try:
        yield
    except Exception as why:
        raise SystemExit(f"{type(why).__name__}: {' '.join(str(why).split())}"[:300]) from why


def arm_of(request: Mapping[str, Any], engine: str) -> tuple[str, Mapping[str, Any]]:
    """The name of the only arm, and what it asks for."""
    if len(request["arms"]) != 1:
        raise SystemExit(f"{engine} has one precision of its cache in a process: one arm, not {len(request['arms'])}")
    ((name, arm),) = request["arms"].items()
    return name, arm


def walked(request: Mapping[str, Any], name: str, start: Callable[[int], Engine], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """The scores of all windows through the arm `name`, and where there is a `vocabulary` the continuation of the request's prompts."""
    windows, prompts = request["windows"], prompts_of(request, vocabulary) if vocabulary else {}
    longest = max(len(w["tokens"]) for w in windows)
    engine = start(max([longest, *(len(p) + new_of(request, key) for key, p in prompts.items())]))
    seconds, places, chunks = {name: 0.0}, [], []
    for number, window in enumerate(windows):
        with timed(seconds, name):
            found = engine.scored(window["tokens"], window["first"])
        if len(found) != len(window["tokens"]) - window["first"]:
            raise SystemExit(f"the engine scored {len(found)} tokens of a window, not {len(window['tokens']) - window['first']}")
        places += found
        chunks += [number] * len(found)
    nll = -np.array([logprob for logprob, _ in places], np.float64)
    if not np.isfinite(nll).all():
        raise SystemExit("the engine's logits are not finite")
    written = {key: ended(engine.written(p, new_of(request, key)), vocabulary.ends) for key, p in prompts.items()} if vocabulary else {}
    told = engine.told()
    texts = {key: vocabulary.decode(ids) for key, ids in written.items()} if vocabulary else {}
    return {
        f"{name}/nll": nll,
        f"{name}/top_ids": np.array([[token for token, _ in best] for _, best in places], np.int32),
        f"{name}/top_logprobs": np.array([[logprob for _, logprob in best] for _, best in places], np.float32),
        "chunk": np.array(chunks, np.int32),
        **{f"{name}/{key}": np.array(ids, np.int32) for key, ids in written.items()},
        "told": {
            "seconds": seconds,
            "cache_bytes": {name: round(told["kv_bytes_per_token"] * longest)},
            **({"texts": {name: texts}} if written else {}),
            **told,
        },
    }


def ended(ids: list[int], ends: Any) -> list[int]:
    """Up to the first that ends an answer, which is the last of them."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]

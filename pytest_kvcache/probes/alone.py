"""One arm in a process of its own, of an engine that holds one cache: its scores, then what it goes on to write.

An engine's script says how it starts (`Start`), the rest is here. The answer: `ARM/nll`, `ARM/top_ids` and `ARM/top_logprobs` of every
scored token (in place of a divergence those of the likeliest tokens where it was predicted, the likeliest first), `chunk` (the window of
each), `ARM/PROMPT` of each prompt (its new tokens, of which the one that ends an answer is the last), and `told`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from asked import Vocabulary, main, tokens
from greedy import new_of, prompts_of
from lockstep import timed

TOP = 20
Place = tuple[float, list[tuple[int, float]]]  # where a token was predicted: its log-probability; the likeliest ones and theirs, falling


class Engine(Protocol):
    """An engine with one arm's cache, for one text at a time."""

    def scored(self, text: list[int], first: int) -> list[Place]:
        """One for each token from the `first` on (at least 1)."""

    def written(self, prompt: list[int], new: int) -> list[int]:
        """The `new` likeliest tokens, also those after one that ends an answer."""

    def told(self) -> dict[str, Any]:
        """What it decided, and `kv_bytes_per_token`. What is text belongs to this arm alone."""


Start = Callable[[Mapping[str, Any], Mapping[str, Any], int], Engine]  # of a request and its arm, for texts of at most so many tokens


@contextmanager
def in_one_line() -> Iterator[None]:
    """What an engine refuses ends in one line, not in its traceback."""
    try:
        yield
    except Exception as why:
        raise SystemExit(f"{type(why).__name__}: {' '.join(str(why).split())}"[:300]) from why


def run(name: str, start: Start, versions: Mapping[str, str]) -> None:
    """Answers the request that the command line names, with the engine called `name`."""
    try:
        main({
            "walk": lambda asked: walked(asked, name, start),
            "tokens": lambda asked: tokens(asked, vocabulary_of(asked["model"]), versions),
        })  # fmt: skip
    except SystemExit as why:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)  # at an ordinary end an engine's threads and processes have a word after ours


def vocabulary_of(model: str) -> Vocabulary:
    """That of transformers, which these engines take their tokenizers from. Imported where it is asked for: scoring does not need it."""
    import in_transformers  # type: ignore[import-not-found]  # by its path

    found: Vocabulary = in_transformers.vocabulary_of(model)
    return found


def walked(request: Mapping[str, Any], name: str, start: Start) -> dict[str, Any]:
    """The scores of all windows, and where the request has `prompts` what the arm goes on to write (`new` tokens of each)."""
    if len(request["arms"]) != 1:
        raise SystemExit(f"{name} has one precision of its cache in a process: one arm, not {len(request['arms'])}")
    ((key, arm),) = request["arms"].items()
    vocabulary = vocabulary_of(request["model"]) if request.get("prompts") else None
    prompts = prompts_of(request, vocabulary) if vocabulary else {}
    longest = max(len(w["tokens"]) for w in request["windows"])
    engine = start(request, arm, max([longest, *(len(p) + new_of(request, n) for n, p in prompts.items())]))
    found = scores(engine, request, key)
    written = {n: engine.written(p, new_of(request, n)) for n, p in prompts.items()}
    told = found.pop("told") | engine.told()
    told["cache_bytes"] = {key: round(told["kv_bytes_per_token"] * longest)}
    if vocabulary:
        written = {n: ended(ids, vocabulary.ends) for n, ids in written.items()}
        told["texts"] = {key: {n: vocabulary.decode(ids) for n, ids in written.items()}}
    return found | {f"{key}/{n}": np.array(ids, np.int32) for n, ids in written.items()} | {"told": told}


def scores(engine: Engine, request: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arrays of the arm `key`, and in `told` the seconds that it took."""
    seconds, chunks = {key: 0.0}, []
    places: list[Place] = []
    for number, window in enumerate(request["windows"]):
        with timed(seconds, key):
            found = engine.scored(window["tokens"], window["first"])
        places += found
        chunks += [number] * (len(window["tokens"]) - window["first"])
    if len(places) != len(chunks):
        raise SystemExit(f"the engine scored {len(places)} tokens, not {len(chunks)}")
    nll = -np.array([logprob for logprob, _ in places], np.float64)
    if not np.isfinite(nll).all():
        raise SystemExit("the engine's logits are not finite")
    return {
        f"{key}/nll": nll,
        f"{key}/top_ids": np.array([[token for token, _ in best] for _, best in places], np.int32),
        f"{key}/top_logprobs": np.array([[logprob for _, logprob in best] for _, best in places], np.float32),
        "chunk": np.array(chunks, np.int32),
        "told": {"seconds": seconds},
    }


def ended(ids: list[int], ends: Collection[int]) -> list[int]:
    """Up to the first that ends an answer, which is the last of them."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]

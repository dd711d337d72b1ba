"""A scenario and a seed become requests: the same bytes on every machine, every prompt unique and of exact length.

Prompts are made of words that are one token each in the model's own tokenizer, so that `isl` words are `isl` tokens.
Where a server takes token ids, the same draw gives ids. The server's own count (`usage.prompt_tokens`) proves it.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

from .arrivals import Arrivals, due
from .lengths import drawn, spread
from .scenarios import ClosedLoop, OpenLoop, Traffic
from .spec import SpecError, json_hash

WORKLOAD_VERSION = "words.v1"
WARM_UP = "warm-up"  # what the name of a part begins with whose requests are not measured
_WORD = re.compile(r"[a-z]{3,10}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to send: its prompt and the output length asked for."""

    index: int
    prompt: str
    isl: int
    osl: int


def single_token_words(tokenizer: dict[str, Any]) -> tuple[str, ...]:
    """Lower-case words that are one token when they follow a space, in a fixed order.

    `tokenizer` is the parsed `tokenizer.json`. Byte-level BPE marks a leading space by U+0120, SentencePiece by
    U+2581; both split at spaces before merging, so a word that is in the vocabulary stays one token.
    """
    vocab = tokenizer.get("model", {}).get("vocab", {})
    names = vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab)
    words = sorted({n[1:] for n in names if n[:1] in "\u0120\u2581" and _WORD.fullmatch(n[1:])})
    if len(words) < 1000:
        raise SpecError(f"the tokenizer has only {len(words)} lower-case words of one token; 1000 are needed for prompts")
    return tuple(words)


def end_tokens(tokenizer: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the special tokens of a parsed `tokenizer.json`, those that end a text among them, ascending."""
    added = tokenizer.get("added_tokens")
    tokens = (t for t in (added if isinstance(added, list) else ()) if isinstance(t, dict))
    return tuple(sorted({t["id"] for t in tokens if t.get("special") and type(t.get("id")) is int}))


def _rng(*parts: object) -> random.Random:
    # hash() is salted per process; a digest is the same everywhere.
    return random.Random(hashlib.sha256("|".join(map(str, parts)).encode()).digest())


def make_requests(
    scenario: Traffic, words: tuple[str, ...], *, part: str = "measured", salt: str = "", n: int | None = None
) -> tuple[Request, ...]:
    """`n` requests (default: the scenario's own number), unique from their first words on, so that no prefix is shared:
    neither inside a scenario nor between two on one server. `part` keeps warm-up prompts apart from measured ones, `salt` those of one
    time from those of another, which have the same lengths.

    The lengths of a warm-up are spread over all that may be drawn, so that no measured request is the first of its shape: the longest
    prompt first, with the shortest answer, since no context need hold the longest of both.
    """
    rng = _rng(WORKLOAD_VERSION, part + salt, scenario, scenario.seed)
    count = scenario.n_requests if n is None else n
    if part.startswith(WARM_UP):
        isl, osl = spread(scenario.isl, count), spread(scenario.osl, count)[::-1]
    else:
        sizes = (("isl", scenario.isl), ("osl", scenario.osl))
        isl, osl = (drawn(length, _rng("lengths.v1", name, part, scenario, scenario.seed), count) for name, length in sizes)
    return tuple(
        Request(index=i, prompt=" " + " ".join(words[rng.randrange(len(words))] for _ in range(isl[i])), isl=isl[i], osl=osl[i])
        for i in range(count)
    )


def shortened(request: Request, words: int) -> str:
    """The prompt without its last `words` words."""
    if not words:
        return request.prompt
    return " " + " ".join(request.prompt.split()[: max(1, request.isl - words)])


def schedule(scenario: OpenLoop, *, part: str = "measured", n: int | None = None) -> tuple[float, ...]:
    """When each request of an open loop is due, in seconds after the start: fixed by the scenario and its seed."""
    rng = _rng("schedule.v1", part, scenario, scenario.seed)
    arrivals = Arrivals(kind=scenario.arrivals, rate=scenario.rate, burstiness=scenario.burstiness)
    return due(arrivals, rng, scenario.n_requests if n is None else n)


def workload_hash(requests: tuple[Request, ...], scenario: Traffic) -> str:
    """Identity of what is asked: prompts, lengths, order, and concurrency or schedule."""
    load = scenario.concurrency if isinstance(scenario, ClosedLoop) else scenario.load_parts()
    return json_hash([WORKLOAD_VERSION, load, [[r.prompt, r.isl, r.osl] for r in requests]])

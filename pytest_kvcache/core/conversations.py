"""Prompts that begin alike: conversations in turns, and groups of prompts with one prefix. Pure.

They have exact lengths and are the same for a seed everywhere. A prompt is a sequence of word ids first (`core.prefixes.of_tokens` takes
them) and a text second. What is not meant to be shared differs from the first word on, as far as there are as many words (see `Wording`).

The hits that the specs count are of an unlimited cache that keeps full blocks, asked by one request after the other. The answers in a
prompt are scripted, not what the server wrote: only the blocks of prompts are found again, the block in which a prompt ends is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import count, islice
from typing import TYPE_CHECKING

from .spec import SpecError

if TYPE_CHECKING:
    from .workload import Request

CONVERSATIONS_VERSION = "conversations.v1"
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Wording:
    """A text for each whole number from 0 on, out of `vocabulary` words; another set of texts for each `seed`.

    The first two words are the number's last two digits to the base `vocabulary`, moved by the seed: of two numbers the first word differs
    unless they are equal modulo `vocabulary`, and one of two words does below its square. All other words are drawn.
    """

    vocabulary: int
    seed: tuple[object, ...]

    @cached_property
    def _moved(self) -> tuple[int, int]:
        random = _random("first words", *self.seed)
        return _below(self.vocabulary, random), _below(self.vocabulary, random)

    def ids(self, number: int, tokens: int) -> Ids:
        """The first `tokens` words of the text `number`."""
        rest, low = divmod(number, self.vocabulary)
        first = [(low + self._moved[0]) % self.vocabulary, (rest + self._moved[1]) % self.vocabulary]
        random = _random(number, *self.seed)
        return (*first[:tokens], *(_below(self.vocabulary, random) for _ in range(tokens - 2)))


def _random(*seed: object) -> Callable[[], float]:
    """Numbers from 0 to below 1. No other method of a generator is promised to stay as it is from one version of Python to the next."""
    from .workload import _rng  # when it is called: a scenario, which the workload must know, may hold a spec of this module

    return _rng(CONVERSATIONS_VERSION, *seed).random


def _below(n: int, random: Callable[[], float]) -> int:
    return int(random() * n)


def worded(prompts: Iterable[Ids], words: Sequence[str], osl: Iterable[int]) -> tuple[Request, ...]:
    """Requests of prompts given as word ids, in their order, each with its number of output tokens."""
    from .workload import Request

    return tuple(
        Request(index=i, prompt=" " + " ".join([words[j] for j in ids]), isl=len(ids), osl=tokens)
        for i, (ids, tokens) in enumerate(zip(prompts, osl, strict=True))
    )


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """So many `conversations` of `turns` requests each. The first prompt is `system` tokens that all conversations share and `first` of its
    own; each later one is the prompt before, a scripted answer of `osl` tokens, and `more` new tokens. Each asks for `osl` tokens."""

    conversations: int
    turns: int
    first: int
    more: int
    osl: int
    system: int = 0

    def __post_init__(self) -> None:
        _whole(self, may_be_0=("system",))

    def __str__(self) -> str:
        system = f"-sys{self.system}" if self.system else ""
        return f"conv{self.conversations}x{self.turns}-isl{self.first}+{self.more}-osl{self.osl}{system}"

    @property
    def n_requests(self) -> int:
        return self.conversations * self.turns

    @property
    def context(self) -> int:
        """Tokens of the longest request, its answer among them."""
        return self.isl(self.turns - 1) + self.osl

    def isl(self, turn: int) -> int:
        """Tokens of the prompt of a turn, counted from 0."""
        return self.system + self.first + turn * (self.osl + self.more)

    def place(self, index: int, concurrency: int) -> tuple[int, int]:
        """Conversation and turn, from 0, of the request with this index in a closed loop."""
        step, stream = divmod(index, concurrency)
        batch, turn = divmod(step, self.turns)
        return batch * concurrency + stream, turn

    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return self.conversations * (self.turns * self.isl(0) + (self.osl + self.more) * self.turns * (self.turns - 1) // 2)

    def hit_tokens(self, block: int) -> int:
        """Of all prompts, what is found in a cache of blocks of `block` tokens: of a first turn the system's, of a later one all of the
        prompt before."""
        later = sum(self.isl(turn) // block * block for turn in range(self.turns - 1))
        return self.conversations * later + (self.conversations - 1) * (self.system // block * block)


def conversation_prompts(spec: Conversations, vocabulary: int, *, concurrency: int, seed: int, part: str = "measured") -> Iterator[Ids]:
    """Prompts in the order of a closed loop: request i belongs to stream i % `concurrency`, which holds one conversation after the other
    from its first turn to its last. `part` sets them apart from others of the same seed on one server. SpecError unless all streams have
    as many conversations.

    `core.load.Load.share` keeps the streams apart between workers (i % concurrency % workers), but inside a worker a stream that is free
    takes the next request of them all (`harness.wire`, `_send_next`; `harness.proxied`, `_stream`). So a turn goes to its own stream, after
    the answer to the one before, for certain only where each worker has one stream; else it may be sent while that one is still answered.
    """
    if concurrency < 1 or spec.conversations % concurrency:
        raise SpecError(f"Conversations: conversations={spec.conversations} must be a multiple of the concurrency, {concurrency}")
    shared = Wording(vocabulary, ("system", part, seed)).ids(0, spec.system)
    own, tokens = Wording(vocabulary, ("conversation", part, seed)), spec.isl(spec.turns - 1) - spec.system
    for batch in range(0, spec.conversations, concurrency):
        # A prompt is the beginning of all that is said in its conversation.
        said = [shared + own.ids(batch + stream, tokens) for stream in range(concurrency)]
        for turn in range(spec.turns):
            yield from (text[: spec.isl(turn)] for text in said)


def conversation_requests(
    spec: Conversations, words: Sequence[str], *, concurrency: int, seed: int, part: str = "measured"
) -> tuple[Request, ...]:
    """The same as requests."""
    prompts = conversation_prompts(spec, len(words), concurrency=concurrency, seed=seed, part=part)
    return worded(prompts, words, [spec.osl] * spec.n_requests)


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """So many `requests`, each with the `prefix` tokens of one of `groups` and `rest` tokens of its own, asking for `osl` tokens. Every
    group has its turn, in another order each time, before one comes again: the first `groups` requests find nothing."""

    requests: int
    groups: int
    prefix: int
    rest: int
    osl: int

    def __post_init__(self) -> None:
        _whole(self)

    def __str__(self) -> str:
        return f"prefix{self.groups}x{self.prefix}+{self.rest}-osl{self.osl}-n{self.requests}"

    @property
    def n_requests(self) -> int:
        return self.requests

    @property
    def context(self) -> int:
        """Tokens of a request, its answer among them."""
        return self.prefix + self.rest + self.osl

    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return self.requests * (self.prefix + self.rest)

    def hit_tokens(self, block: int) -> int:
        """Of all prompts, what is found in a cache of blocks of `block` tokens: the prefix, but for the first request of each group."""
        return (self.requests - min(self.requests, self.groups)) * (self.prefix // block * block)


def shared_prefix_order(spec: SharedPrefixes, *, seed: int, part: str = "measured") -> tuple[int, ...]:
    """The group of each request."""
    return tuple(islice(_rounds(spec.groups, seed, part), spec.requests))


def _rounds(groups: int, seed: int, part: str) -> Iterator[int]:
    for number in count():
        random, order = _random("order", number, part, seed), list(range(groups))
        for last in range(groups - 1, 0, -1):
            other = _below(last + 1, random)
            order[last], order[other] = order[other], order[last]
        yield from order


def shared_prefix_prompts(spec: SharedPrefixes, vocabulary: int, *, seed: int, part: str = "measured") -> Iterator[Ids]:
    """Prompts in their order. `part` sets them apart from others of the same seed on one server."""
    of_group, own = (Wording(vocabulary, (name, part, seed)) for name in ("prefix", "rest"))
    order = shared_prefix_order(spec, seed=seed, part=part)
    prefixes = {group: of_group.ids(group, spec.prefix) for group in set(order)}
    for i, group in enumerate(order):
        yield prefixes[group] + own.ids(i, spec.rest)


def shared_prefix_requests(spec: SharedPrefixes, words: Sequence[str], *, seed: int, part: str = "measured") -> tuple[Request, ...]:
    """The same as requests."""
    return worded(shared_prefix_prompts(spec, len(words), seed=seed, part=part), words, [spec.osl] * spec.requests)


def _whole(spec: Conversations | SharedPrefixes, may_be_0: tuple[str, ...] = ()) -> None:
    for name in (f.name for f in fields(spec)):
        value, least = getattr(spec, name), 0 if name in may_be_0 else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{type(spec).__name__}: {name}={value!r} must be a whole number of at least {least}")

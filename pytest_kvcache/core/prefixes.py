"""The prefix-cache hit rate that a sequence of requests can have: tokens found in the cache / tokens asked. Pure.

Only full blocks are found, from the first on without a gap, and never the last token of a prompt, whose logits must be computed: at most
floor((tokens - 1) / block) blocks (vLLM, `KVCacheManager.get_computed_blocks`, vllm/v1/core/kv_cache_manager.py at 003df2961: the hit is no
longer than num_tokens - 1; `FullAttentionManager.find_longest_cache_hit` at 129ab7c60 floors it to blocks; its counters
`prefix_cache_queries` and `_hits` add a prompt's tokens and its hit). What a request has computed stays, its answer too but for the last
token, until the room is needed: least recently released first, of one request its end first (`BlockPool.free_blocks` at c59cb7941).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request: `tokens` of its prompt, `keys` of the full blocks that it leaves (each stands for its block and all before it), and how
    many `blocks` it takes at its end, full or not."""

    tokens: int
    keys: tuple[Hashable, ...]
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Hits:
    """Tokens asked and tokens found, by request."""

    asked: tuple[int, ...]
    found: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens found / tokens asked; 0 of nothing."""
        return sum(self.found) / sum(self.asked) if self.asked else 0.0


def of_tokens(prompts: Iterable[Sequence[int]], block_size: int, answers: Iterable[Sequence[int]] | None = None) -> tuple[Asked, ...]:
    """Requests by the token ids of their prompts and, where the next turn repeats them, of their answers (as the server tokenises them)."""
    given = [tuple(prompt) for prompt in prompts]
    written: list[tuple[int, ...]] = [()] * len(given) if answers is None else [tuple(answer) for answer in answers]
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    asked = []
    for prompt, answer in zip(given, written, strict=True):
        held, before, keys = _held(prompt + answer, len(prompt)), 0, []
        for start in range(0, len(held) - block_size + 1, block_size):
            before = numbers.setdefault((before, held[start : start + block_size]), len(numbers) + 1)
            keys.append(before)
        asked.append(Asked(tokens=len(prompt), keys=tuple(keys), blocks=-(-len(held) // block_size)))
    return tuple(asked)


def _held(text: tuple[int, ...], prompt: int) -> tuple[int, ...]:
    """What has keys and values at the end: all but the last token of the answer."""
    return text[: max(prompt, len(text) - 1)]


def of_hashes(requests: Iterable[tuple[Sequence[Hashable], int, int]], block_size: int) -> tuple[Asked, ...]:
    """Requests (hash ids, input tokens, output tokens) of a trace in Mooncake's form: an id stands for a block of the prompt and all before
    it; the last may be of a block that is not full, which is never found. Answers have no ids and only take room."""
    asked = []
    for ids, isl, osl in requests:
        full = isl // block_size
        if len(ids) not in (full, -(-isl // block_size)):
            raise ValueError(f"{len(ids)} hash ids for {isl} tokens in blocks of {block_size}")
        asked.append(Asked(tokens=isl, keys=tuple(ids[:full]), blocks=-(-max(isl, isl + osl - 1) // block_size)))
    return tuple(asked)


# -- the cache ----------------------------------------------------------------------------------------------------------


@dataclass
class _Cache:
    """Keys in use with the number of their users, keys that are idle in the order in which they go, and blocks of single requests."""

    capacity: int | None
    users: dict[Hashable, int] = field(default_factory=dict)
    idle: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    own: int = 0
    running: deque[tuple[Asked, int]] = field(default_factory=deque)

    def found(self, asked: Asked, most: int) -> int:
        """Blocks of the prompt that are there, from the first on."""
        for i, key in enumerate(asked.keys[:most]):
            if key not in self.users and key not in self.idle:
                return i
        return min(most, len(asked.keys))

    def fits(self, asked: Asked, hit: int) -> bool:
        if self.capacity is None:
            return True
        woken = sum(key in self.idle for key in asked.keys[:hit])
        return len(self.users) + self.own + woken + asked.blocks - hit <= self.capacity

    def start(self, asked: Asked, hit: int) -> None:
        for key in asked.keys[:hit]:
            self.idle.pop(key, None)
            self.users[key] = self.users.get(key, 0) + 1
        self.own += asked.blocks - hit
        self.running.append((asked, hit))
        while self.capacity is not None and len(self.users) + self.own + len(self.idle) > self.capacity:
            self.idle.popitem(last=False)

    def end(self) -> None:
        """The oldest request ends; what it computed can be found from now on."""
        asked, hit = self.running.popleft()
        self.own -= asked.blocks - hit
        for i in reversed(range(len(asked.keys))):
            key = asked.keys[i]
            left = self.users.get(key, 0) - (i < hit)
            if left > 0:
                self.users[key] = left
                continue
            self.users.pop(key, None)
            self.idle[key] = None
            self.idle.move_to_end(key)


def theoretical_hits(requests: Iterable[Asked], block_size: int, *, capacity: int | None = None, concurrent: int = 1) -> Hits:
    """What requests find, in order of arrival, in a cache of `capacity` blocks (None: unlimited) that is empty at first.

    With `concurrent` of 1 each begins when the one before has ended. No order of service finds more in an unlimited cache: the upper bound.
    With n, a request begins when the n-th before it has ended, and finds only what had ended by then: the lower bound of n clients, since
    engines share a block as soon as it is computed. Where the pool has no room for another it waits for the oldest to end. ValueError for a
    request that does not fit at all.
    """
    if concurrent < 1:
        raise ValueError(f"concurrent={concurrent} must be at least 1")
    cache, counted, found = _Cache(capacity), [], []
    for asked in requests:
        if capacity is not None and asked.blocks > capacity:
            raise ValueError(f"a request of {asked.blocks} blocks does not fit into {capacity}")
        while len(cache.running) >= concurrent:
            cache.end()
        most = max(0, asked.tokens - 1) // block_size
        while not cache.fits(asked, hit := cache.found(asked, most)):
            cache.end()
        cache.start(asked, hit)
        counted.append(asked.tokens)
        found.append(hit * block_size)
    return Hits(asked=tuple(counted), found=tuple(found))


# -- closed forms, of an unlimited cache and one request at a time ------------------------------------------------------


def conversation_hits(turns: Sequence[tuple[int, int]], block_size: int, *, answers: bool = True) -> Hits:
    """Of one conversation in turns of (new input tokens, output tokens), where each prompt is all that was said before and the new input.
    `answers`: whether the server finds its own answers again, which needs the client to send them back token for token."""
    said = [0, *accumulate(user + answer for user, answer in turns)]
    prompts = [before + user for before, (user, _) in zip(said, turns, strict=False)]
    found = [0]
    for i, prompt in enumerate(prompts[1:], 1):
        kept = max(prompts[i - 1], said[i] - 1) if answers else prompts[i - 1]
        found.append(min(kept, prompt - 1) // block_size * block_size)
    return Hits(asked=tuple(prompts), found=tuple(found[: len(prompts)]))


def shared_prefix_hits(prefix: int, own: Sequence[int], block_size: int) -> Hits:
    """Of prompts that begin with the same `prefix` tokens and go on with so many tokens of their own, no two alike."""
    asked = tuple(prefix + tokens for tokens in own)
    return Hits(asked=asked, found=tuple(min(prefix, n - 1) // block_size * block_size if i else 0 for i, n in enumerate(asked)))

"""A server with a paged KV cache that exists only as a discrete-event simulation, so that the truth about it is known: for tests of estimators.

Continuous batching: every step decodes one token of each running request and computes a piece of the prompts that still wait for theirs. What
a step takes is a sum of parts, so that throughput, TTFT and cadence follow from the parts by arithmetic. Nothing of the product is used here.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Server:
    """Times in seconds. A step takes `step_s`, `sequence_s` more for each sequence that decodes, `kv_token_s` for each token whose keys and
    values these read, and of a prompt that has been computed up to n tokens `prefill_s` * n**`power` in all. At most `chunk` prompt tokens
    are computed in a step, at most `max_requests` are served at once, and the pool has `blocks` of `block_size` tokens."""

    step_s: float = 0.02
    sequence_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_s: float = 0.0
    power: float = 1.0
    chunk: int = 1 << 30
    max_requests: int = 1 << 30
    blocks: int = 1 << 30
    block_size: int = 16
    prefix_cache: bool = False

    def busy_s(self, asks: list[Ask]) -> float:
        """What requests take of the server besides whole steps."""
        return sum(
            self.sequence_s * (a.osl - 1) + self.kv_token_s * sum(range(a.isl, a.isl + a.osl - 1)) + self.prefill_s * a.isl**self.power
            for a in asks
        )  # fmt: skip

    def soft_knee(self, asks: list[Ask]) -> float:
        """Concurrency at which requests take as long as the steps that they share: N clients get N / (step_s + N busy_s / tokens) tokens a
        second, as long as a prompt is computed in one step and nothing else limits them."""
        return self.step_s * sum(a.osl for a in asks) / self.busy_s(asks)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request of `isl` input and `osl` output tokens; `tokens` are the ids of both, where the prefix cache needs them."""

    isl: int
    osl: int
    tokens: tuple[int, ...] = ()


@dataclass(eq=False)
class Served:
    """What became of a request; `computed` of its tokens have keys and values, `hit` of them came from the prefix cache."""

    ask: Ask
    sent_s: float
    emitted: int = 0
    computed: int = 0
    hit: int | None = None
    blocks: list[tuple[int, ...] | None] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def known(self) -> int:
        return self.ask.isl + self.emitted

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.last_s - self.first_s) * 1e3 / (self.ask.osl - 1)


@dataclass
class Pool:
    """Blocks by what is in them: None for one that is of a single request, else the whole text up to its end, which may be shared."""

    server: Server
    own: int = 0
    users: dict[tuple[int, ...], int] = field(default_factory=dict)
    idle: dict[tuple[int, ...], int] = field(default_factory=dict)  # cached and free for whoever needs room; with the time of its release
    clock: int = 0

    @property
    def used(self) -> int:
        return self.own + len(self.users)

    def reuse(self, request: Served) -> None:
        """The cached blocks that a request begins with, but for its last token, which must be computed."""
        size = self.server.block_size
        for end in range(size, request.known, size):
            text = request.ask.tokens[:end]
            if text not in self.users and text not in self.idle:
                break
            self.idle.pop(text, None)
            self.users[text] = self.users.get(text, 0) + 1
            request.blocks.append(text)
        request.computed = len(request.blocks) * size

    def room(self, request: Served, tokens: int) -> bool:
        """Whether there is room for so many tokens of a request, which it takes if there is."""
        more = math.ceil(tokens / self.server.block_size) - len(request.blocks)
        if self.used + more > self.server.blocks:
            return False
        self.own += max(0, more)
        request.blocks += [None] * more
        while self.used + len(self.idle) > self.server.blocks:
            del self.idle[min(self.idle, key=self.idle.__getitem__)]
        return True

    def seal(self, request: Served) -> None:
        """Full blocks become reusable, but for those that another request has computed meanwhile."""
        if not self.server.prefix_cache:
            return
        for i in range(request.computed // self.server.block_size):
            text = request.ask.tokens[: (i + 1) * self.server.block_size]
            if request.blocks[i] is None and text not in self.users and text not in self.idle:
                request.blocks[i] = text
                self.users[text] = 1
                self.own -= 1

    def release(self, request: Served) -> None:
        """The end of a text is given up first."""
        for text in reversed(request.blocks):
            self.clock += 1
            if text is None:
                self.own -= 1
                continue
            self.users[text] -= 1
            if not self.users[text]:
                del self.users[text]
                self.idle[text] = self.clock
        request.blocks, request.computed = [], 0


@dataclass
class Outcome:
    """What a load made of the server: its requests in the order of their end, and for each step its start, its length, the share of the
    pool in use, the tokens that have keys and values there, and the tokens that were emitted at its end."""

    served: list[Served] = field(default_factory=list)
    steps: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    preempted: int = 0
    last_sent_s: float = 0.0

    def output_tok_s(self, after: int) -> float:
        """Output tokens a second between the end of request `after` and the last send."""
        start = self.served[after].last_s
        inside = [(at, at + length, tokens) for at, length, _, _, tokens in self.steps if start <= at and at + length <= self.last_sent_s]
        return sum(tokens for _, _, tokens in inside) / (inside[-1][1] - inside[0][0])


def closed_loop(server: Server, asks: list[Ask], concurrency: int) -> Outcome:
    """Clients that each send the next request when the last is answered."""
    return _simulate(server, asks, [0.0] * min(concurrency, len(asks)), closed=True)


def open_loop(server: Server, asks: list[Ask], due_s: list[float]) -> Outcome:
    """Requests that come when they are due, in order."""
    return _simulate(server, asks, due_s, closed=False)


def _simulate(server: Server, asks: list[Ask], due_s: list[float], *, closed: bool) -> Outcome:
    pool, outcome, now = Pool(server), Outcome(), 0.0
    coming = deque(Served(ask, due) for ask, due in zip(asks, due_s, strict=False))
    later = deque(asks[len(due_s) :])
    waiting: deque[Served] = deque()
    running: list[Served] = []
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].sent_s)
        while coming and coming[0].sent_s <= now:
            outcome.last_sent_s = max(outcome.last_sent_s, coming[0].sent_s)
            waiting.append(coming.popleft())
        length, advanced = _plan(server, pool, running, waiting, outcome)
        done, emitted = _advance(pool, advanced, now + length)
        outcome.steps.append((now, length, pool.used / server.blocks, sum(r.computed for r in running), emitted))
        now += length
        for request in done:
            running.remove(request)
            pool.release(request)
            outcome.served.append(request)
            if closed and later:
                coming.append(Served(later.popleft(), now))
    return outcome


def _plan(
    server: Server, pool: Pool, running: list[Served], waiting: deque[Served], outcome: Outcome
) -> tuple[float, list[tuple[Served, int]]]:
    """What a step takes, and how many tokens of which requests it computes."""
    length, budget, advanced, before = server.step_s, server.chunk, [], outcome.preempted
    for request in list(running):
        while request in running and not pool.room(request, request.known):
            last = running.pop()
            pool.release(last)
            waiting.appendleft(last)
            outcome.preempted += 1
    while waiting and outcome.preempted == before and len(running) < server.max_requests:
        request = waiting[0]
        if server.prefix_cache and not request.blocks:
            pool.reuse(request)
        found = request.computed
        if not pool.room(request, request.known):
            pool.release(request)
            assert running, f"{request.ask} does not fit"
            break
        request.hit = found if request.hit is None else request.hit
        running.append(waiting.popleft())
    for request in running:
        left = request.known - request.computed
        if left == 1 and request.emitted:
            advanced.append((request, 1))
            length += server.sequence_s + server.kv_token_s * request.computed
        elif tokens := min(left, budget):
            budget -= tokens
            advanced.append((request, tokens))
            length += server.prefill_s * ((request.computed + tokens) ** server.power - request.computed**server.power)
    return length, advanced


def _advance(pool: Pool, advanced: list[tuple[Served, int]], now: float) -> tuple[list[Served], int]:
    """Requests that end, and how many tokens came."""
    done, emitted = [], 0
    for request, tokens in advanced:
        request.computed += tokens
        pool.seal(request)
        if request.computed < request.known:
            continue
        request.emitted += 1
        emitted += 1
        request.first_s = now if request.emitted == 1 else request.first_s
        if request.emitted == request.ask.osl:
            request.last_s = now
            done.append(request)
    return done, emitted


# -- loads and noise ----------------------------------------------------------------------------------------------------


def mixed(seed: int, n: int, isl: tuple[int, int], osl: tuple[int, int]) -> list[Ask]:
    """Requests with lengths drawn evenly from two ranges, ends included."""
    draw = random.Random(seed)
    return [Ask(isl=draw.randint(*isl), osl=draw.randint(*osl)) for _ in range(n)]


def curve(server: Server, loads: tuple[int, ...], isl: tuple[int, int], osl: tuple[int, int], rounds: int = 6) -> dict[int, float]:
    """Output tokens a second by concurrency, without noise."""
    return {
        n: closed_loop(server, mixed(n, rounds * n + 12, isl, osl), n).output_tok_s(after=n) for n in loads
    }  # fmt: skip


def noisy(value: float, cv: float, draw: random.Random) -> float:
    """One run of a figure: restarts differ by a factor of this coefficient of variation."""
    return value * math.exp(draw.gauss(0, cv))

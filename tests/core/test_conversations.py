"""Conversations and shared prefixes: exact lengths, shared where it is said and nowhere else, in the order of the streams."""

import hashlib
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.conversations import (
    Conversations,
    SharedPrefixes,
    Wording,
    conversation_prompts,
    conversation_requests,
    shared_prefix_order,
    shared_prefix_prompts,
    shared_prefix_requests,
)
from pytest_kvcache.core.load import Load
from pytest_kvcache.core.spec import SpecError

WORDS = tuple(f"w{i}" for i in range(1500))
LENGTHS, SEEDS, BLOCKS = st.integers(1, 40), st.integers(0, 3), st.integers(1, 40)


def alike(a, b):
    """How many words two prompts have in common from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def hits(prompts, block):
    """Tokens that are found in full blocks of the prompts before, the plain way."""
    seen, found = set(), 0
    for prompt in prompts:
        ends = range(block, len(prompt) + 1, block)
        found += max((end for end in ends if end < len(prompt) and prompt[:end] in seen), default=0)
        seen |= {prompt[:end] for end in ends}
    return found


@st.composite
def talks(draw):
    """A spec and a concurrency that fits."""
    concurrency = draw(st.integers(1, 4))
    spec = Conversations(
        conversations=concurrency * draw(st.integers(1, 3)), turns=draw(st.integers(1, 5)),
        first=draw(LENGTHS), more=draw(LENGTHS), osl=draw(LENGTHS), system=draw(st.integers(0, 40)),
    )  # fmt: skip
    return spec, concurrency


PREFIXED = st.builds(SharedPrefixes, requests=st.integers(1, 40), groups=st.integers(1, 8), prefix=LENGTHS, rest=LENGTHS, osl=LENGTHS)


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 50), SEEDS)
def test_texts_of_two_numbers_differ_from_the_first_word_on(a, b, tokens, seed):
    wording = Wording(3200, ("x", seed))
    one, two = wording.ids(a, tokens), wording.ids(b, tokens)
    assert len(one) == tokens and all(0 <= i < 3200 for i in one)
    assert one == wording.ids(a, tokens + 7)[:tokens]
    if a == b:
        assert one == two
    elif tokens > 1:
        assert alike(one, two) <= (1 if a % 3200 == b % 3200 else 0)


@given(talks(), SEEDS)
def test_each_turn_is_the_one_before_an_answer_and_new_words(talk, seed):
    spec, concurrency = talk
    prompts = list(conversation_prompts(spec, len(WORDS), concurrency=concurrency, seed=seed))
    assert len(prompts) == spec.n_requests == spec.conversations * spec.turns
    assert sum(map(len, prompts)) == spec.prompt_tokens()
    assert max(map(len, prompts)) + spec.osl == spec.context
    for i, prompt in enumerate(prompts):
        _, turn = spec.place(i, concurrency)
        assert len(prompt) == spec.system + spec.first + turn * (spec.osl + spec.more) == spec.isl(turn)
        if turn:  # the turn before is the request before on the same stream
            assert prompt[: spec.isl(turn - 1)] == prompts[i - concurrency]


@given(talks(), SEEDS)
def test_conversations_share_the_system_prompt_and_nothing_else(talk, seed):
    spec, concurrency = talk
    first = {}
    for i, prompt in enumerate(conversation_prompts(spec, len(WORDS), concurrency=concurrency, seed=seed)):
        first.setdefault(spec.place(i, concurrency)[0], prompt)
    assert len(first) == spec.conversations
    assert all(alike(a, b) == spec.system for a, b in combinations(first.values(), 2))


@given(talks())
def test_a_stream_holds_one_conversation_at_a_time_in_the_order_of_its_turns(talk):
    """As `Load.share` gives them to workers of one stream each."""
    spec, concurrency = talk
    load = Load(bodies=(b"",) * spec.n_requests, osl=(1,) * spec.n_requests, concurrency=concurrency)
    met = []
    for worker in range(concurrency):
        places = [spec.place(i, concurrency) for i in load.share(worker, concurrency)[0]]
        talks = [talk for talk, _ in places[:: spec.turns]]
        assert places == [(talk, turn) for talk in talks for turn in range(spec.turns)]
        met += talks
    assert sorted(met) == list(range(spec.conversations))


@given(talks(), BLOCKS, SEEDS)
def test_hits_of_conversations_are_those_of_their_formula(talk, block, seed):
    spec, concurrency = talk
    assert hits(conversation_prompts(spec, len(WORDS), concurrency=concurrency, seed=seed), block) == spec.hit_tokens(block)


def test_hits_of_a_conversation_by_hand():
    """Prompts of 150, 190, 230 tokens, 100 of them the system's: of the first conversation 144 + 176 in blocks of 16, of the second 96 more."""
    spec = Conversations(conversations=2, turns=3, system=100, first=50, osl=30, more=10)
    assert spec.hit_tokens(16) == 2 * (144 + 176) + 96
    assert spec.prompt_tokens() == 2 * (150 + 190 + 230)
    assert spec.context == 260


@given(talks(), SEEDS)
def test_more_conversations_begin_with_the_fewer(talk, seed):
    spec, concurrency = talk
    more = replace(spec, conversations=spec.conversations + concurrency)
    fewer = conversation_requests(spec, WORDS, concurrency=concurrency, seed=seed)
    assert conversation_requests(more, WORDS, concurrency=concurrency, seed=seed)[: len(fewer)] == fewer


@given(PREFIXED, SEEDS)
def test_prompts_share_the_prefix_of_their_group_and_nothing_else(spec, seed):
    prompts = list(shared_prefix_prompts(spec, len(WORDS), seed=seed))
    groups = shared_prefix_order(spec, seed=seed)
    assert len(prompts) == len(groups) == spec.n_requests
    assert {len(p) for p in prompts} == {spec.prefix + spec.rest} == {spec.context - spec.osl}
    assert sum(map(len, prompts)) == spec.prompt_tokens()
    for (a, of_a), (b, of_b) in combinations(zip(prompts, groups, strict=True), 2):
        assert alike(a, b) == (spec.prefix if of_a == of_b else 0)


@given(PREFIXED, SEEDS)
def test_every_group_has_its_turn_before_one_comes_again(spec, seed):
    order = shared_prefix_order(spec, seed=seed)
    for start in range(0, spec.requests, spec.groups):
        turn = order[start : start + spec.groups]
        assert len(set(turn)) == len(turn) and set(turn) <= set(range(spec.groups))


def test_the_order_is_drawn_evenly():
    """Of 3 groups each of the 6 orders as often, within 5 standard errors."""
    order = shared_prefix_order(SharedPrefixes(requests=18_000, groups=3, prefix=1, rest=1, osl=1), seed=1)
    counts = [
        sum(order[i : i + 3] == one for i in range(0, 18_000, 3))
        for one in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    ]
    assert sum(counts) == 6000 and all(abs(n - 1000) < 5 * 29 for n in counts)


@given(PREFIXED, BLOCKS, SEEDS)
def test_hits_of_shared_prefixes_are_those_of_their_formula(spec, block, seed):
    assert hits(shared_prefix_prompts(spec, len(WORDS), seed=seed), block) == spec.hit_tokens(block)


@given(PREFIXED, st.integers(1, 40), SEEDS)
def test_more_requests_begin_with_the_fewer(spec, more, seed):
    fewer = shared_prefix_requests(spec, WORDS, seed=seed)
    assert shared_prefix_requests(replace(spec, requests=spec.requests + more), WORDS, seed=seed)[: len(fewer)] == fewer


TALK = Conversations(conversations=4, turns=3, first=20, more=9, osl=7, system=12)
PREFIXES = SharedPrefixes(requests=20, groups=3, prefix=16, rest=5, osl=7)


def test_requests_are_the_prompts_in_words():
    for requests, prompts in (
        (conversation_requests(TALK, WORDS, concurrency=2, seed=1), conversation_prompts(TALK, len(WORDS), concurrency=2, seed=1)),
        (shared_prefix_requests(PREFIXES, WORDS, seed=1), shared_prefix_prompts(PREFIXES, len(WORDS), seed=1)),
    ):
        for i, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
            assert (request.index, request.isl, request.osl) == (i, len(ids), 7)
            assert request.prompt == "".join(f" w{j}" for j in ids)  # each word follows a space, the first too


def test_a_seed_gives_the_same_bytes_on_every_machine():
    """What was recorded by another process; a change of it is another workload, and CONVERSATIONS_VERSION must say so."""
    for requests, digest in (
        (conversation_requests(TALK, WORDS, concurrency=2, seed=1), "3e2ffb841984b167"),
        (shared_prefix_requests(PREFIXES, WORDS, seed=1), "b48db695b7fab2b8"),
    ):
        assert hashlib.sha256("\n".join(r.prompt for r in requests).encode()).hexdigest()[:16] == digest


def test_seeds_and_parts_have_prompts_of_their_own():
    starts = [
        request.prompt.split()[:4]
        for seed in (0, 1) for part in ("measured", "warm-up")
        for request in (conversation_requests(TALK, WORDS, concurrency=2, seed=seed, part=part)[0], shared_prefix_requests(PREFIXES, WORDS, seed=seed, part=part)[0])
    ]  # fmt: skip
    assert len({tuple(s) for s in starts}) == len(starts) == 8


@pytest.mark.parametrize(("make", "told"), [
    (lambda: replace(TALK, turns=0), "turns=0 must be a whole number of at least 1"), (lambda: replace(TALK, system=-1), "system=-1 .* at least 0"),
    (lambda: replace(TALK, more=True), "more=True"), (lambda: replace(TALK, first=1.5), "first=1.5"), (lambda: replace(PREFIXES, rest=0), "rest=0"),
    (lambda: replace(PREFIXES, groups="3"), "groups='3'"),
    (lambda: list(conversation_prompts(TALK, 1000, concurrency=3, seed=0)), "conversations=4 must be a multiple of the concurrency, 3"),
    (lambda: list(conversation_prompts(TALK, 1000, concurrency=0, seed=0)), "a multiple of the concurrency, 0"),
])  # fmt: skip
def test_what_cannot_be_is_refused(make, told):
    with pytest.raises(SpecError, match=told):
        make()


def test_ids():
    assert str(TALK) == "conv4x3-isl20+9-osl7-sys12"
    assert str(replace(TALK, system=0)) == "conv4x3-isl20+9-osl7"
    assert str(PREFIXES) == "prefix3x16+5-osl7-n20"

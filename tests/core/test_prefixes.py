"""Theoretical prefix hits: by hand, by closed forms, and against a simulated server that looks texts up whole."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.core.prefixes import Asked, conversation_hits, of_hashes, of_tokens, shared_prefix_hits, theoretical_hits

from ..simulated_server import Ask, Server, closed_loop

A, B, C = ([n] * 4 for n in (1, 2, 3))


def found(prompts, block=4, answers=None, **how):
    return theoretical_hits(of_tokens(prompts, block, answers), block, **how).found


# -- by hand ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "hits"), [
    ([A + B, A + B], (0, 4)),  # the last token is computed, and with it its whole block
    ([A + B, A + B + [9]], (0, 8)), ([A + B, A + C], (0, 4)), ([A + B, C + B], (0, 0)), ([A[:3], A[:3]], (0, 0)), ([A, A], (0, 0)),
    ([A + [9], A + [9]], (0, 4)), ([A + [9], A + [8]], (0, 4)), ([A + B, A + C, A + B + C], (0, 4, 8)), ([], ()), ([[], []], (0, 0)),
    ([A[:2] + B, A[:2] + B + [5]], (0, 4)),
])  # fmt: skip
def test_full_blocks_from_the_first_on_and_never_the_last_token(prompts, hits):
    assert found(prompts) == hits


def test_the_rate_is_of_tokens():
    hits = theoretical_hits(of_tokens([A + B, A + B + [9]], 4), 4)
    assert hits.rate == pytest.approx(8 / 17) and hits.asked == (8, 9)
    assert theoretical_hits((), 4).rate == 0


@pytest.mark.parametrize(("answer", "hits"), [(B + [7], 8), (B, 4), ([], 4)])
def test_an_answer_is_found_but_for_its_last_token(answer, hits):
    assert found([A, A + B + [7, 6]], answers=[answer, []]) == (0, hits)


@pytest.mark.parametrize(("capacity", "hits"), [(None, (0, 0, 4, 4)), (4, (0, 0, 4, 4)), (3, (0, 0, 4, 4)), (2, (0, 0, 0, 0))])
def test_what_was_released_first_is_evicted_first(capacity, hits):
    assert found([A + [7], B + [7], A + [8], B + [8]], capacity=capacity) == hits


def test_of_one_request_its_end_is_evicted_first():
    long, other = A + B + C, [9] * 4
    assert found([long, other, long + [1]], capacity=4)[2] == 12
    assert found([long, other + [9] * 4, A + B + [1]], capacity=4)[2] == 8
    assert found([long, [9] * 12, A + [1]], capacity=4)[2] == 4


def test_a_hit_keeps_a_block_young():
    assert found([A + [7], B + [7], A + [8], C + [7], A + [9], B + [9]], capacity=3) == (0, 0, 4, 0, 4, 0)


def test_a_block_that_is_computed_again_is_young_again():
    # The third prompt is there whole, but its last token must be computed, and its last block with it; then C is the oldest.
    assert found([A + B, C + [7], A + B, [9] * 5, A + B + [1]], capacity=4) == (0, 0, 4, 0, 8)


def test_requests_that_run_at_once_do_not_find_each_other():
    prompts = [A + [n] for n in range(6)]
    assert found(prompts) == (0, 4, 4, 4, 4, 4)
    assert found(prompts, concurrent=2) == (0, 0, 4, 4, 4, 4)
    assert found(prompts, concurrent=4) == (0, 0, 0, 0, 4, 4)


def test_what_does_not_fit_beside_others_waits_for_them():
    # Each takes two of the three blocks: the second begins when the first has ended, and finds it.
    assert found([A + [1], A + [2]], concurrent=2, capacity=3) == (0, 4)
    assert found([A + [1], A + [2]], concurrent=2, capacity=4) == (0, 0)


@pytest.mark.parametrize(("how", "why"), [({"capacity": 2}, "does not fit"), ({"concurrent": 0}, "at least 1")])
def test_what_cannot_be_is_refused(how, why):
    with pytest.raises(ValueError, match=why):
        found([A + B + C], **how)


# -- hashes of a trace --------------------------------------------------------------------------------------------------


def test_ids_of_a_trace_are_blocks_with_all_before_them():
    trace = [
        ((0, 1, 2), 1400, 10),
        ((0, 1, 2), 1400, 10),
        ((0, 1, 3, 4), 2048, 10),
        ((0, 1, 3, 4), 2048, 10),
        ((0,), 512, 10),
        ((0, 5), 600, 10),
    ]
    assert [asked.keys for asked in of_hashes(trace, 512)][:2] == [(0, 1)] * 2 and [a.blocks for a in of_hashes(trace, 512)][:3] == [
        3,
        3,
        5,
    ]
    hits = theoretical_hits(of_hashes(trace, 512), 512)
    assert hits.found == (0, 1024, 1024, 1536, 0, 512), "neither a block that is not full nor the last token"
    assert hits.asked == (1400, 1400, 2048, 2048, 512, 600)


def test_the_answer_of_a_trace_takes_room():
    trace = [((0, 1), 1024, 513), ((9, 8), 1024, 513), ((0, 1, 2), 1300, 1)]
    for capacity, hit in ((6, 1024), (5, 1024), (4, 512), (3, 0)):
        assert theoretical_hits(of_hashes(trace, 512), 512, capacity=capacity).found[2] == hit


@pytest.mark.parametrize("ids", [(), (0,), (0, 1, 2, 3)])
def test_ids_of_another_block_size_are_refused(ids):
    with pytest.raises(ValueError, match="hash ids for 1400 tokens"):
        of_hashes([(ids, 1400, 1)], 512)


texts = st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=14)


@given(texts, st.integers(1, 6), st.one_of(st.none(), st.integers(30, 60)), st.integers(1, 4))
def test_tokens_and_hashes_of_the_same_prompts_say_the_same(prompts, block, capacity, concurrent):
    ids = [tuple(tuple(p[: i + block]) for i in range(0, len(p), block)) for p in prompts]
    hashed = of_hashes([(its, len(p), 1) for its, p in zip(ids, prompts, strict=True)], block)
    how = {"capacity": capacity, "concurrent": concurrent}
    assert theoretical_hits(hashed, block, **how) == theoretical_hits(of_tokens(prompts, block), block, **how)


# -- properties ---------------------------------------------------------------------------------------------------------


@given(texts, st.integers(1, 6))
def test_an_unlimited_cache_finds_the_longest_prefix_seen(prompts, block):
    """Said another way: of each prompt the blocks that some earlier prompt begins with."""
    wanted = []
    for i, prompt in enumerate(prompts):
        ends = [n for n in range(block, len(prompt), block) if any(before[:n] == prompt[:n] for before in prompts[:i])]
        wanted.append(max(ends, default=0))
    assert found(prompts, block) == tuple(wanted)


@given(texts, st.integers(1, 6), st.integers(24, 60), st.integers(1, 5))
def test_one_at_a_time_and_unlimited_is_the_upper_bound(prompts, block, capacity, concurrent):
    most = found(prompts, block)
    for how in ({"capacity": capacity}, {"concurrent": concurrent}, {"capacity": capacity, "concurrent": concurrent}):
        assert all(a <= b for a, b in zip(found(prompts, block, **how), most, strict=True))
    narrower = found(prompts, block, concurrent=concurrent)
    assert all(a <= b for a, b in zip(found(prompts, block, concurrent=concurrent + 1), narrower, strict=True))


@given(texts, st.integers(1, 4), st.integers(2, 3))
def test_smaller_blocks_find_no_less(prompts, block, times):
    assert all(a >= b for a, b in zip(found(prompts, block), found(prompts, times * block), strict=True))


@given(texts, st.integers(1, 6), st.integers(24, 60))
def test_names_of_tokens_do_not_matter(prompts, block, capacity):
    renamed = [[7 - 3 * t for t in p] for p in prompts]
    assert found(renamed, block, capacity=capacity) == found(prompts, block, capacity=capacity)


# -- closed forms -------------------------------------------------------------------------------------------------------

turns = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=8)


@given(turns, st.sampled_from([1, 4, 16, 128]), st.booleans())
def test_a_conversation_in_closed_form(said, block, answers):
    words = itertools.count()
    history, prompts, written = [], [], []
    for user, answer in said:
        history += [next(words) for _ in range(user)]
        prompts.append(list(history))
        history += [next(words) for _ in range(answer)]
        written.append(history[-answer:])
    exact = theoretical_hits(of_tokens(prompts, block, written if answers else None), block)
    assert conversation_hits(said, block, answers=answers) == exact


@given(st.integers(0, 200), st.lists(st.integers(0, 60), max_size=9), st.sampled_from([1, 4, 16, 64]))
def test_a_shared_prefix_in_closed_form(prefix, own, block):
    words = itertools.count(10**6)
    prompts = [[*range(prefix), *(next(words) for _ in range(n))] for n in own]
    assert shared_prefix_hits(prefix, own, block) == theoretical_hits(of_tokens(prompts, block), block)


def test_the_rate_of_a_long_shared_prefix_comes_near_its_share():
    assert shared_prefix_hits(1600, [400] * 1000, 16).rate == pytest.approx(0.8, abs=0.001)
    assert shared_prefix_hits(1599, [400] * 1000, 16).rate < 0.795, "the block that the prefix ends in is shared by none"


# -- against a simulated server -----------------------------------------------------------------------------------------


def conversations(seed, n=12, users=4):
    """Turns of several conversations with one system prompt, mixed, as (prompt, answer); every token of a turn is new."""
    draw, words = random.Random(seed), itertools.count(10**6)
    system = list(range(draw.randint(10, 60)))
    talks = [list(system) for _ in range(users)]
    said = []
    for _ in range(n * users):
        talk = draw.choice(talks)
        talk += [next(words) for _ in range(draw.randint(1, 40))]
        answer = [next(words) for _ in range(draw.randint(2, 30))]
        said.append((list(talk), answer))
        talk += answer
    return said


def served(said, concurrency, **server):
    asks = [Ask(isl=len(p), osl=len(a), tokens=(*p, *a)) for p, a in said]
    outcome = closed_loop(Server(prefix_cache=True, chunk=256, **server), asks, concurrency)
    by_ask = {id(r.ask): r.hit for r in outcome.served}
    return [by_ask[id(ask)] for ask in asks]


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("room", [None, 4000, 1500])
def test_a_server_that_serves_one_at_a_time_finds_exactly_that(seed, block, room):
    said = conversations(seed)
    capacity = room and max(room, max(len(p) + len(a) for p, a in said)) // block + 1
    hits = served(said, 1, block_size=block, **({"blocks": capacity} if capacity else {}))
    prompts, answers = zip(*said, strict=True)
    assert tuple(hits) == found(prompts, block, answers, capacity=capacity)
    assert 0.2 < sum(hits) / sum(map(len, prompts)) < 1, "it finds something"


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_a_server_with_several_clients_lies_between_the_bounds(clients):
    """Prompts without turns: a client that waits for an answer would not ask on."""
    low, real, high = [], [], []
    for seed in range(8):
        draw, words = random.Random(seed), itertools.count(10**6)
        systems = [[s * 1000 + i for i in range(draw.randint(100, 300))] for s in range(1, 6)]
        said = [
            (draw.choice(systems) + [next(words) for _ in range(draw.randint(5, 60))], [next(words) for _ in range(20)]) for _ in range(60)
        ]
        prompts, answers = zip(*said, strict=True)
        low += found(prompts, 16, answers, concurrent=clients)
        high += found(prompts, 16, answers)
        real += served(said, clients, block_size=16)
    assert sum(low) <= sum(real) <= sum(high)
    assert all(hit <= most for hit, most in zip(real, high, strict=True))
    assert sum(low) < sum(high)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 24), st.integers(40, 200))
def test_a_pool_never_holds_more_than_it_has(seed, block, room):
    said = conversations(seed, n=3, users=2)
    prompts, answers = zip(*said, strict=True)
    asked = of_tokens(prompts, block, answers)
    capacity = max(a.blocks for a in asked) + room // block
    for concurrent in (1, 3):
        hits = theoretical_hits(asked, block, capacity=capacity, concurrent=concurrent)
        assert all(hit < prompt and hit % block == 0 for hit, prompt in zip(hits.found, hits.asked, strict=True))
    assert all(isinstance(a, Asked) and len(a.keys) <= a.blocks for a in asked)

"""Texts through a quantised cache: garbage of any sort is named, and a healthy int4, which parts early here and loops there, is none."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.sanity import EARLY, PROMPTS, SPOILED, degenerate, first_divergence, garbage, no_reference

tokens = st.lists(st.integers(0, 5), max_size=80)
texts = st.dictionaries(st.text(max_size=3), st.lists(st.integers(0, 500), max_size=64), min_size=1, max_size=10)


def written(seed, length=64):
    """A text as natural ones are: frequent and rare tokens (Zipf), hardly one twice in a row."""
    rng = random.Random(seed)
    return [int(50000 ** rng.random()) + 10 for _ in range(length)]


def looping(seed, after, period, length=64):
    text = written(seed, after + period)
    while len(text) < length:
        text.append(text[-period])
    return text


REFERENCE = {name: written(name) for name in PROMPTS}


def parted(places, base=REFERENCE, length=64):
    """Other texts that leave the reference at these places; None never."""
    names = zip(base, places, strict=True)
    return {n: list(base[n]) if at is None else [*base[n][:at], 9, *written(f"{n} other", length - at - 1)] for n, at in names}


def test_prompts_are_eight_of_a_different_sort():
    assert len(PROMPTS) == 8 and len({text[:12] for text in PROMPTS.values()}) == 8
    assert all(text == text.strip() or text.endswith("\n") for text in PROMPTS.values())


@pytest.mark.parametrize(("base", "other", "place"), [
    ([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [1], 0), ([1, 2], [], 0), ([1], [2], 0),
])  # fmt: skip
def test_where_two_texts_part(base, other, place):
    assert first_divergence(base, other) == place


@given(tokens, tokens, tokens)
def test_a_common_opening_moves_the_place(opening, one, other):
    place = first_divergence(one, other)
    assert place == first_divergence(other, one)
    assert first_divergence(opening + one, opening + other) == (None if place is None else place + len(opening))
    assert (place is None) == (one == other)


@given(tokens, st.permutations(range(6)))
def test_what_tokens_are_called_changes_nothing(text, names):
    assert degenerate(text) == degenerate([names[t] for t in text])


@given(st.integers(0, 10**6), st.integers(16, 200))
def test_one_token_for_ever_is_degenerate(token, length):
    assert degenerate([token] * length) == f"one token {length} times in a row"


@given(st.lists(st.integers(), min_size=64, max_size=80, unique=True), st.integers(0, 15))
def test_a_text_without_repetition_is_none_but_for_a_run(text, run):
    assert degenerate(text) == degenerate([*text, *[text[-1]] * (run - 1)]) == ""


@given(st.lists(st.integers(), min_size=2, max_size=8, unique=True), st.integers(48, 100))
def test_a_short_loop_is_degenerate_wherever_it_began(loop, length):
    text = [loop[i % len(loop)] for i in range(length)]
    assert degenerate(text) == f"a loop of {len(loop)} tokens"
    assert degenerate([*written(1, 16), *text]) == f"a loop of {len(loop)} tokens"


@pytest.mark.parametrize(("text", "why"), [
    ([], ""), ([0], ""), ([7] * 15, ""), (written(3), ""), (written(3, 500), ""),
    ([*range(20), *[7] * 16, *range(20)], "one token 16 times in a row"),
    ([5, 5, 5, 1, 5, 5, 5, 2] * 4, "24 of 32 tokens are one and the same"),
    ([5, 5, 5, 1] * 7, ""),  # 28 tokens: too few to say
    (random.Random(4).choices(range(6), k=64), "only 6 different tokens of 64"),
    (looping(5, after=10, period=12), ""),  # a sentence again and again: the greedy text of small models
    (looping(5, after=40, period=4), ""),  # a loop that has only begun
])  # fmt: skip
def test_known_texts(text, why):
    assert degenerate(text) == why


@given(texts)
def test_equal_texts_are_never_garbage(base):
    assert garbage(base, {name: list(text) for name, text in base.items()}) == ""


@given(st.lists(st.integers(0, 50000), min_size=8, max_size=8), st.integers(1, 100))
def test_constant_texts_always_are(ids, length):
    """A token of its own for each prompt, or one for all (NaN gives token 0), however long."""
    for chosen in (ids, [0] * 8):
        other = {name: [token] * length for name, token in zip(REFERENCE, chosen, strict=True)}
        assert garbage(REFERENCE, other).startswith(SPOILED)


@given(st.dictionaries(st.sampled_from(list(PROMPTS)), tokens, min_size=8), st.permutations(list(PROMPTS)))
def test_the_order_of_prompts_changes_no_word(other, order):
    assert bool(garbage(REFERENCE, other)) == bool(garbage({n: REFERENCE[n] for n in order}, {n: other[n] for n in order}))


@given(st.lists(st.none() | st.integers(EARLY, 63), min_size=8, max_size=8))
def test_texts_that_part_later_than_the_second_token_and_are_texts_are_healthy(places):
    assert garbage(REFERENCE, parted(places)) == ""


@pytest.mark.parametrize("places", [
    [1, 3, 0, 5, 2, 9, 1, 1], [0, 0, 0, 1, 1, 1, 2, 4], [4, 31, 2, 12, None, None, 7, 18], [1, 1, 1, 1, 1, 1, 5, 9],
])  # fmt: skip
def test_a_healthy_int4_of_a_tiny_model_may_part_early(places):
    assert garbage(REFERENCE, parted(places)) == ""


@pytest.mark.parametrize("places", [[0] * 8, [1] * 8, [1, 1, 0, 1, 1, 2, 1, 1], [1, 1, 1, 1, 40, 1, 1, 1]])
def test_a_salad_of_words_parts_at_once_in_nearly_every_prompt(places):
    assert garbage(REFERENCE, parted(places)).endswith("of 8 texts leave the reference at their first or second token")


def test_loops_where_the_reference_loops_too_are_no_sign():
    base = {n: looping(n, after=8, period=6) if i % 2 else written(n) for i, n in enumerate(PROMPTS)}
    other = {n: looping(n, after=6, period=5) if i % 3 else written(n) for i, n in enumerate(PROMPTS)}
    other = {n: [*base[n][:5], *text[5:]] for n, text in other.items()}
    assert garbage(base, other) == ""


def test_loops_in_most_prompts_where_the_reference_writes_are():
    other = {n: looping(n, after=8, period=6) if i < 5 else REFERENCE[n] for i, n in enumerate(PROMPTS)}
    assert garbage(REFERENCE, other) == f"{SPOILED}: 5 of 8 texts are none (a loop of 6 tokens), the reference's are"


@pytest.mark.parametrize(("spoiled", "seen"), [(1, False), (2, False), (3, True), (8, True)])
def test_one_token_for_ever_in_a_third_of_the_prompts_even_where_the_reference_loops(spoiled, seen):
    base = {n: looping(n, after=8, period=6) for n in PROMPTS}
    other = {n: [*base[n][:20], *[11] * 44] if i < spoiled else base[n] for i, n in enumerate(PROMPTS)}
    assert garbage(base, other) == (
        f"{SPOILED}: {spoiled} of 8 texts repeat one token (one token 44 times in a row), the reference's do not" if seen else ""
    )


@pytest.mark.parametrize("end", [[], [2]])
def test_texts_that_end_at_once_are_garbage_where_the_reference_goes_on(end):
    other = {n: end if i < 5 else REFERENCE[n] for i, n in enumerate(PROMPTS)}
    assert garbage(REFERENCE, other) == f"{SPOILED}: 5 of 8 texts stop at once, the reference's go on"
    other = {n: end if i < 3 else REFERENCE[n] for i, n in enumerate(PROMPTS)}
    assert garbage(REFERENCE, other) == ""
    assert garbage({n: [4, 2] for n in PROMPTS}, {n: [4] for n in PROMPTS}) == ""


def test_one_text_for_all_prompts_is_garbage_however_good_it_reads():
    assert garbage(REFERENCE, dict.fromkeys(REFERENCE, written("x"))) == f"{SPOILED}: 8 of 8 different prompts get the same text"
    assert garbage({"a": written(1)}, {"a": written(2)}) == ""


def test_a_reference_that_is_none_is_named():
    assert no_reference(REFERENCE) == ""
    assert no_reference({}) == "there is no text of the reference"
    for text, what in ([], "stop at once"), ([0] * 64, "repeat one token"), (written(1), "get the same text"):
        assert no_reference(dict.fromkeys(PROMPTS, text)) == f"the reference itself is no text: 8 of 8 prompts {what}"


@pytest.mark.parametrize(("base", "other"), [({}, {}), ({"a": [1]}, {"b": [1]}), ({"a": [1]}, {"a": [1], "b": [2]})])
def test_texts_of_other_prompts_are_refused(base, other):
    with pytest.raises(ValueError, match="texts of the same prompts are needed"):
        garbage(base, other)

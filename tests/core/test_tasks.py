"""Generated tasks: the prompt holds the answer, a seed makes the same ones everywhere; and what a loss of right answers is worth."""

import hashlib
import math
import random
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_kvcache.core.tasks import DEPTHS, TASKS, Item, items, most_lost, paired, scored, worse_p

kinds = st.sampled_from(TASKS)
sizes = st.integers(20, 400)
marks = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60)


def split(pairs):
    return [b for b, _ in pairs], [n for _, n in pairs]


def marked(lost, gained, same):
    """The items of a base and a new one of which so many differ."""
    return [True] * lost + [False] * gained + [True] * same, [False] * lost + [True] * (gained + same)


@given(kinds, st.integers(0, 2**31), st.integers(0, 8), st.integers(0, 8), sizes)
def test_a_seed_makes_the_same_items_and_more_of_them_begin_alike(kind, seed, few, more, words):
    assert items(kind, few + more, seed, words=words)[:few] == items(kind, few, seed, words=words)


@given(st.integers(0, 2**31), sizes)
def test_names_are_unique_over_all_kinds_and_prompts_differ(seed, words):
    made = [item for kind in TASKS for item in items(kind, 12, seed, words=words)]
    assert len({item.name for item in made}) == len({item.prompt for item in made}) == len(made)
    assert all(item.name.startswith(f"{item.kind}-") and item.prompt == item.prompt.strip() for item in made)


def test_another_seed_makes_other_items():
    for kind in TASKS:
        assert {i.prompt for i in items(kind, 6, 1)}.isdisjoint(i.prompt for i in items(kind, 6, 2))


@given(st.integers(0, 2**31), sizes)
def test_a_needle_stands_once_at_its_depth_and_a_second_fact_has_another_word(seed, words):
    for i, item in enumerate(items("needle", 6, seed, words=words)):
        name = re.search(r"of (\w+) is$", item.prompt)[1]
        fact = f"The secret word of {name} is {item.answer}."
        assert item.prompt.count(fact) == 1 and item.prompt.count(item.answer) == 1
        assert item.name == f"needle-d{DEPTHS[i % 3]}-{i // 3}"
        body = item.prompt.split("\n\n")[0]
        if words >= 200:
            assert abs(body.index(fact) / len(body) - DEPTHS[i % 3] / 100) < 0.1
        assert words <= len(body.split()) <= words + 30


@given(st.integers(0, 2**31), sizes)
def test_sums_are_right_and_the_one_that_is_asked_is_not_shown(seed, words):
    for item in items("arithmetic", 4, seed, words=words):
        *shown, asked = item.prompt.split("\n")
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+) =", asked).groups())
        assert item.answer == str(a + b)
        assert len(shown) >= 4 and not any(line.startswith(asked) for line in shown)
        for line in shown:
            x, y, z = map(int, re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", line).groups())
            assert x + y == z


@given(st.integers(0, 2**31), sizes)
def test_code_is_python_that_holds_with_the_answer_and_asks_for_what_was_not_shown_again(seed, words):
    for item in items("code", 4, seed, words=words):
        exec(item.prompt + f" {item.answer}\n", {})
        asked = item.prompt.rsplit("\n", 1)[1]
        assert item.prompt.count(asked) == 1


def test_items_are_the_same_on_every_version_of_python():
    """Recorded: a change of these is a change of TASKS_VERSION."""
    text = "\0".join(f"{i.name}\0{i.prompt}\0{i.answer}" for kind in TASKS for i in items(kind, 6, 7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "6c6587016f0cb43c"


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'essay' is none of needle, arithmetic, code"):
        items("essay", 1, 0)


@pytest.mark.parametrize(("answer", "text", "right"), [
    ("river", " river", True), ("river", " river. The", True), ("river", "\n river\n", True), ("river", " River", False),
    ("river", " rivers", False), ("river", " the river", False), ("river", "", False), ("river", " riv", False), ("19", " 19\n3 + 4", True),
    ("19", " 190", False), ("19", " 19.5", False), ("19", " 19,000", False), ("19", " 19.", True), ("19", "19, 20", True), ("19", " 1 9", False),
])  # fmt: skip
def test_a_continuation_is_right_where_it_begins_with_the_answer_and_that_ends(answer, text, right):
    assert scored(Item(kind="needle", name="x", prompt="", answer=answer), text) is right


@given(kinds, st.integers(0, 2**31), st.sampled_from(["", "\n", ". And", " )", "\n\n\n"]))
def test_every_item_s_own_answer_is_right_and_a_longer_word_is_not(kind, seed, after):
    for item in items(kind, 3, seed, words=30):
        assert scored(item, f" {item.answer}{after}")
        assert not scored(item, f" {item.answer}7{after}")
        assert not scored(item, f" {item.answer[:-1]}")


@given(marks)
def test_the_paired_difference_is_the_textbook_s(pairs):
    base, new = split(pairs)
    d = [n - b for b, n in pairs]
    mean = sum(d) / len(d)
    error = math.sqrt(sum((x - mean) ** 2 for x in d) / (len(d) * (len(d) - 1)))
    assert paired(base, new) == (pytest.approx(mean), pytest.approx(error, abs=1e-9))


@given(marks, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_sides_exchange_signs(pairs, rng):
    base, new = split(pairs)
    mixed = list(pairs)
    rng.shuffle(mixed)
    assert paired(*split(mixed)) == paired(base, new) and worse_p(*split(mixed)) == worse_p(base, new)
    assert paired(new, base) == (-paired(base, new)[0], paired(base, new)[1])


@given(marks)
def test_p_values_are_such_and_both_sides_cover_everything(pairs):
    base, new = split(pairs)
    p, q = worse_p(base, new), worse_p(new, base)
    assert 0 < p <= 1 and 0 < q <= 1 and p + q >= 1


@given(marks)
def test_one_more_lost_item_makes_worse_likelier_and_one_more_gained_less(pairs):
    base, new = split(pairs)
    assert worse_p([*base, True], [*new, False]) <= worse_p(base, new) <= worse_p([*base, False], [*new, True])
    assert most_lost([*base, False], [*new, True]) < most_lost([*base, True], [*new, False])


@given(marks, st.booleans())
def test_items_that_do_not_differ_change_no_p_value(pairs, mark):
    base, new = split(pairs)
    assert worse_p([*base, mark], [*new, mark]) == worse_p(base, new)


@pytest.mark.parametrize(("lost", "gained", "p"), [
    (0, 0, 1), (1, 0, 1 / 2), (5, 0, 1 / 32), (0, 5, 1), (8, 2, 56 / 1024), (10, 10, 0.5880985), (3, 1, 5 / 16),
])  # fmt: skip
def test_known_p_values(lost, gained, p):
    assert worse_p(*marked(lost, gained, 20)) == pytest.approx(p)


def test_thousands_of_items_overflow_nothing():
    assert worse_p(*marked(3000, 3000, 10)) == pytest.approx(0.505, abs=0.002)
    assert 0.02 < most_lost(*marked(3000, 3000, 10)) < 0.05


@pytest.mark.parametrize(("n", "bound"), [(20, 0.1684), (60, 0.0596), (300, 0.0122)])
def test_what_no_loss_leaves_possible_is_clopper_and_pearson_s(n, bound):
    """1 - 0.025^(1/n)."""
    assert most_lost(*marked(0, 0, n)) == pytest.approx(bound, abs=1e-4)


def test_known_bounds():
    """Clopper-Pearson 95 % of 5 in 50: 3.33 % to 21.81 %."""
    assert most_lost(*marked(5, 0, 45)) == pytest.approx(0.2181, abs=1e-4)
    assert most_lost(*marked(0, 5, 45)) == pytest.approx(1 - 0.025 ** (1 / 50) - 0.0333, abs=1e-4)
    assert most_lost(*marked(5, 0, 0)) == 1.0


@given(marks, st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_the_bound_lies_above_the_estimate_and_widens_with_the_confidence(pairs, one, other):
    base, new = split(pairs)
    assume(abs(one - other) > 1e-3)
    assert -paired(base, new)[0] - 1e-9 <= most_lost(base, new, max(one, other)) <= most_lost(base, new, min(one, other)) + 1e-9


def test_a_true_loss_is_below_the_bound_as_often_as_promised():
    rng, n, above = random.Random(5), 60, 0
    for _ in range(300):
        pairs = [(u < 0.6 + 0.10, u < 0.6 or u > 0.97) for u in (rng.random() for _ in range(n))]
        above += most_lost(*split(pairs)) >= 0.10 - 0.03
    assert above >= 0.95 * 300


@pytest.mark.parametrize(("base", "new"), [([], []), ([True], [True]), ([True, False], [True])])
@pytest.mark.parametrize("figure", [paired, worse_p, most_lost])
def test_too_few_or_unequal_items_are_refused(figure, base, new):
    with pytest.raises(ValueError, match="at least two are needed"):
        figure(base, new)

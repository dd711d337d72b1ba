"""Same seed, same bytes; exact lengths; nothing shared between prompts."""

import itertools
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.scenarios import ClosedLoop, OpenLoop
from pytest_kvcache.core.spec import SpecError
from pytest_kvcache.core.workload import end_tokens, make_requests, schedule, shortened, single_token_words, workload_hash

WORDS = tuple(f"{a}{b}{c}x" for a in "abcdefghij" for b in "abcdefghij" for c in "abcdefghijklm")


@given(st.integers(1, 200), st.integers(1, 4), st.integers(0, 3))
def test_every_prompt_has_exactly_the_words_asked_for(isl, concurrency, seed):
    for r in make_requests(ClosedLoop(isl=isl, osl=4, concurrency=concurrency, seed=seed), WORDS):
        assert len(r.prompt.split(" ")) == isl + 1  # each word follows a space, the first too
        assert r.prompt.startswith(" ")


def test_the_same_scenario_gives_the_same_bytes_in_another_process():
    scenario = ClosedLoop(isl=20, osl=4, concurrency=2)
    here = workload_hash(make_requests(scenario, WORDS), scenario)
    script = (
        "from pytest_kvcache.core.scenarios import ClosedLoop; from pytest_kvcache.core.workload import *;"
        "w = tuple(f'{a}{b}{c}x' for a in 'abcdefghij' for b in 'abcdefghij' for c in 'abcdefghijklm');"
        "s = ClosedLoop(isl=20, osl=4, concurrency=2); print(workload_hash(make_requests(s, w), s))"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert there.stdout.strip() == here


def test_no_two_prompts_share_a_beginning_in_or_between_scenarios_or_with_the_warm_up():
    scenarios = [ClosedLoop(isl=32, osl=o, concurrency=c, seed=s) for o in (4, 8) for c in (1, 4) for s in (0, 1)]
    prompts = [r.prompt for s in scenarios for part in ("measured", "warm-up") for r in make_requests(s, WORDS, part=part)]
    starts = [" ".join(p.split()[:4]) for p in prompts]
    assert len(set(starts)) == len(starts)


def test_another_scenario_or_concurrency_is_another_workload():
    a, b = ClosedLoop(isl=8, osl=4, concurrency=1), ClosedLoop(isl=8, osl=4, concurrency=1, seed=1)
    hashes = {
        workload_hash(make_requests(a, WORDS), a),
        workload_hash(make_requests(b, WORDS), b),
        workload_hash(make_requests(a, WORDS), ClosedLoop(isl=8, osl=4, concurrency=2)),
        workload_hash(make_requests(a, WORDS), OpenLoop(isl=8, osl=4, rate=1)),
        workload_hash(make_requests(a, WORDS), OpenLoop(isl=8, osl=4, rate=2)),
        workload_hash(make_requests(a, WORDS), OpenLoop(isl=8, osl=4, rate=2, arrivals="constant")),
    }
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("arrivals", "burstiness", "cv"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("constant", 1.0, 0.0)]
)
def test_a_schedule_has_its_rate_and_its_burstiness(arrivals, burstiness, cv):
    due = schedule(OpenLoop(isl=8, osl=4, rate=20, requests=4000, arrivals=arrivals, burstiness=burstiness))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert len(due) == 4000
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, abs=0.1)


def test_a_schedule_is_fixed_by_the_scenario_and_its_seed():
    a, b = OpenLoop(isl=8, osl=4, rate=20), OpenLoop(isl=8, osl=4, rate=20, seed=1)
    assert schedule(a) == schedule(a)
    assert schedule(a) != schedule(b)
    assert schedule(a) != schedule(a, part="warm-up")
    assert schedule(a)[:3] == pytest.approx((0.08271056, 0.08589179, 0.09898838))


def test_words_that_the_server_adds_are_taken_off_the_end():
    (request,) = make_requests(ClosedLoop(isl=8, osl=4, concurrency=1, requests=1), WORDS)
    assert shortened(request, 0) == request.prompt
    assert shortened(request, 2).split() == request.prompt.split()[:6]
    assert shortened(request, 99).split() == request.prompt.split()[:1]


@pytest.mark.parametrize("space", ["\u0120", "\u2581"])
def test_words_are_read_from_both_kinds_of_tokenizer(space):
    vocab = {space + w: i for i, w in enumerate(WORDS)} | {space + "Upper": 1, "nospace": 2, space + "ab": 3, space + "toolongtobeused": 4}
    assert single_token_words({"model": {"vocab": vocab}}) == tuple(sorted(WORDS))
    pairs = [[name, 0.0] for name in vocab]
    assert single_token_words({"model": {"vocab": pairs}}) == tuple(sorted(WORDS))


def test_the_tokens_that_end_a_text_are_the_special_ones():
    told = [{"id": 9, "content": "<end>", "special": True}, {"id": 2, "content": "</s>", "special": True}, {"id": 5, "content": "x"}]
    assert end_tokens({"added_tokens": told}) == (2, 9)
    for nothing in (
        {},
        {"added_tokens": None},
        {"added_tokens": {"</s>": 2}},
        {"added_tokens": ["</s>", {"special": True}, {"id": "2", "special": 1}]},
    ):
        assert end_tokens(nothing) == ()


def test_a_tokenizer_without_words_is_refused():
    with pytest.raises(SpecError, match="only 0 lower-case words"):
        single_token_words({"model": {"vocab": {"a": 0}}})


@pytest.mark.parametrize("wrong", [
    {"isl": 0}, {"osl": -1}, {"concurrency": 0}, {"isl": 1.5}, {"requests": 1, "concurrency": 2}, {"profile": "nightly"}, {"device": "tpu"}, {"arms": ()},
])  # fmt: skip
def test_scenarios_that_cannot_be_are_refused(wrong):
    with pytest.raises(SpecError):
        ClosedLoop(**{"isl": 8, "osl": 4, "concurrency": 1} | wrong)


def test_ids_name_what_is_off_its_default_and_selection_is_no_identity():
    assert str(ClosedLoop(isl=8, osl=4, concurrency=1)) == "isl8-osl4-c1"
    assert str(ClosedLoop(isl=8, osl=4, concurrency=1, requests=9, seed=2)) == "isl8-osl4-c1-n9-seed2"
    assert ClosedLoop(isl=8, osl=4, concurrency=1, profile="full", device="cpu") == ClosedLoop(isl=8, osl=4, concurrency=1)

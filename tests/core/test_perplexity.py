"""Perplexity, divergence and their errors: against few-line computations of their own, published figures, and by what must always hold."""

import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_kvcache.core import perplexity as p
from pytest_kvcache.core.schemes import PROTOCOLS, Scheme, windows
from pytest_kvcache.core.spec import SpecError

logits = st.lists(st.floats(min_value=-30, max_value=30), min_size=3, max_size=12)


def log_softmax(row):
    row = np.asarray(row, dtype=np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_perplexity_is_what_two_lines_of_numpy_say():
    rng = np.random.default_rng(1)
    rows, targets = rng.normal(size=(200, 50)) * 3, rng.integers(0, 50, 200)
    logprobs = [None, *(float(log_softmax(row)[t]) for row, t in zip(rows, targets, strict=True))]
    probabilities = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    assert p.perplexity(p.scored(logprobs)) == pytest.approx(
        float(np.exp(-np.log(probabilities[np.arange(200), targets]).mean())), rel=1e-9
    )


@pytest.mark.parametrize(("logprobs", "kind", "position"), [
    ([None, -1.0, math.nan, -3.0], "nan_logprob", 2), ([math.nan, -1.0], "nan_logprob", 0), ([None, -math.inf], "infinite_nll", 1),
    ([None, -1.0, None], "missing_logprob", 2), ([None, 0.5], "positive_logprob", 1),
])  # fmt: skip
def test_what_is_no_log_probability_is_named_with_its_place(logprobs, kind, position):
    with pytest.raises(p.NotScored, match=f"{kind}: token {position}") as caught:
        p.scored(logprobs)
    assert (caught.value.kind, caught.value.position) == (kind, position)


def test_nothing_scored_has_no_perplexity():
    with pytest.raises(ValueError, match="no token was scored"):
        p.perplexity(p.scored([None]))


# llama.cpp b3d6f... prints for LLaMA 3 8B: PPL and error of q8_0 and of f16, their correlation to four digits, and the paired error of the log ratio.
def test_the_paired_error_is_far_below_either_where_both_scored_the_same_tokens():
    rng = random.Random(3)
    base = [rng.expovariate(0.5) for _ in range(20_000)]
    new = [v + rng.gauss(0.001, 0.02) for v in base]
    n, mean = len(base), math.fsum(base) / len(base)
    mean_new = math.fsum(new) / n
    var = math.fsum([(v - mean) ** 2 for v in base]) / n
    var_new = math.fsum([(v - mean_new) ** 2 for v in new]) / n
    cov = math.fsum([(a - mean) * (b - mean_new) for a, b in zip(base, new, strict=True)]) / n
    error, error_new = math.sqrt(var / (n - 1)), math.sqrt(var_new / (n - 1))
    paired = p.paired_error(error_new, error, cov / math.sqrt(var * var_new))
    ratio, clustered = p.paired_log_ratio(base, new, [1] * n)
    assert ratio == pytest.approx(0.001, abs=0.0005)
    assert paired == pytest.approx(clustered, rel=1e-3), "one token a chunk is the error per token"
    assert clustered < error / 50


def test_tokens_that_depend_on_each_other_make_the_error_larger():
    rng = random.Random(4)
    shifts = [rng.gauss(0, 0.02) for _ in range(300)]
    gaps = [[s + rng.gauss(0, 0.1) for _ in range(100)] for s in shifts]
    _, by_chunk = p.clustered_mean([math.fsum(g) for g in gaps], [100] * 300)
    _, by_token = p.clustered_mean([v for g in gaps for v in g], [1] * 30_000)
    assert by_chunk > 2 * by_token
    assert by_chunk == pytest.approx(math.sqrt((0.02**2 + 0.1**2 / 100) / 300), rel=0.15)


@given(logits, logits)
@example([-1.0, 0.0, 0.0], [-14.0, 0.0, 12.0])  # what the other side hides is less than a sum of doubles resolves
@example([0.0, 0.0, -16.0], [0.0, 0.0, 16.0])  # what the reference hides is less than a float32 resolves, what the other hides is all
def test_a_divergence_is_never_negative_and_the_lump_hides_and_never_adds(one, other):
    size = min(len(one), len(other))
    a, b = log_softmax(one[:size]), log_softmax(other[:size])
    whole = float((np.exp(a) * (a - b)).sum())
    everything = p.divergence_of_top(dict(enumerate(map(float, a))), dict(enumerate(map(float, b))))
    assert everything == pytest.approx(max(0.0, whole), rel=1e-6, abs=1e-6)
    best = sorted(range(size), key=lambda i: -a[i])[:2]
    found = sorted(range(size), key=lambda i: -b[i])[:2]
    top = p.divergence_of_top({i: float(a[i]) for i in best}, {i: float(b[i]) for i in found})
    assert -1e-12 <= top <= whole + 1e-6
    known = set(best) & set(found)
    lump_p, lump_q = 1 - sum(np.exp(a)[sorted(known)]), 1 - sum(np.exp(b)[sorted(known)])
    lumped = sum(np.exp(a[t]) * (a[t] - b[t]) for t in known) + (lump_p * math.log(lump_p / (lump_q + 2e-7)) if lump_p > 1e-12 else 0)
    assert top >= lumped - 1e-5, "the cap of what is not told makes it no worse"


def scores(shift=0.0, same=0.9, n=600, chunk=100, seed=1):
    rng = random.Random(seed)
    base = [rng.expovariate(0.4) for _ in range(n)]
    return p.Scores(
        nll=[b + shift for b in base], base_nll=base, kld=[rng.expovariate(100.0) for _ in range(n)], same=[rng.random() < same for _ in range(n)],
        chunks=[i // chunk for i in range(n)],
    )  # fmt: skip


def test_a_summary_has_what_few_lines_say():
    s = scores(shift=0.01)
    found = p.summarise(s)
    assert found["ppl_ratio"].value == pytest.approx(math.exp(0.01))
    assert found["ppl_ratio"].error == pytest.approx(0, abs=1e-12)
    assert found["ppl"].value == pytest.approx(math.exp(sum(s.nll) / 600))
    assert found["top1"].value == sum(s.same) / 600
    assert found["kld.mean"].value == pytest.approx(sum(s.kld) / 600)
    assert found["kld.p99"].value == sorted(s.kld)[593]
    assert found["kld.p999"].value == max(s.kld)


@pytest.mark.parametrize("field", ["nll", "base_nll", "kld"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("at", [0, 5])
def test_no_figure_comes_from_a_token_that_has_none(field, value, at):
    import dataclasses

    s = scores()
    broken = list(getattr(s, field))
    broken[at] = value
    with pytest.raises(ValueError, match=f"{field} of token {at} is"):
        p.summarise(dataclasses.replace(s, **{field: broken}))


def test_one_chunk_has_no_error_and_gives_no_summary():
    with pytest.raises(ValueError, match="at least two"):
        p.summarise(scores(n=50))


@given(st.integers(2, 40), st.integers(0, 40), st.integers(1, 39), st.integers(0, 300), st.booleans())
def test_every_token_is_scored_once_at_most_and_the_rest_is_said(window, stride, first, length, bos):
    if first >= window or stride > window:
        with pytest.raises(SpecError):
            Scheme(window=window, stride=stride, first=first)
        return
    scheme, text = Scheme(window=window, stride=stride, first=first, bos=bos), list(range(1000, 1000 + length))
    cut = list(windows(text, scheme, bos=1))
    scored = [i for n, w in enumerate(cut) for i in range(n * scheme.advance + w.first, n * scheme.advance + window)]
    assert len(scored) == len(set(scored)) == sum(w.scored for w in cut)
    assert all(len(w.tokens) == window for w in cut)
    for n, w in enumerate(cut):
        assert w.tokens[w.first :] == tuple(text[n * scheme.advance + w.first : n * scheme.advance + window])
        assert w.tokens[0] == (1 if bos else text[n * scheme.advance])


def test_the_protocols_score_what_their_tools_do():
    text = list(range(5000))
    llama = list(windows(text, PROTOCOLS["llama.cpp-512"], bos=0))
    assert (len(llama), llama[0].scored, llama[1].tokens[:2]) == (9, 255, (0, 513))
    gptq = list(windows(text, PROTOCOLS["gptq-2048"]))
    assert (len(gptq), gptq[1].scored, gptq[1].tokens[0]) == (2, 2047, 2048)
    assert len({str(s) for s in PROTOCOLS.values()}) == len(PROTOCOLS)


def test_a_scheme_says_whether_it_reads_the_cache_back():
    assert not Scheme(window=512).reads_back
    assert not Scheme(window=512, step=512).reads_back
    assert Scheme(window=512, step=16).reads_back
    assert str(Scheme(window=512, step=16)) == "w512-s512-f1-nobos-r16"


def test_a_model_without_bos_is_not_given_one():
    with pytest.raises(SpecError, match="no beginning-of-sequence token"):
        list(windows(range(600), PROTOCOLS["llama.cpp-512"]))

"""What a probe makes of logits: against few-line computations, in one pass and in steps, with arms that differ and arms that do not."""

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache

sys.path.insert(0, str(Path(pytest_kvcache.__file__).parent / "probes"))

from divergence import Tokens, log_softmax
from lockstep import walk

VOCABULARY = 97
TABLE = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * 3


class Model:
    """Predicts from the token and the sum of all before it, which is its cache; `wrong` is what its cache adds to every logit's position."""

    def __init__(self, wrong=0):
        self.cache, self.wrong = 0, wrong

    def logits(self, tokens):
        rows = []
        for token in tokens:
            rows.append(TABLE[(token + self.cache + (self.wrong if self.cache else 0)) % VOCABULARY])
            self.cache += token
        return np.stack(rows)

    def cache_bytes(self):
        return 8


def request(step, windows=3, length=40, first=7):
    rng = np.random.default_rng(6)
    return {
        "windows": [{"tokens": rng.integers(1, VOCABULARY, length).tolist(), "first": first} for _ in range(windows)], "step": step,
        "reference": "f16",
    }  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 16, 40])
def test_the_same_tokens_are_scored_whatever_the_step(step):
    asked = request(step)
    found = walk(asked, {"f16": lambda tokens: Model(), "same": lambda tokens: Model()})
    wanted = []
    for window in asked["windows"]:
        tokens, model = window["tokens"], Model()
        rows = log_softmax(model.logits(tokens))
        wanted += [-rows[i - 1, tokens[i]] for i in range(window["first"], len(tokens))]
    assert found["f16/nll"] == pytest.approx(np.array(wanted), rel=1e-6)
    assert found["chunk"].tolist() == [n for n in range(3) for _ in range(33)]
    assert found["same/kld"].max() == 0 and found["same/same"].all()
    assert found["told"]["cache_bytes"] == {"f16": 8, "same": 8}


def test_an_arm_that_differs_diverges_as_numpy_says():
    asked = request(8)
    found = walk(asked, {"q4": lambda tokens: Model(wrong=1), "f16": lambda tokens: Model()})
    kld = []
    for window in asked["windows"]:
        tokens = window["tokens"]
        a, b = (np.asarray(m.logits(tokens), dtype=np.float64) for m in (Model(), Model(wrong=1)))
        p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (a, b))
        kld += (p * np.log(p / q)).sum(axis=1)[window["first"] - 1 : -1].tolist()
    assert found["q4/kld"] == pytest.approx(np.array(kld), rel=1e-5)
    assert 0 < found["q4/same"].mean() < 0.5
    assert found["f16/kld"].max() == 0


def test_logits_that_are_none_are_an_error():
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"), np.errstate(all="ignore"):
            log_softmax(np.array([[0.0, bad]]))
    assert np.exp(log_softmax([[-np.inf, 0.0]])).tolist() == [[0.0, 1.0]]


def test_memory_is_that_of_a_step_however_long_the_text():
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(16, 20_000)).astype(np.float32)
    targets = np.zeros(16, dtype=np.int64)
    reference, tokens = log_softmax(rows), Tokens()
    tracemalloc.start()
    for _ in range(50):
        tokens.add(reference, rows, targets)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * rows.nbytes
    assert len(tokens.arrays("a")["a/nll"]) == 800

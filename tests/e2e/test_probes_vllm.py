"""The probe of vLLM inside a real one, a process an arm: its steps are read back, and what it scores is what transformers scores."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pytest_kvcache import frameworks
from pytest_kvcache.core.models import EMBEDDED
from pytest_kvcache.core.perplexity import divergence_of_top
from pytest_kvcache.core.schemes import windows
from pytest_kvcache.harness import weights

from .conftest import PYTHON
from .test_frameworks import INTERPRETERS, interpreter_of
from .test_probes import GENERATED, IDS, OF_ITS_OWN, SCHEME, answered, started

SCRIPT = "in_vllm.py"


@pytest.fixture(scope="module")
def python():
    interpreter_of("vllm")
    return INTERPRETERS["vllm"]


@pytest.fixture(scope="module")
def asked():
    """The model's folder and two windows of a text."""
    folder = Path(weights.locate(EMBEDDED, frameworks.load("transformers"), PYTHON, print).serve)
    ids = json.loads(weights.run_python(PYTHON, IDS, str(folder / "tokenizer.json")).rpartition("ids:")[2])
    return {
        "model": str(folder),
        "windows": [{"tokens": w.tokens, "first": w.first} for w in windows(ids, SCHEME, most=2)],
        "device": "cpu",
    }


def places(found, arm):
    """The likeliest tokens of each scored place."""
    return [
        dict(zip(i, p, strict=True)) for i, p in zip(found[f"{arm}/top_ids"].tolist(), found[f"{arm}/top_logprobs"].tolist(), strict=True)
    ]


@pytest.mark.release
def test_steps_are_read_back_and_score_what_transformers_scores(python, tmp_path, asked):
    asked |= {"step": SCHEME.step, "reference": "auto"}
    found, told = {}, {}
    for name, arm in {"auto": {"kv": "auto"}, "floor": {"kv": "auto", "one_pass": True}, "spoilt": {"kv": "auto", "spoil": True}}.items():
        found[name], told[name] = answered(python, SCRIPT, tmp_path, **asked, arms={name: arm})
    nll = {name: arrays[f"{name}/nll"] for name, arrays in found.items()}
    own = json.loads(weights.run_python(PYTHON, OF_ITS_OWN, str(tmp_path / "request.json")).rpartition("nll:")[2])
    assert nll["auto"].mean() == pytest.approx(own, abs=0.02), "two engines in 16 bits"
    reference = places(found["auto"], "auto")
    assert all(len(p) == 20 and math.fsum(map(math.exp, p.values())) <= 1 + 1e-4 for p in reference)
    assert all(list(p.values()) == sorted(p.values(), reverse=True) for p in reference)
    kld = {n: np.mean([divergence_of_top(p, q) for p, q in zip(reference, places(found[n], n), strict=True)]) for n in ("floor", "spoilt")}
    assert kld["floor"] < 1e-3 < 0.1 < kld["spoilt"] and abs(nll["floor"].mean() - nll["auto"].mean()) < 0.01
    assert nll["spoilt"].mean() > nll["auto"].mean() + 1
    assert found["auto"]["chunk"].tolist() == [0] * 63 + [1] * 63
    about = told["auto"]
    assert about["attention"] == "CPU_ATTN" and about["kv_dtype"] == "auto: bfloat16" and about["kv_tokens"] > 10_000
    assert about["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2 and about["cache_bytes"] == {"auto": 128 * 23040}, "layers, K and V, heads"


@pytest.mark.release
def test_greedy_is_what_transformers_generates(python, tmp_path, asked):
    """In float32: a tie of two tokens in 16 bits falls as the order of sums does."""
    prompts = {"text": "The capital of France is", "ids": asked["windows"][0]["tokens"][:40]}
    request = asked | {"windows": asked["windows"][:1], "prompts": prompts, "new": 12, "step": 16, "dtype": "float32", "reference": "auto"}
    found, told = answered(python, SCRIPT, tmp_path, **request, arms={"auto": {"kv": "auto"}})
    own = json.loads(weights.run_python(PYTHON, GENERATED, str(tmp_path / "request.json")).rpartition("out:")[2])
    assert {name: found[f"auto/{name}"].tolist() for name in prompts} == {name: ids for name, (ids, _) in own.items()}
    assert told["texts"]["auto"] == {name: decoded for name, (_, decoded) in own.items()}
    assert len(found["auto/nll"]) == 63, "and the text is scored beside it"


@pytest.mark.release
def test_what_vllm_refuses_ends_in_one_line_and_tokens_are_its_tokenizers(python, tmp_path, asked):
    done, _ = started(python, SCRIPT, tmp_path, asked | {"step": 16, "reference": "x", "arms": {"x": {"kv": "fp3"}}})
    assert done.returncode == 1 and "Error: " in (line := done.stderr.splitlines()[-1]) and "cache_dtype" in line
    texts = {"short": "Hello, <s> world", "empty": ""}
    found, told = answered(python, SCRIPT, tmp_path, want="tokens", model=asked["model"], texts=texts)
    same, _ = answered(PYTHON, "in_transformers.py", tmp_path, want="tokens", model=asked["model"], texts=texts)
    assert all(found[name].tolist() == same[name].tolist() for name in same) and told["bos"] == 1 and "vllm" in told

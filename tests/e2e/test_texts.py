"""Texts through real caches, from the option to the verdict: ordered by bits, in the table and the picture; and every planted fault caught."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from pytest_kvcache import LIMITS
from pytest_kvcache.core.corpora import Corpus
from pytest_kvcache.core.measurement import measurement
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.core.scenarios import Text
from pytest_kvcache.core.schemes import Scheme
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.core.still import of_limit
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.harness import weights
from pytest_kvcache.harness.corpus import load_corpus
from pytest_kvcache.harness.texts import Scorer

from .conftest import PYTHON
from .test_frameworks import interpreter_of
from .test_probes import TINY, text  # noqa: F401 (a fixture)

SUITE = """
import pytest
from pytest_kvcache import LIMITS, Arm, Gate, Scheme, Text

ARMS = (Arm(name="fp16"), Arm(name="int8", kv_dtype="int8"), Arm(name="int4", kv_dtype="int4"))
TEXT = Text(windows=4, arms=ARMS, scheme=Scheme(window=256, first=129, bos=None, step=32), answer_tokens=12, profile="smoke")

@pytest.mark.parametrize("kv_scenario", [TEXT], ids=str)
@pytest.mark.parametrize("precision", [
    pytest.param(p, marks=pytest.mark.kv_gates(*(Gate(m, arm=p, limit=LIMITS[p][m]) for m in ("kld.mean", "top1")), Gate("kld.mean", arm=p))) for p in ("int8", "int4")
])
def test_precision(precision, kv_result, kv_gate):
    kv_gate(kv_result)
"""
# Of the whole model in one pass, by torch's own loss: nothing of ours is in it.
OF_ITS_OWN = """
import json, sys, torch, transformers
folder, windows = sys.argv[1], json.load(open(sys.argv[2]))
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
losses = []
with torch.no_grad():
    for window in windows:
        ids, first = torch.tensor(window["tokens"]), window["first"]
        logits = model(ids[None]).logits[0, first - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, ids[first:], reduction="none").tolist()
print("nll:" + json.dumps(sum(losses) / len(losses)))
"""


@pytest.mark.parametrize("framework", [pytest.param("transformers", marks=pytest.mark.release), "llama_cpp"])
def test_fewer_bits_diverge_more_and_the_report_shows_it(project, framework):
    (project.folder / "test_suite.py").write_text(SUITE)
    named = () if framework == "transformers" else (f"--kv-framework={framework}", "-o", interpreter_of(framework))
    found = project.run("--kv-record=missing", *named)
    rows = {m["arm"]: m for m in found.run["blocks"][found.run["plan"]["blocks"][0]["id"]]["measurements"]}
    assert all(m["valid"] for m in rows.values()), found.out
    kld, top = ({arm: m["metrics"].get(name, 0.0) for arm, m in rows.items()} for name in ("kld.mean", "top1"))
    assert kld["fp16"] == 0 < kld["int8"] < kld["int4"] < rows["int4"]["load"]["controls"]["negative"]["kld.mean"][0]
    assert top["fp16"] == 1 >= top["int8"] > top["int4"]
    assert all(math.isfinite(v) for m in rows.values() for v in m["metrics"].values())
    assert "a cache made worse on purpose" in found.out
    page = (project.folder / "report1" / "report.html").read_text()
    assert "16 bits in one pass" in page and "<svg" in page
    assert rows["int8"]["load"]["answers"].keys() == rows["fp16"]["load"]["answers"].keys()
    if framework == "llama_cpp":
        again = project.run(*named)
        drift = [v for v in again.run["verdicts"] if "limit" not in v]
        assert {v["verdict"] for v in drift} == {"pass"}, again.out
        assert all(abs(v["change"]) < 0.05 for v in drift), "the same text gives the same figures"


@pytest.fixture(scope="module")
def tiny(text, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("tiny") / "model"
    weights.run_python(PYTHON, TINY, str(text[0]), str(folder))
    return str(folder)


FAULTS = {
    "ignored": {"fault": "ignored", "backend": "absmax", "bits": 4}, "scale": {"fault": "scale"}, "zeros": {"fault": "zeros"},
    "fresh": {"fault": "fresh", "backend": "absmax", "bits": 4}, "twice": {"fault": "twice", "bits": 3},
}  # fmt: skip
HEALTHY = {"backend": "absmax", "bits": 8, "group": 32}  # random weights exaggerate what a precision does
ARMS = (Arm(name="fp16"), Arm(name="healthy", kv_dtype="int4"), *(Arm(name=f, kv_dtype=f"int4-{f}") for f in FAULTS))
TEXT = Text(windows=5, arms=ARMS, scheme=Scheme(window=128, first=65, step=16), answer_tokens=0)


def scorer(tmp_path, model, corpus=None):
    kv = {"auto": {"backend": "half"}, "int4": HEALTHY, **{f"int4-{name}": words for name, words in FAULTS.items()}}
    probe = dataclasses.replace(TRANSFORMERS.probe, kv=kv, needs={})
    return Scorer(
        framework=dataclasses.replace(TRANSFORMERS, probe=probe), python=PYTHON, model=model, device="cpu", env=dict(os.environ),
        corpus=lambda: corpus or load_corpus(""), folder=tmp_path, say=print,
    )  # fmt: skip


def test_every_planted_fault_is_caught_and_a_healthy_cache_is_not(tmp_path, tiny):
    """`ignored` (the precision is silently not applied), a wrong scale, zeros in a head, a cache that is never read, V quantised twice."""
    found = {}
    for trace in scorer(tmp_path, tiny).score(TEXT, ARMS):
        problem = trace_problem(trace)
        row = measurement(trace, problem[0] if problem else None)
        limits = {} if problem or trace.arm == "fp16" else LIMITS["int4"]
        judged = {m: of_limit(row["metrics"][m], row["bounds"][m], v, find_metric(m), windows=5).verdict for m, v in limits.items()}
        found[trace.arm] = problem[0] if problem else {v for v in judged.values()}
        print(trace.arm, problem, row["metrics"], judged)
    assert "does not see the cache" in found["ignored"]
    assert "never read" in found["fresh"]
    assert all("regression" in found[name] for name in ("scale", "zeros", "twice")), found
    assert "regression" not in found["healthy"], found


def test_another_tokenizer_another_text_and_a_missing_beginning_are_other_numbers(tmp_path, tiny):
    one = scorer(tmp_path, tiny)
    with_bos = dataclasses.replace(TEXT, scheme=dataclasses.replace(TEXT.scheme, bos=True))
    other = scorer(tmp_path, tiny, Corpus(name="backwards", text=load_corpus("").text[::-1]))
    hashes = {one.workload(with_bos), one.workload(TEXT), other.workload(TEXT)}
    assert len(hashes) == 3
    tokenizer = Path(tiny) / "tokenizer.json"
    swapped = json.loads(tokenizer.read_text())
    vocabulary = swapped["model"]["vocab"]
    common = sorted(vocabulary, key=vocabulary.get)[300:400]
    for a, b in zip(common[::2], common[1::2], strict=True):
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    tokenizer.write_text(json.dumps(swapped))
    assert scorer(tmp_path, tiny).workload(TEXT) not in hashes


def test_the_perplexity_is_that_of_a_computation_of_its_own(tmp_path, text):  # noqa: F811
    short = dataclasses.replace(TEXT, windows=2, arms=ARMS[:2])
    one = scorer(tmp_path, str(text[0]))
    base, _ = one.score(short, ARMS[:2])
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps([{"tokens": w.tokens, "first": w.first} for w in one.windows(short)]))
    nll = json.loads(weights.run_python(PYTHON, OF_ITS_OWN, str(text[0]), str(windows)).rpartition("nll:")[2])
    assert measurement(base, None)["metrics"]["ppl"] == pytest.approx(math.exp(nll), rel=1e-3)

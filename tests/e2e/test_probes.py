"""The probes inside real engines: what their caches do to a text is finite, ordered and seen, and agrees with a computation of its own."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache
from pytest_kvcache import frameworks
from pytest_kvcache.core.models import EMBEDDED
from pytest_kvcache.core.perplexity import Scores, summarise
from pytest_kvcache.core.quality import Controls, not_applied, not_seen
from pytest_kvcache.core.schemes import Scheme, windows
from pytest_kvcache.harness import weights

from .conftest import PYTHON
from .test_frameworks import INTERPRETERS, interpreter_of

PROBES = Path(pytest_kvcache.__file__).parent / "probes"
SCHEME = Scheme(window=128, first=65, step=16)
IDS = """
import json, pydoc_data.topics, sys, tokenizers
text = "\\n\\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))[:4000]
print("ids:" + json.dumps(tokenizers.Tokenizer.from_file(sys.argv[1]).encode(text, add_special_tokens=False).ids))
"""
# In one pass, by torch's own loss: nothing of the probe is in it.
OF_ITS_OWN = """
import json, sys, torch, transformers
asked = json.load(open(sys.argv[1]))
model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16).eval()
losses = []
for window in asked["windows"]:
    ids, first = torch.tensor(window["tokens"]), window["first"]
    with torch.no_grad():
        logits = model(ids[None]).logits[0, first - 1 : -1].float()
    losses += torch.nn.functional.cross_entropy(logits, ids[first:], reduction="none").tolist()
print("nll:" + json.dumps(sum(losses) / len(losses)))
"""


@pytest.fixture(scope="module")
def text():
    """The model's folder for transformers, and three windows of a text."""
    folder = Path(weights.locate(EMBEDDED, frameworks.load("transformers"), PYTHON, print).serve)
    ids = json.loads(weights.run_python(PYTHON, IDS, str(folder / "tokenizer.json")).rpartition("ids:")[2])
    return folder, [{"tokens": w.tokens, "first": w.first} for w in windows(ids, SCHEME, most=3)]


def scored(python, script, folder, **request):
    """What each arm's tokens are, by a probe in an engine's interpreter."""
    asked, answer = folder / "request.json", folder / "answer.npz"
    asked.write_text(json.dumps(request | {"step": SCHEME.step}))
    done = subprocess.run([python, "-I", str(PROBES / script), str(asked), str(answer)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(answer) as found:
        arrays = {name: found[name] for name in found.files}
    base = arrays[f"{request['reference']}/nll"].tolist()
    return {
        arm: Scores(base_nll=base, chunks=arrays["chunk"].tolist(), **{f: arrays[f"{arm}/{f}"].tolist() for f in ("nll", "kld", "same")})
        for arm in request["arms"]
    }  # fmt: skip


def test_llama_cpp_reads_what_it_has_quantised(tmp_path, text):
    interpreter_of("llama_cpp")
    python = INTERPRETERS["llama_cpp"]
    arms = {"f16": {}, "one_pass": {"one_pass": True}, "q8_0": {"type": "Q8_0"}, "q4_0": {"type": "Q4_0"}, "cut": {"forget": 32}}
    model = str(weights.packaged_file(python, EMBEDDED))
    found = scored(python, "in_llama_cpp.py", tmp_path, model=model, windows=text[1], reference="f16", arms=arms)
    told = {arm: summarise(scores) for arm, scores in found.items()}
    assert len(found["f16"].nll) == 3 * 63 and told["f16"]["kld.mean"].value == 0
    assert told["q8_0"]["kld.mean"].value < told["q4_0"]["kld.mean"].value < told["cut"]["kld.mean"].value
    assert told["q8_0"]["top1"].value > told["q4_0"]["top1"].value > told["cut"]["top1"].value
    assert not_seen(Controls(floor=told["one_pass"], negative=told["cut"]), SCHEME.reads_back) == ""
    assert not_applied(found["q8_0"], "q8_0") == "" != not_applied(found["f16"], "q8_0")


def test_transformers_agrees_with_a_loss_of_its_own(tmp_path, text):
    folder, cut = text
    arms = {"bf16": {}, "one_pass": {"one_pass": True}}
    found = scored(PYTHON, "in_transformers.py", tmp_path, model=str(folder), windows=cut, reference="bf16", arms=arms)
    own = json.loads(weights.run_python(PYTHON, OF_ITS_OWN, str(tmp_path / "request.json")).rpartition("nll:")[2])
    told = {arm: summarise(scores) for arm, scores in found.items()}
    assert told["one_pass"]["ppl"].value == pytest.approx(np.exp(own), rel=1e-3)
    assert told["bf16"]["ppl"].value == pytest.approx(np.exp(own), rel=0.05)
    assert 0 <= told["one_pass"]["kld.mean"].value < 0.02, "in steps and at once differ by rounding, if at all"

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
# A model of two layers with the tokenizer of another: what its caches do to it shows as clearly, in a second.
TINY = """
import shutil, sys, torch, transformers
source, target = sys.argv[1:]
torch.manual_seed(1)
config = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    bos_token_id=1, eos_token_id=2, initializer_range=0.2, tie_word_embeddings=True, max_position_embeddings=512,
)
transformers.LlamaForCausalLM(config).save_pretrained(target)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{source}/{name}", target)
"""
GENERATED = """
import json, sys, torch, transformers
asked = json.load(open(sys.argv[1]))
model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
tokenizer, found = transformers.AutoTokenizer.from_pretrained(asked["model"]), {}
for name, prompt in asked["prompts"].items():
    ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=asked["new"])[0, len(ids):].tolist()
    found[name] = [out, tokenizer.decode(out, skip_special_tokens=True)]
print("out:" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def text():
    """The model's folder for transformers, and three windows of a text."""
    folder = Path(weights.locate(EMBEDDED, frameworks.load("transformers"), PYTHON, print).serve)
    ids = json.loads(weights.run_python(PYTHON, IDS, str(folder / "tokenizer.json")).rpartition("ids:")[2])
    return folder, [{"tokens": w.tokens, "first": w.first} for w in windows(ids, SCHEME, most=3)]


@pytest.fixture(scope="module")
def tiny(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    weights.run_python(PYTHON, TINY, str(text[0]), str(folder))
    return str(folder)


def started(python, script, folder, request):
    asked, answer = folder / "request.json", folder / "answer.npz"
    asked.write_text(json.dumps(request))
    done = subprocess.run([python, "-I", str(PROBES / script), str(asked), str(answer)], capture_output=True, text=True, timeout=300)
    assert done.stdout == ""
    return done, answer


def answered(python, script, folder, **request):
    """The arrays and what is told, by a probe in an engine's interpreter."""
    done, answer = started(python, script, folder, request)
    assert done.returncode == 0, done.stderr
    with np.load(answer) as found:
        arrays = {name: found[name] for name in found.files}
    return arrays, json.loads(str(arrays.pop("told")))


def scored(python, script, folder, **request):
    """What each arm's tokens are."""
    arrays, _ = answered(python, script, folder, **{"step": SCHEME.step} | request)
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


@pytest.mark.release
def test_transformers_agrees_with_a_loss_of_its_own(tmp_path, text):
    folder, cut = text
    arms = {"bf16": {}, "one_pass": {"one_pass": True}}
    found = scored(PYTHON, "in_transformers.py", tmp_path, model=str(folder), windows=cut, reference="bf16", arms=arms)
    own = json.loads(weights.run_python(PYTHON, OF_ITS_OWN, str(tmp_path / "request.json")).rpartition("nll:")[2])
    told = {arm: summarise(scores) for arm, scores in found.items()}
    assert told["one_pass"]["ppl"].value == pytest.approx(np.exp(own), rel=1e-3)
    assert told["bf16"]["ppl"].value == pytest.approx(np.exp(own), rel=0.05)
    assert 0 <= told["one_pass"]["kld.mean"].value < 0.02, "in steps and at once differ by rounding, if at all"


def test_each_fault_of_a_cache_is_seen_or_seen_to_be_none(tmp_path, text, tiny):
    arms = {
        "f32": {}, "one_pass": {"one_pass": True}, "fresh": {"fault": "fresh", "backend": "absmax", "bits": 2},
        "ignored": {"fault": "ignored", "backend": "absmax", "bits": 2}, "scale": {"fault": "scale"}, "keys": {"fault": "scale", "of": "keys"},
        "zeros": {"fault": "zeros"}, "twice": {"fault": "twice", "bits": 4}, **{f"q{b}": {"backend": "absmax", "bits": b} for b in (8, 4, 2)},
    }  # fmt: skip
    asked = {"model": tiny, "windows": text[1], "reference": "f32", "arms": arms, "dtype": "float32", "step": SCHEME.step}
    found, told = answered(PYTHON, "in_transformers.py", tmp_path, **asked)
    kld = {arm: float(found[f"{arm}/kld"].mean()) for arm in arms}
    assert found["ignored/kld"].max() == 0 and (found["ignored/nll"] == found["f32/nll"]).all()
    for figure in ("nll", "kld", "same"):
        assert (found[f"fresh/{figure}"] == found[f"one_pass/{figure}"]).all(), "never read: to the last bit what one pass gives"
    assert all(kld[arm] > 100 * kld["one_pass"] for arm in arms if arm not in ("f32", "one_pass", "fresh", "ignored")), kld
    assert kld["q8"] < kld["q4"] < kld["q2"] and kld["q4"] < kld["twice"] and kld["keys"] < kld["scale"], kld
    size = 2 * 2 * 2 * SCHEME.window  # layers, heads, keys and values, tokens: rows of 64 elements
    assert told["cache_bytes"] == {
        **dict.fromkeys(("f32", "ignored", "scale", "keys", "zeros", "twice"), size * 64 * 4), "one_pass": 0, "fresh": 0,
        "q8": size * 66, "q4": size * 34, "q2": size * 18,
    }  # fmt: skip
    assert told["simulated"] == ["q8", "q4", "q2"] and told["faults"]["keys"] == "scale"


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ({"fault": "gremlins"}, "no such fault: 'gremlins'"), ({"backend": "absmax", "bits": 1}, "absmax: 2 to 8 bits"),
        ({"weights": "int3"}, "weights 'int3': int8 or int4"),
    ],
)  # fmt: skip
def test_what_no_cache_can_be_is_said_in_one_line(tmp_path, text, tiny, arm, says):
    request = {"model": tiny, "windows": text[1][:1], "reference": "x", "step": SCHEME.step, "arms": {"x": arm}}
    done, _ = started(PYTHON, "in_transformers.py", tmp_path, request)
    assert done.returncode == 1 and says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_weights_of_fewer_bits_are_of_a_model_of_their_own_or_said_to_need_a_library(tmp_path, text, tiny):
    request = {
        "model": tiny, "windows": text[1], "reference": "f32", "dtype": "float32", "step": SCHEME.step,
        "arms": {"f32": {}, "w8": {"weights": "int8"}, "again": {}},
    }  # fmt: skip
    done, _ = started(PYTHON, "in_transformers.py", tmp_path, request)
    if done.returncode:
        assert done.stderr.splitlines()[-1] == "weights int8: neither optimum-quanto nor torchao is installed"
        pytest.skip("the engine's interpreter has neither library")
    found, told = answered(PYTHON, "in_transformers.py", tmp_path, **request)
    assert found["w8/kld"].max() > 1e-6 and found["again/kld"].max() == 0 and told["weights"]["w8"].startswith("int8 by ")


LONG = 'The quick brown fox — über 12 Äpfel, "日本語" </s> <|im_start|> jumps.\n\n' * 40_000


def test_tokens_are_the_tokenizers_however_long_the_text(tmp_path, text):
    texts = {"long": LONG, "short": "Hello, <s> world", "empty": ""}
    found, told = answered(PYTHON, "in_transformers.py", tmp_path, want="tokens", model=str(text[0]), texts=texts)
    ids = "import json, sys, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); t.encode_special_tokens = True; print('ids:' + json.dumps(t.encode(sys.argv[2], add_special_tokens=False).ids))"
    for name, cut in (("short", texts["short"]), ("long", LONG[:1000])):
        own = json.loads(weights.run_python(PYTHON, ids, str(text[0] / "tokenizer.json"), cut).rpartition("ids:")[2])
        assert found[f"tokens/{name}"][: len(own) - 5].tolist() == own[:-5] and found[f"tokens/{name}"].dtype == np.int32
    assert len(found["tokens/long"]) > 500_000 and len(found["tokens/empty"]) == 0
    assert (told["bos"], told["eos"], told["vocabulary"]) == (1, 2, 49152) and "transformers" in told
    interpreter_of("llama_cpp")
    python = INTERPRETERS["llama_cpp"]
    model = str(weights.packaged_file(python, EMBEDDED))
    same, told = answered(python, "in_llama_cpp.py", tmp_path, want="tokens", model=model, texts=texts)
    assert all((same[name] == found[name]).all() for name in found), "of this text; the two split some others differently"
    assert (told["bos"], told["eos"], told["vocabulary"]) == (1, 2, 49152) and "llama_cpp" in told


@pytest.mark.release
def test_greedy_is_what_transformers_generates(tmp_path, text, tiny):
    """In float32: a tie of two tokens in 16 bits falls as the order of sums does."""
    asked = {
        "want": "greedy", "prompts": {"text": "The capital of France is", "ids": text[1][0]["tokens"][:40]}, "new": 12, "step": 64,
        "arms": {"f32": {}, "fresh": {"fault": "fresh"}, "q2": {"backend": "absmax", "bits": 2}}, "dtype": "float32",
    }  # fmt: skip
    for model in (tiny, str(text[0])):
        found, told = answered(PYTHON, "in_transformers.py", tmp_path, **asked, model=model)
        own = json.loads(weights.run_python(PYTHON, GENERATED, str(tmp_path / "request.json")).rpartition("out:")[2])
        for name, (ids, decoded) in own.items():
            assert found[f"f32/{name}"].tolist() == found[f"fresh/{name}"].tolist() == ids
            assert told["texts"]["f32"][name] == decoded
        assert any(found[f"q2/{name}"].tolist() != ids for name, (ids, _) in own.items()), "a new token is read from 2 bits"


def test_llama_cpp_quantises_its_models_and_walks_and_continues_with_each(tmp_path, text):
    interpreter_of("llama_cpp")
    python, script = INTERPRETERS["llama_cpp"], "in_llama_cpp.py"
    files = {kind: str(tmp_path / f"{kind}.gguf") for kind in ("F16", "Q8_0", "Q4_0")}
    source = str(weights.packaged_file(python, EMBEDDED))
    for kind, target in files.items():
        _, told = answered(python, script, tmp_path, want="quantize", source=source, type=kind, target=target)
        source = files["F16"]
        assert told["bytes"] == Path(target).stat().st_size and told["type"] == kind
    arms = {"f16": {}, "w8": {"model": files["Q8_0"]}, "w4": {"model": files["Q4_0"]}}
    found = scored(python, script, tmp_path, model=source, windows=text[1], reference="f16", arms=arms)
    kld = {arm: summarise(scores)["kld.mean"].value for arm, scores in found.items()}
    assert kld["f16"] == 0 < kld["w8"] < kld["w4"]
    asked = {"want": "greedy", "model": source, "prompts": {"a": "The capital of France is"}, "new": 8, "step": 4}
    found, told = answered(python, script, tmp_path, **asked, arms={"f16": {}, "cut": {"forget": 2}})
    assert found["f16/a"].tolist() != found["cut/a"].tolist() and "Paris" in told["texts"]["f16"]["a"]
    done, _ = started(python, script, tmp_path, {"want": "quantize", "source": source, "type": "Q9", "target": files["F16"]})
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "llama.cpp has no type 'Q9' of a model"

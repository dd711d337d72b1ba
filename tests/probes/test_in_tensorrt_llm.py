"""The probe of TensorRT-LLM around one that is a table: each token a step of its own, what is kept of it, what is zeroed, what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache

SCRIPT = Path(pytest_kvcache.__file__).parent / "probes" / "in_tensorrt_llm.py"
VOCABULARY, END = 30, 29
TORCH = """
import numpy as np
from types import SimpleNamespace as Some

__version__ = "9.0"
waited = []
cuda = Some(synchronize=lambda: waited.append("cuda"))

class Tensor:
    def __init__(self, values):
        self.values = values
    def __getitem__(self, at):
        return Tensor(self.values[at])
    def __setitem__(self, at, value):
        self.values[at] = value
    def __len__(self):
        return len(self.values)
    def __float__(self):
        return float(self.values)
    def float(self):
        return self
    def fill_(self, value):
        self.values[...] = value
    def tolist(self):
        return self.values.tolist()

def log_softmax(logits, dim):
    assert dim == -1
    x = logits.values - logits.values.max()
    return Tensor(x - np.log(np.exp(x).sum()))

def topk(rows, count):
    best = np.argsort(-rows.values)[:count]
    return Some(indices=Tensor(best), values=Tensor(rows.values[best]))
"""
TENSORRT_LLM = """
import json, math, os
from pathlib import Path
from types import SimpleNamespace as Some
import numpy as np
import torch
from torch import Tensor

__version__ = "0.99"
FAKE = json.loads(os.environ["FAKE"])

class SamplingParams:
    def __init__(self, **asked):
        self.processor = asked.pop("logits_processor", None)
        self.asked = asked

class Layer:
    def __init__(self, cache):
        self.cache = cache
    def zero_(self):
        self.cache.values[:] = [0] * 200
        self.cache.zeroed += 1

class Cache:
    dtype, layer_offsets = "DataType.FP8", {0: 0, 3: 1}
    def __init__(self):
        self.values, self.zeroed = [0] * 200, 0
    def get_buffers(self, layer):
        assert layer in self.layer_offsets
        return Layer(self)
    def get_cache_bytes_per_token(self):
        return 8

class LLM:
    def __init__(self, **said):
        print("a line of its log")
        assert os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] == "1"
        self.said = said | {"kv_cache_config": said["kv_cache_config"].said}
        if self.said["kv_cache_config"]["dtype"] == "fp3":
            raise ValueError("no such\\n  cache")
        self.cache, self.requests, self.steps = Cache(), [], []
        self._executor = Some() if FAKE.get("proxy") else Some(engine=Some(kv_cache_manager=self.cache))
        self.args = Some(attn_backend="TABLE")

    def row(self, ids, i):
        x = [3 * math.sin(1.3 * ids[i] + 0.7 * sum(self.cache.values[:i]) + v * v) for v in range(30)]
        self.cache.values[i] = ids[i]
        return np.array(x if not FAKE.get("nan") else [math.nan] * 30)

    def generate(self, prompt, sampling_params, use_tqdm):
        if FAKE.get("breaks"):
            raise RuntimeError("its kernel is not there")
        assert not use_tqdm
        self.requests.append([len(prompt), sampling_params.asked])
        ids, rows = list(prompt), [self.row(prompt, i) for i in range(len(prompt))]
        logits = Tensor(np.array(rows[FAKE.get("lost", 0):])) if sampling_params.asked.get("return_context_logits") else None
        self.steps.append(len(prompt))
        row = rows[-1]
        while len(ids) - len(prompt) < sampling_params.asked["max_tokens"]:
            shown = Tensor(row[None, None])
            if sampling_params.processor and not (FAKE.get("seldom") and len(ids) % 2):
                sampling_params.processor(1, shown, [ids[: len(ids) - FAKE.get("late", 0)]], None, None)
            ids.append(int(row.argmax()) if not FAKE.get("own") else 7)
            if len(ids) - len(prompt) < sampling_params.asked["max_tokens"]:
                row = self.row(ids, len(ids) - 1)
                self.steps.append(1)
        Path(FAKE["log"]).write_text(json.dumps([self.said, self.requests, self.steps, [self.cache.zeroed, len(torch.waited)]]))
        return Some(outputs=[Some(token_ids=ids[len(prompt):])], context_logits=logits)
"""
LLMAPI = """
class KvCacheConfig:
    def __init__(self, **said):
        self.said = said
"""
# In place of the tokenizer of transformers: a letter is a token.
SITE = """
import sys, types
in_transformers = types.ModuleType("in_transformers")
def vocabulary_of(model):
    from asked import Vocabulary
    return Vocabulary(encode=lambda text: [ord(c) - 96 for c in text], decode=lambda ids: ",".join(map(str, ids)), size=30, ends={29})
in_transformers.vocabulary_of = vocabulary_of
sys.modules["in_transformers"] = in_transformers
"""
WINDOWS = [
    {"tokens": [int(t) for t in np.random.default_rng(n).integers(1, VOCABULARY, 40)], "first": first} for n, first in enumerate((7, 25))
]
GREEDY = {"temperature": 0, "top_k": 1, "end_id": -1, "ignore_eos": True, "detokenize": False}


@pytest.fixture
def probe(tmp_path):
    """Of a request: the arrays, what is told, and what the engine was told, asked and did; or the line that it ends with."""
    fakes = tmp_path / "fakes"
    (fakes / "tensorrt_llm").mkdir(parents=True)
    (fakes / "tensorrt_llm" / "__init__.py").write_text(TENSORRT_LLM)
    (fakes / "tensorrt_llm" / "llmapi.py").write_text(LLMAPI)
    (fakes / "torch.py").write_text(TORCH)
    (fakes / "sitecustomize.py").write_text(SITE)

    def run(arms, fake=None, **other):
        asked, answer, log = (tmp_path / name for name in ("request.json", "answer.npz", "log.json"))
        asked.write_text(json.dumps({"model": "m", "windows": WINDOWS, "step": 16, "arms": arms, "reference": "auto", "top": 5} | other))
        env = os.environ | {"PYTHONPATH": str(fakes), "FAKE": json.dumps({"log": str(log)} | (fake or {}))}
        done = subprocess.run([sys.executable, str(SCRIPT), str(asked), str(answer)], capture_output=True, text=True, env=env, timeout=60)
        if done.returncode:
            assert done.returncode == 1 and not answer.exists()
            return done.stderr.splitlines()[-1]
        with np.load(answer) as found:
            arrays = {name: found[name] for name in found.files}
        return arrays, json.loads(str(arrays.pop("told"))), json.loads(log.read_text()) if log.exists() else None

    return run


def rows(window, reads=True):
    """Log-probabilities of all tokens where each scored one is predicted; `reads`: not so where all before the last step is lost."""
    given = min(16, window["first"])
    for i in range(window["first"] - 1, len(window["tokens"]) - 1):
        cached = sum(window["tokens"][:i]) if reads or i < given else 0
        x = np.array([3 * math.sin(1.3 * window["tokens"][i] + 0.7 * cached + v * v) for v in range(VOCABULARY)])
        yield window["tokens"][i + 1], x - np.log(np.exp(x).sum())


def test_each_scored_token_is_a_step_of_its_own_and_has_the_likeliest_of_its_place(probe):
    found, told, (said, requests, steps, zeroed) = probe({"auto": {"kv": "auto"}}, device="cuda")
    wanted = [row for window in WINDOWS for row in rows(window)]
    assert found["auto/nll"] == pytest.approx([-row[token] for token, row in wanted], rel=1e-9)
    assert found["auto/top_ids"].tolist() == [np.argsort(-row)[:5].tolist() for _, row in wanted]
    assert found["auto/top_logprobs"] == pytest.approx(np.array([np.sort(row)[::-1][:5] for _, row in wanted]), rel=1e-6)
    assert found["chunk"].tolist() == [0] * 33 + [1] * 15
    assert requests == [[7, GREEDY | {"max_tokens": 33}], [16, GREEDY | {"max_tokens": 24}]], (
        "no more at once than a step, or is not scored"
    )
    assert steps == [7] + [1] * 32 + [16] + [1] * 23 and zeroed == [0, 0]
    assert said == {
        "model": "m", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_batch_size": 1, "max_num_tokens": 40, "max_seq_len": 41,
        "kv_cache_config": {"dtype": "auto", "enable_block_reuse": False, "max_tokens": 168}, "disable_overlap_scheduler": True,
        "cuda_graph_config": None,
    }  # fmt: skip
    assert told.pop("seconds")["auto"] > 0
    assert told == {
        "tensorrt_llm": "0.99", "torch": "9.0", "attention": "TABLE", "kv_dtype": "auto: fp8", "kv_bytes_per_token": 8,
        "steps": "of at most 16 tokens, then of one each", "cache_bytes": {"auto": 320},
    }  # fmt: skip


def test_one_pass_is_scored_by_its_context_logits(probe):
    found, told, (said, requests, steps, _) = probe({"floor": {"kv": "fp8", "one_pass": True, "model": "other"}}, dtype="float16")
    assert requests == [[40, GREEDY | {"max_tokens": 1, "return_context_logits": True}]] * 2 and steps == [40, 40]
    assert (said["kv_cache_config"]["dtype"], said["dtype"], said["model"]) == ("fp8", "float16", "other")
    wanted = [row for window in WINDOWS for row in rows(window)]
    assert found["floor/nll"] == pytest.approx([-row[token] for token, row in wanted], rel=1e-9)
    assert found["floor/top_ids"].tolist() == [np.argsort(-row)[:5].tolist() for _, row in wanted]
    assert told["steps"] == "all at once"


def test_a_spoilt_cache_is_zeroed_in_every_layer_after_each_step(probe):
    found, _, (_, _, steps, zeroed) = probe({"negative": {"spoil": True}})
    assert zeroed == [2 * len(steps), len(steps)]
    wanted = [-row[token] for window in WINDOWS for token, row in rows(window, reads=False)]
    assert found["negative/nll"] == pytest.approx(wanted, rel=1e-9)


def likeliest(prompt, new):
    """The `new` likeliest tokens after a prompt."""
    text = list(prompt)
    for _ in range(new):
        ((_, row),) = rows({"tokens": [*text, 0], "first": len(text)})
        text.append(int(np.argmax(row)))
    return text[len(prompt) :]


def test_a_prompt_goes_in_by_steps_and_its_answer_stops_at_the_end(probe):
    prompts = {"ends": WINDOWS[0]["tokens"][:18], "goes on": "aac"}
    found, told, (said, requests, *_) = probe({"auto": {}}, prompts=prompts, new={"ends": 3, "goes on": 40})
    assert requests[2:] == [[16, GREEDY | {"max_tokens": 2 + 3}], [3, GREEDY | {"max_tokens": 40}]]
    assert said["max_seq_len"] == 43 + 1, "a prompt and its answer are longer than a window"
    all_of = {"ends": likeliest(prompts["ends"], 3), "goes on": likeliest([1, 1, 3], 40)}
    assert END in all_of["ends"][:-1] and END not in all_of["goes on"]
    wanted = {"ends": all_of["ends"][: all_of["ends"].index(END) + 1], "goes on": all_of["goes on"]}
    assert {name: found[f"auto/{name}"].tolist() for name in prompts} == wanted
    assert told["texts"] == {"auto": {name: ",".join(map(str, ids)) for name, ids in wanted.items()}}


@pytest.mark.parametrize(
    ("arms", "fake", "other", "line"),
    [
        ({"a": {}, "b": {}}, {}, {}, "TensorRT-LLM has one precision of its cache in a process: one arm, not 2"),
        ({"a": {}}, {}, {"device": "cpu"}, "TensorRT-LLM runs on a GPU only"),
        ({"a": {"kv": "fp3"}}, {}, {}, "ValueError: no such cache"),
        ({"a": {}}, {"breaks": True}, {}, "RuntimeError: its kernel is not there"),
        ({"a": {}}, {"proxy": True}, {}, "AttributeError: 'types.SimpleNamespace' object has no attribute 'engine'"),
        ({"a": {}}, {"late": 1}, {}, "ValueError: TensorRT-LLM made a step after 6 tokens that are not the text's first 7"),
        ({"a": {}}, {"seldom": True}, {}, "ValueError: TensorRT-LLM made a step after 8 tokens that are not the text's first 7"),
        ({"a": {}}, {"own": True}, {}, "ValueError: TensorRT-LLM made a step after 8 tokens that are not the text's first 8"),
        ({"a": {"one_pass": True}}, {"lost": 8}, {}, "TensorRT-LLM gave 32 rows of logits for a prompt of 40 tokens"),
        ({"a": {}}, {"nan": True}, {}, "the engine's logits are not finite"),
        ({"a": {}}, {}, {"want": "greedy"}, "in_tensorrt_llm.py has no 'greedy': walk, tokens"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(probe, arms, fake, other, line):
    assert probe(arms, fake, **other) == line


def test_tokens_are_those_of_the_vocabulary(probe):
    found, told, log = probe({}, want="tokens", texts={"corpus": "abz"})
    assert log is None, "no engine is started for them"
    assert found["tokens/corpus"].tolist() == [1, 2, 26] and told["tensorrt_llm"] == "0.99"

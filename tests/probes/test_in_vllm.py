"""The probe of vLLM around a vLLM that is a table: what it is told, which tokens it scores, what is zeroed and when, what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache

SCRIPT = Path(pytest_kvcache.__file__).parent / "probes" / "in_vllm.py"
VOCABULARY = 30
TORCH = """
__version__ = "9.0"
uint8 = "uint8"

class Storage:  # of one layer: what is cached is a number
    device = "cpu"
    def __init__(self):
        self.values, self.zeroed = [0], 0
    def data_ptr(self):
        return id(self)
    def nbytes(self):
        return 4096

class Tensor:
    dtype = "torch.float8"
    def __init__(self, storage):
        self.storage = storage
    def untyped_storage(self):
        return self.storage
    def set_(self, storage):
        return Tensor(storage)
    def zero_(self):
        self.storage.values[0] = 0
        self.storage.zeroed += 1

def empty(size, dtype, device):
    assert (size, dtype, device) == (0, uint8, "cpu")
    return Tensor(None)
"""
VLLM = """
import json, math, os
from pathlib import Path
from types import SimpleNamespace as Some
import torch

__version__ = "0.99"
FAKE = json.loads(os.environ["FAKE"])

class SamplingParams:
    def __init__(self, **asked):
        self.asked = asked

class LLM:
    def __init__(self, **said):
        print("a line of its log")
        if said["kv_cache_dtype"] not in ("auto", "fp8"):
            raise NotImplementedError("no such\\n  cache")
        self.llm_engine = Engine(said)

class Engine:
    def __init__(self, said):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        self.said, self.storage, self.requests, self.steps = said, torch.Storage(), [], []
        layers = [torch.Tensor(self.storage), [torch.Tensor(self.storage)]]
        group = Some(backend=Some(get_name=lambda: "TABLE_ATTN"))
        runner = Some(kv_caches=layers, attn_groups=[[group], [group]])
        self.model_executor = Some(driver_worker=Some(worker=Some(model_runner=runner)))
        cache = Some(num_gpu_blocks=32, block_size=16, cache_dtype=said["kv_cache_dtype"])
        self.vllm_config = Some(cache_config=cache)

    def add_request(self, name, prompt, params):
        self.ids, self.at, self.found, self.params = prompt["prompt_token_ids"], 0, [None], params.asked
        self.storage.values[0] = 0
        self.requests.append([name, params.asked])

    def has_unfinished_requests(self):
        Path(FAKE["log"]).write_text(json.dumps([self.said, self.requests, self.steps, self.storage.zeroed]))
        return self.at < len(self.ids)

    def step(self):
        if FAKE.get("breaks"):
            raise RuntimeError("its kernel is not there")
        end = len(self.ids) if FAKE.get("whole") else self.at + self.said["max_num_batched_tokens"]
        for i in range(self.at, min(end, len(self.ids))):
            x = [3 * math.sin(1.3 * self.ids[i] + 0.7 * self.storage.values[0] + v * v) for v in range(30)]
            lump = math.log(sum(map(math.exp, x))) if not FAKE.get("nan") else math.nan
            row = {v: Some(logprob=x[v] - lump, rank=n) for n, v in enumerate(sorted(range(30), key=lambda v: -x[v]), 1)}
            self.storage.values[0] += self.ids[i]
            if i + 1 < len(self.ids):
                kept = {self.ids[i + 1]: row[self.ids[i + 1]]}  # the token itself first, whatever its rank
                self.found.append(kept | {v: p for v, p in row.items() if p.rank <= self.params["prompt_logprobs"]})
        self.steps.append(min(end, len(self.ids)) - self.at)
        self.at += self.steps[-1]
        return [Some(finished=self.at == len(self.ids), prompt_logprobs=self.found)]
"""
WINDOWS = [
    {"tokens": [int(t) for t in np.random.default_rng(n).integers(1, VOCABULARY, 40)], "first": first} for n, first in enumerate((7, 25))
]


@pytest.fixture
def probe(tmp_path):
    """Of a request: the arrays, what is told, and what the engine was told, asked and did; or the line that it ends with."""
    fakes = tmp_path / "fakes"
    (fakes / "vllm").mkdir(parents=True)
    (fakes / "torch.py").write_text(TORCH)
    (fakes / "vllm" / "__init__.py").write_text(VLLM)
    (fakes / "vllm" / "platforms.py").write_text("class current_platform:\n    device_type = 'cpu'\n")

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
        return arrays, json.loads(str(arrays.pop("told"))), json.loads(log.read_text())

    return run


def rows(window, step=0):
    """Log-probabilities of all tokens where each scored one is predicted; `step`: the cache is lost after each so many."""
    for i in range(window["first"] - 1, len(window["tokens"]) - 1):
        cached = sum(window["tokens"][i - i % step if step else 0 : i])
        x = np.array([3 * math.sin(1.3 * window["tokens"][i] + 0.7 * cached + v * v) for v in range(VOCABULARY)])
        yield window["tokens"][i + 1], x - np.log(np.exp(x).sum())


def test_each_token_from_the_first_on_is_scored_with_the_likeliest_of_its_place(probe):
    found, told, (said, requests, steps, zeroed) = probe({"auto": {"kv": "auto"}})
    wanted = [row for window in WINDOWS for row in rows(window)]
    assert found["auto/nll"] == pytest.approx([-row[token] for token, row in wanted], rel=1e-9)
    assert found["auto/top_ids"].tolist() == [np.argsort(-row)[:5].tolist() for _, row in wanted]
    assert found["auto/top_logprobs"] == pytest.approx(np.array([np.sort(row)[::-1][:5] for _, row in wanted]), rel=1e-6)
    assert {name: str(a.dtype) for name, a in found.items()} == {
        "auto/nll": "float64", "auto/top_ids": "int32", "auto/top_logprobs": "float32", "chunk": "int32",
    }  # fmt: skip
    assert found["chunk"].tolist() == [0] * 33 + [1] * 15
    assert steps == [16, 16, 8] * 2 and zeroed == 0
    assert [asked for _, asked in requests] == [{"temperature": 0, "detokenize": False, "max_tokens": 1, "prompt_logprobs": 5}] * 2
    assert said == {
        "model": "m", "skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto", "max_model_len": 41, "max_num_seqs": 1,
        "max_num_batched_tokens": 16, "enable_chunked_prefill": True, "enable_prefix_caching": False, "async_scheduling": False,
        "enforce_eager": True, "kv_cache_memory_bytes": 2**30, "max_logprobs": 20,
    }  # fmt: skip
    assert told.pop("seconds")["auto"] > 0
    assert told == {
        "vllm": "0.99", "torch": "9.0", "attention": "TABLE_ATTN", "kv_dtype": "auto: float8", "kv_tokens": 512, "kv_bytes_per_token": 8.0,
        "cache_bytes": {"auto": 320},
    }, "one storage under two names counts once"  # fmt: skip


def test_one_pass_takes_a_window_in_one_step_and_a_precision_is_said_as_it_is(probe):
    found, _, (said, _, steps, _) = probe({"floor": {"kv": "fp8", "one_pass": True}}, dtype="float32", device="cpu")
    assert steps == [40, 40] and said["max_num_batched_tokens"] == 40
    assert (said["kv_cache_dtype"], said["dtype"]) == ("fp8", "float32")
    assert found["floor/nll"] == pytest.approx([-row[token] for window in WINDOWS for token, row in rows(window)], rel=1e-9)


def test_other_weights_are_those_of_the_arm_or_made_as_they_are_loaded(probe):
    _, _, (said, *_) = probe({"w8a8": {"kv": "auto", "model": "org/m-w8a8"}})
    assert (said["model"], said["quantization"]) == ("org/m-w8a8", None)
    _, _, (said, *_) = probe({"fp8": {"kv": "auto", "quantization": "fp8"}})
    assert (said["model"], said["quantization"]) == ("m", "fp8")


def test_a_spoilt_cache_is_zeroed_after_each_step(probe):
    found, _, (_, _, steps, zeroed) = probe({"negative": {"spoil": True}})
    assert steps == [16, 16, 8] * 2 and zeroed == 6
    wanted = [-row[token] for window in WINDOWS for token, row in rows(window, step=16)]
    assert found["negative/nll"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("arms", "fake", "other", "line"),
    [
        ({"a": {}, "b": {}}, {}, {}, "vLLM has one precision of its cache in a process: one arm, not 2"),
        ({"a": {"kv": "fp3"}}, {}, {}, "NotImplementedError: no such cache"),
        ({"a": {}}, {"breaks": True}, {}, "RuntimeError: its kernel is not there"),
        ({"a": {}}, {"whole": True}, {}, "vLLM took 40 tokens in 1 steps, not 3: its steps are longer than 16"),
        ({"a": {}}, {"nan": True}, {}, "the engine's logits are not finite"),
        ({"a": {}}, {}, {"device": "cuda"}, f"vLLM 0.99 of {sys.executable} runs on cpu, not on cuda"),
        ({"a": {}}, {}, {"want": "quantize"}, "in_vllm.py has no 'quantize': walk, tokens"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(probe, arms, fake, other, line):
    assert probe(arms, fake, **other) == line

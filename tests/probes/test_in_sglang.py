"""The probe of SGLang around an SGLang that is a table with a radix tree: its steps, what each read back, what is zeroed, what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache

SCRIPT = Path(pytest_kvcache.__file__).parent / "probes" / "in_sglang.py"
VOCABULARY, END = 30, 29
TORCH = """
from types import SimpleNamespace as Some

uint8 = "uint8"
waited = []

class Storage:  # of a pool: what is cached is a number a token
    device = Some(type="table")
    def __init__(self, size):
        self.values, self.zeroed = [0] * size, 0
    def data_ptr(self):
        return id(self)
    def nbytes(self):
        return 100 * len(self.values)

class Tensor:
    def __init__(self, storage):
        self.storage = storage
    def untyped_storage(self):
        return self.storage
    def set_(self, storage):
        return Tensor(storage)
    def zero_(self):
        self.storage.values[:] = [0] * len(self.storage.values)
        self.storage.zeroed += 1

def empty(size, dtype, device):
    assert (size, dtype, device.type) == (0, uint8, "table")
    return Tensor(None)

def get_device_module(kind):
    return Some(synchronize=lambda: waited.append(kind))
"""
SCHEDULER = """
import json, os
from types import SimpleNamespace as Some
import torch

FAKE = json.loads(os.environ["FAKE"])
live = []

class Inner:
    def __init__(self, storage):
        self.kv_buffer = [torch.Tensor(storage)]
    def get_key_buffer(self, layer):
        return self.kv_buffer[layer]

class Pool:
    dtype, size, page_size = "torch.float8_e4m3fn", 96, 4
    def __init__(self):
        storage, self.pointers = torch.Storage(100), torch.Storage(2)
        if not FAKE.get("bare"):
            self.k_buffer, self.v_buffer = [torch.Tensor(storage), torch.Tensor(storage)], torch.Tensor(storage)
            self.v_scale_buffer, self.full_kv_pool = None, Inner(torch.Storage(100))
        self.k_data_ptrs = torch.Tensor(self.pointers)
        self.storage = storage

class Scheduler:
    def __init__(self, said):
        pool = Pool()
        self.pool = pool
        self.token_to_kv_pool_allocator = Some(get_kvcache=lambda: pool)
        self.tp_worker = Some(model_runner=Some(attn_backend=pool.pointers))
        live.append(self)

def run_scheduler_process(said):
    Scheduler(said)
"""
ENGINE = """
import json, math, os, signal, sys
from pathlib import Path
from types import SimpleNamespace as Some
import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.scheduler import FAKE

class Engine:
    if not FAKE.get("old"):
        run_scheduler_process_func = staticmethod(scheduler.run_scheduler_process)

    def __init__(self, **said):
        print("a line of its log", file=sys.stderr)
        handler = said.pop("custom_sigquit_handler")
        signal.signal(signal.SIGQUIT, handler)
        if said["kv_cache_dtype"] not in ("auto", "fp8_e4m3"):
            print("ValueError: its backend has no such cache", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGQUIT)
        self.run_scheduler_process_func(said)
        self.said, self.kept, self.busy, self.requests, self.flushed = said, [], 0, [], 0
        self.pool = scheduler.live[0].pool
        self.loop = Some(add_signal_handler=lambda *at: setattr(self, "at_quit", at == (signal.SIGQUIT, handler)))
        self.at_quit = False

    def log(self):
        zeroed = [self.pool.storage.zeroed, self.pool.pointers.zeroed, len(torch.waited)]
        Path(FAKE["log"]).write_text(json.dumps([self.said, self.requests[1:], self.flushed, zeroed]))

    def flush_cache(self):
        self.busy -= 1
        if self.busy < 0 and not FAKE.get("busy"):
            self.kept, self.flushed = [], self.flushed + 1
            return Some(success=True)
        return Some(success=False)

    def collective_rpc(self, method, **asked):
        try:
            getattr(scheduler.live[0], method)(**asked)
        except Exception as why:
            raise AssertionError(str(why))
        self.log()

    def row(self, ids, i):
        values = self.pool.storage.values
        x = [3 * math.sin(1.3 * ids[i] + 0.7 * sum(values[:i]) + v * v) for v in range(30)]
        values[i] = ids[i]
        lump = math.log(sum(map(math.exp, x))) if not FAKE.get("nan") else math.nan
        return [one - lump for one in x]

    def generate(self, input_ids, sampling_params, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0):
        assert self.requests == [] or self.at_quit
        if FAKE.get("breaks") and self.requests:
            raise RuntimeError("its kernel\\n is not there")
        same = next((i for i, (a, b) in enumerate(zip(self.kept, input_ids)) if a != b), min(len(self.kept), len(input_ids)))
        cached = min(same, len(input_ids) - 1, logprob_start_len if return_logprob else len(input_ids))
        page = FAKE.get("page", 1)
        cached = 0 if self.said["disable_radix_cache"] or FAKE.get("forgets") else cached // page * page
        rows = {i: self.row(input_ids, i) for i in range(cached, len(input_ids))}
        made, ids, row = [], list(input_ids), rows[len(input_ids) - 1]
        while len(made) < sampling_params["max_new_tokens"]:
            made.append(max(range(30), key=lambda v: row[v]))
            ids.append(made[-1])
            row = self.row(ids, len(ids) - 1)
        self.kept, self.busy = ids[:-1], 1
        self.requests.append([len(input_ids), logprob_start_len, cached, sampling_params])
        self.log()
        about = {"cached_tokens": cached}
        if return_logprob:
            own, best = [(None, input_ids[logprob_start_len], None)], [None]
            for i in range(logprob_start_len, len(input_ids) - 1):
                own.append((rows[i][input_ids[i + 1]], input_ids[i + 1], None))
                best.append([(rows[i][v], v, None) for v in sorted(range(30), key=lambda v: -rows[i][v])[:top_logprobs_num]])
            about |= {"input_token_logprobs": own, "input_top_logprobs": best}
        return {"output_ids": made, "meta_info": about}
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
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def probe(tmp_path):
    """Of a request: the arrays, what is told, and what the engine was told, asked and did; or the line that it ends with."""
    fakes = tmp_path / "fakes"
    files = {"__init__": '__version__ = "0.99"\n', "srt/entrypoints/engine": ENGINE, "srt/managers/scheduler": SCHEDULER}
    for name, text in files.items():
        path = fakes / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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


def rows(window, step=0):
    """Log-probabilities of all tokens where each scored one is predicted; `step`: the cache is lost after each so many."""
    for i in range(window["first"] - 1, len(window["tokens"]) - 1):
        cached = sum(window["tokens"][i - i % step if step else 0 : i])
        x = np.array([3 * math.sin(1.3 * window["tokens"][i] + 0.7 * cached + v * v) for v in range(VOCABULARY)])
        yield window["tokens"][i + 1], x - np.log(np.exp(x).sum())


def asked_for(*requests, new=1):
    """Requests as the engine kept them: their tokens, from where on they are scored, which is as many as they read from the cache."""
    return [[tokens, start, start, GREEDY | {"max_new_tokens": 1}] for tokens, start in requests[:-1]] + [
        [requests[-1][0], requests[-1][1], requests[-1][1], GREEDY | {"max_new_tokens": new}]
    ]


def test_each_token_from_the_first_on_is_scored_and_each_step_reads_all_before_it_from_the_cache(probe):
    found, told, (said, requests, flushed, zeroed) = probe({"auto": {"kv": "auto"}}, device="table")
    wanted = [row for window in WINDOWS for row in rows(window)]
    assert found["auto/nll"] == pytest.approx([-row[token] for token, row in wanted], rel=1e-9)
    assert found["auto/top_ids"].tolist() == [np.argsort(-row)[:5].tolist() for _, row in wanted]
    assert found["auto/top_logprobs"] == pytest.approx(np.array([np.sort(row)[::-1][:5] for _, row in wanted]), rel=1e-6)
    assert {name: str(a.dtype) for name, a in found.items()} == {
        "auto/nll": "float64", "auto/top_ids": "int32", "auto/top_logprobs": "float32", "chunk": "int32",
    }  # fmt: skip
    assert found["chunk"].tolist() == [0] * 33 + [1] * 15
    assert requests == asked_for((17, 0), (33, 16), (40, 32)) * 2
    assert flushed == 2 and zeroed == [0, 0, 0]
    assert said == {
        "model_path": "m", "skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto", "device": "table", "context_length": 56,
        "max_running_requests": 1, "max_total_tokens": 224, "chunked_prefill_size": -1, "disable_radix_cache": False,
        "disable_overlap_schedule": True, "disable_cuda_graph": True,
    }  # fmt: skip
    assert told.pop("seconds")["auto"] > 0
    assert told == {
        "sglang": "0.99", "attention": "Storage", "kv_dtype": "float8_e4m3fn", "kv_tokens": 96, "kv_bytes_per_token": 200.0,
        "cache_bytes": {"auto": 8000},
    }, "two pools, each once, and no pointers"  # fmt: skip


def test_one_pass_takes_a_window_in_one_request_and_reads_nothing_back(probe):
    found, _, (said, requests, *_) = probe({"floor": {"kv": "fp8_e4m3", "one_pass": True, "model": "other"}}, dtype="float32")
    assert requests == asked_for((40, 0)) * 2 and said["disable_radix_cache"]
    assert (said["kv_cache_dtype"], said["dtype"], said["model_path"]) == ("fp8_e4m3", "float32", "other")
    assert found["floor/nll"] == pytest.approx([-row[token] for window in WINDOWS for token, row in rows(window)], rel=1e-9)


def test_a_spoilt_cache_is_zeroed_after_each_step_where_the_tree_still_finds_it(probe):
    found, _, (_, requests, _, zeroed) = probe({"negative": {"spoil": True}})
    assert requests == asked_for((17, 0), (33, 16), (40, 32)) * 2
    assert zeroed == [6, 0, 6], "the cache, not the pointers to it, and before the next forward"
    wanted = [-row[token] for window in WINDOWS for token, row in rows(window, step=16)]
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
    assert requests[6:] == asked_for((17, 0), (18, 16), new=3) + asked_for((3, 0), new=40)
    assert said["context_length"] == 43 + 16, "a prompt and its answer are longer than a window"
    all_of = {"ends": likeliest(prompts["ends"], 3), "goes on": likeliest([1, 1, 3], 40)}
    assert END in all_of["ends"][:-1] and END not in all_of["goes on"]
    wanted = {"ends": all_of["ends"][: all_of["ends"].index(END) + 1], "goes on": all_of["goes on"]}
    assert {name: found[f"auto/{name}"].tolist() for name in prompts} == wanted and found["auto/ends"].dtype == np.int32
    assert told["texts"] == {"auto": {name: ",".join(map(str, ids)) for name, ids in wanted.items()}}


NO_REUSE = "SGLang read 0 of 16 tokens from its cache: its pages do not divide 16, or it keeps none"


@pytest.mark.parametrize(
    ("arms", "fake", "other", "line"),
    [
        ({"a": {}, "b": {}}, {}, {}, "SGLang has one precision of its cache in a process: one arm, not 2"),
        ({"a": {"kv": "fp3"}}, {}, {}, "ValueError: its backend has no such cache"),
        ({"a": {}}, {"breaks": True}, {}, "RuntimeError: its kernel is not there"),
        ({"a": {}}, {"page": 32}, {}, NO_REUSE),
        ({"a": {}}, {"forgets": True}, {}, NO_REUSE),
        ({"a": {}}, {"old": True}, {}, "SGLang 0.99 keeps its KV pool out of reach; 0.5.7 and later do not"),
        ({"a": {}}, {"nan": True}, {}, "the engine's logits are not finite"),
        ({"a": {"spoil": True}}, {"bare": True}, {}, "AssertionError: no tensors are known of a Pool"),
        ({"a": {}}, {}, {"want": "quantize"}, "in_sglang.py has no 'quantize': walk, tokens"),
        ({"a": {"one_pass": True}}, {}, {"prompts": {"p": "abc"}, "new": 3}, "greedy: an arm of one pass cannot continue a prompt; the fault `fresh` is one that never reads its cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(probe, arms, fake, other, line):
    assert probe(arms, fake, **other) == line


def test_pages_that_divide_a_step_are_read_back_whole(probe):
    _, _, (_, requests, *_) = probe({"auto": {}}, {"page": 8})
    assert requests == asked_for((17, 0), (33, 16), (40, 32)) * 2


def test_tokens_are_those_of_the_vocabulary(probe):
    found, told, log = probe({}, want="tokens", texts={"corpus": "abz"})
    assert log is None, "no engine is started for them"
    assert found["tokens/corpus"].tolist() == [1, 2, 26] and told["sglang"] == "0.99"

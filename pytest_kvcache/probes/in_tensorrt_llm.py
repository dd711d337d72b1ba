"""Scores and continues texts through the KV cache of TensorRT-LLM, in its own process. One arm a process: an engine has one precision.

The first tokens of a window go in at once, `step` of them or as many as are not scored, and the others one by one: a logits processor makes
each the only one that can come, after it has kept what the model says of it. Of a step that makes one token the model is given the token
before it; all others it can only have from the cache. That there was such a step for each token, after exactly those before it, is checked.

Read in NVIDIA/TensorRT-LLM, commits from 1.0.0rc4 (2025) to 1.3.0rc (2026): `TLLM_WORKER_USE_SINGLE_PROCESS` keeps the PyTorch engine in
this process (`tensorrt_llm/executor/executor.py`), within reach as `llm._executor.engine`, as its own tests have it; a processor is called
after each forward with the logits and all tokens so far, and changes them in place (`_torch/pyexecutor/model_engine.py`,
`_execute_logit_post_processors`; later `engine/runners/decoder/runner.py`); `get_buffers` are views of the cache, which its own
`check_invalid_values_in_kv_cache` zeroes alike (`_torch/pyexecutor/resource_manager.py`). Context logits come of one pass (`one_pass`) or
of chunks that no answer counts. Not yet met: read, and tested against what was read.

An arm: `kv`, TensorRT-LLM's `kv_cache_config.dtype` (`auto`); `model`, other weights; `one_pass`; `spoil`: all that is cached is zeroed
after each step, a control that must be seen. The answer is that of alone.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["TLLM_WORKER_USE_SINGLE_PROCESS"] = "1"  # before it is imported
os.environ.setdefault("TLLM_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))

import tensorrt_llm  # type: ignore[import-not-found]
import torch
from alone import TOP, Place, in_one_line, run  # type: ignore[import-not-found]  # by its path
from tensorrt_llm.llmapi import KvCacheConfig  # type: ignore[import-not-found]

BLOCK = 64  # tokens of a block of the cache, at most: more room than a text needs, by two of them
VERSIONS = {"tensorrt_llm": tensorrt_llm.__version__, "torch": torch.__version__}


def place(logits: Any, token: int, top: int) -> Place:
    """Of the logits of one place [vocabulary] and the token that stands there."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(logprobs, top)
    return float(logprobs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class Forced:
    """A logits processor: the next token is that of the text as long as it has one, then what the model says. `places` are those of the
    tokens from the `first` on."""

    def __init__(self, text: list[int], given: int, first: int, top: int, after: Callable[[], None]) -> None:
        self.text, self.length, self.first, self.top, self.after = text, given, first, top, after
        self.places: list[Place] = []

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: int | None, client_id: int | None) -> None:
        so_far = list(token_ids[0])
        if len(so_far) != self.length or so_far[: len(self.text)] != self.text[: len(so_far)]:
            raise ValueError(f"TensorRT-LLM made a step after {len(so_far)} tokens that are not the text's first {self.length}")
        self.length += 1
        if len(so_far) < len(self.text):
            token = self.text[len(so_far)]
            if len(so_far) >= self.first:
                self.places.append(place(logits[0, 0], token, self.top))
            logits.fill_(float("-inf"))
            logits[0, 0, token] = 0.0
        self.after()


class Engine:
    """TensorRT-LLM with one arm's cache, for one request of at most `longest` tokens at a time."""

    def __init__(self, request: Mapping[str, Any], arm: Mapping[str, Any], longest: int) -> None:
        if request.get("device", "cuda") == "cpu":
            raise SystemExit("TensorRT-LLM runs on a GPU only")
        self.step, self.one_pass, self.top = request["step"], bool(arm.get("one_pass")), request.get("top", TOP)
        self.kv, self.after = arm.get("kv", "auto"), self.spoil if arm.get("spoil") else self.nothing
        with in_one_line():
            self.llm = tensorrt_llm.LLM(
                model=arm.get("model", request["model"]), skip_tokenizer_init=True, dtype=request.get("dtype", "bfloat16"),
                kv_cache_config=KvCacheConfig(dtype=self.kv, enable_block_reuse=False, max_tokens=longest + 2 * BLOCK), max_batch_size=1,
                max_num_tokens=longest, max_seq_len=longest + 1, disable_overlap_scheduler=True, cuda_graph_config=None,
            )  # fmt: skip
            self.cache = self.llm._executor.engine.kv_cache_manager

    def generate(self, text: list[int], **asked: Any) -> Any:
        with in_one_line():
            params = tensorrt_llm.SamplingParams(temperature=0, top_k=1, end_id=-1, ignore_eos=True, detokenize=False, **asked)
            return self.llm.generate(text, sampling_params=params, use_tqdm=False)

    def forced(self, text: list[int], first: int, new: int) -> tuple[list[Place], list[int]]:
        """The places of all tokens from the `first` on, and the `new` tokens after them. SystemExit where a token was not its own step."""
        given = min(self.step, first)
        processor = Forced(text, given, first, self.top, self.after)
        found = self.generate(text[:given], max_tokens=len(text) - given + new, logits_processor=processor)
        made = list(found.outputs[0].token_ids)
        if processor.length != len(text) + new or text[:given] + made[: len(text) - given] != text:
            raise SystemExit(f"TensorRT-LLM made {processor.length - given} steps of one token, not {len(text) - given + new}")
        return processor.places, made[len(text) - given :]

    def scored(self, text: list[int], first: int) -> list[Place]:
        if not self.one_pass:
            return self.forced(text, first, 0)[0]
        logits = self.generate(text, max_tokens=1, return_context_logits=True).context_logits
        if logits is None or len(logits) != len(text):
            raise SystemExit(f"TensorRT-LLM gave {0 if logits is None else len(logits)} rows of logits for a prompt of {len(text)} tokens")
        return [place(logits[at - 1], text[at], self.top) for at in range(first, len(text))]

    def written(self, prompt: list[int], new: int) -> list[int]:
        return self.forced(prompt, len(prompt), new)[1]

    def spoil(self) -> None:
        """Zeroes the cache in place: between two steps, since it is called at the end of one."""
        for layer in self.cache.layer_offsets:
            self.cache.get_buffers(layer).zero_()
        torch.cuda.synchronize()

    def nothing(self) -> None:
        pass

    def told(self) -> dict[str, Any]:
        with in_one_line():
            return VERSIONS | {
                "attention": str(self.llm.args.attn_backend),
                "kv_dtype": f"{self.kv}: {str(self.cache.dtype).rpartition('.')[2].lower()}",
                "steps": "all at once" if self.one_pass else f"of at most {self.step} tokens, then of one each",
                "kv_bytes_per_token": self.cache.get_cache_bytes_per_token(),
            }


if __name__ == "__main__":
    run("TensorRT-LLM", Engine, VERSIONS)

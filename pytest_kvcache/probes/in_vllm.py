"""Scores and continues texts through the KV cache of vLLM, in its own process. One arm a process: an engine has one precision.

Read in vllm-project/vllm 0.32, V1 engine (`vllm/v1/`): a request alone is given `max_num_batched_tokens` tokens a step and goes on in the
next (`core/sched/scheduler.py`, `schedule`); `prompt_logprobs` come slice by slice for all but the first token, each from the step that
reads the token before it (`worker/gpu_model_runner.py`, `_get_prompt_logprobs_dict`; `worker/gpu/sample/prompt_logprob.py`), and such a
request reads no cached prefix (`request.py`). On a CPU every step writes its keys and values to the cache and attends to what it then
reads there, its own tokens as well (`attention/backends/cpu_attn.py`, `CPUAttentionBackendImpl.forward`); a float cache of 8 bits needs
AVX-512 or AMX there (`_get_attn_isa`). On a GPU `flash_attn.py` does the same; `turboquant_attn.py` (`_prefill_attention`) attends to a
step's own tokens as they are and to those before it as they were kept, so only a window in steps sees its precision. The caches:
`kv_caches` of the model runner, within reach while engine and worker live in this process.

An arm: `kv`, vLLM's `--kv-cache-dtype` (`auto`); `quantization`, its `--quantization` of the weights as they are loaded, or `model`, other
weights; `one_pass`; `spoil`: all that is cached is zeroed after each step, a control that must be seen. The answer is that of alone.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Before it is imported: the engine in this process; what it says not where an answer is expected; one position more than a model has (that
# of the token after a window, which is never read).
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import vllm
from alone import TOP, Place, in_one_line, run  # type: ignore[import-not-found]  # by its path
from vllm.platforms import current_platform

POOL = 2**30  # bytes of KV cache, where no variable of vLLM says otherwise: one request of a window is all there is
VERSIONS = {"vllm": vllm.__version__, "torch": torch.__version__}


class Engine:
    """vLLM with one arm's cache, for one request of at most `longest` tokens at a time."""

    def __init__(self, request: Mapping[str, Any], arm: Mapping[str, Any], longest: int) -> None:
        self.step = min(request["step"], longest)
        if arm.get("one_pass"):
            self.step = longest
        self.spoils, self.top = bool(arm.get("spoil")), request.get("top", TOP)
        device = current_platform.device_type
        if request.get("device", device) != device:
            raise SystemExit(f"vLLM {vllm.__version__} of {sys.executable} runs on {device}, not on {request['device']}")
        with in_one_line():
            self.llm = vllm.LLM(
                model=arm.get("model", request["model"]), skip_tokenizer_init=True, dtype=request.get("dtype", "bfloat16"),
                quantization=arm.get("quantization"), kv_cache_dtype=arm.get("kv", "auto"), max_model_len=longest + 1, max_num_seqs=1,
                max_num_batched_tokens=self.step, enable_chunked_prefill=True, enable_prefix_caching=False, async_scheduling=False,
                enforce_eager=True, kv_cache_memory_bytes=POOL, max_logprobs=max(TOP, self.top),
            )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.storages = {s.data_ptr(): s for s in map(torch.Tensor.untyped_storage, tensors(self.runner.kv_caches))}

    def scored(self, text: list[int], first: int) -> list[Place]:
        found = self.answer(text, max_tokens=1, prompt_logprobs=self.top).prompt_logprobs
        return [(float(found[at][text[at]].logprob), likeliest(found[at], self.top)) for at in range(first, len(text))]

    def written(self, prompt: list[int], new: int) -> list[int]:
        return list(self.answer(prompt, max_tokens=new, ignore_eos=True).outputs[0].token_ids)

    def answer(self, prompt: list[int], **asked: Any) -> Any:
        """What comes of a prompt. SystemExit where it went in by fewer steps than it should: they would have read nothing back."""
        found, steps = [], 0
        with in_one_line():
            params = vllm.SamplingParams(temperature=0, detokenize=False, **asked)
            self.engine.add_request("text", {"prompt_token_ids": prompt}, params)
            while self.engine.has_unfinished_requests():
                found += [output for output in self.engine.step() if output.finished]
                steps += 1
                if self.spoils:
                    self.spoil()
        least = -(-len(prompt) // self.step)
        if steps < least:
            raise SystemExit(f"vLLM took {len(prompt)} tokens in {steps} steps, not {least}: its steps are longer than {self.step}")
        return found[0]

    def spoil(self) -> None:
        """Zeroes the caches in place, whatever they are made of."""
        for storage in self.storages.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()

    def told(self) -> dict[str, Any]:
        """What it decided, and how much of its cache a token takes."""
        cache = self.engine.vllm_config.cache_config
        kinds = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors(self.runner.kv_caches))
        fit = (cache.num_gpu_blocks or 0) * cache.block_size
        return VERSIONS | {
            "attention": ", ".join(dict.fromkeys(g.backend.get_name() for groups in self.runner.attn_groups for g in groups)),
            "kv_dtype": f"{cache.cache_dtype}: {', '.join(kinds)}",
            "kv_tokens": fit,
            "kv_bytes_per_token": sum(s.nbytes() for s in self.storages.values()) / fit if fit else 0.0,
        }


def tensors(found: Any) -> list[Any]:
    """All in the model runner's caches: a layer may have several."""
    return [t for one in found for t in tensors(one)] if isinstance(found, list | tuple) else [found]


def likeliest(position: Mapping[int, Any], top: int) -> list[tuple[int, float]]:
    """The `top` likeliest tokens of a position; the one that stands there may be one more, with a rank of its own."""
    return [(token, float(p.logprob)) for token, p in sorted(position.items(), key=lambda pair: int(pair[1].rank))[:top]]


if __name__ == "__main__":
    run("vLLM", Engine, VERSIONS)

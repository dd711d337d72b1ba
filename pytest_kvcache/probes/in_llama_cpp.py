"""Scores a text through the KV caches of llama.cpp, in its own process, by llama-cpp-python.

Read in ggml-org/llama.cpp (`src/llama-graph.cpp`): attention reads keys and values from the cache's tensors in every pass, also the first,
so any step sees the precision. A quantised V needs flash attention. llama-cpp-python 0.3.36: `Llama._ctx`, `LlamaBatch`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import llama_cpp
import numpy as np
from lockstep import Begin, main

TYPES = {"type_k": "key_type", "type_v": "value_type"}


class Stepwise:
    """A window through a context whose cache was emptied. `forget`: all but the newest so many tokens are dropped after each step, as a
    control that must be seen."""

    def __init__(self, llama: Any, forget: int) -> None:
        self.llama, self.past, self.forget = llama, 0, forget
        self.batch = llama_cpp._internals.LlamaBatch(n_tokens=llama.n_batch, embd=0, n_seq_max=1, verbose=False)
        llama._ctx.kv_cache_clear()

    def logits(self, tokens: list[int]) -> Any:
        self.batch.set_batch(tokens, n_past=self.past, logits_all=True)
        self.llama._ctx.decode(self.batch)
        self.past += len(tokens)
        rows = ctypes.cast(self.llama._ctx.get_logits(), ctypes.POINTER(ctypes.c_float))
        found = np.ctypeslib.as_array(rows, shape=(len(tokens), self.llama.n_vocab())).copy()  # the next pass writes over it
        if self.forget and self.past > self.forget:
            self.llama._ctx.kv_cache_seq_rm(0, 0, self.past - self.forget)
        return found

    def cache_bytes(self) -> int:
        return 0  # its log tells it


def context(request: Mapping[str, Any], arm: Mapping[str, Any]) -> Any:
    """One context of one arm: `type` of K and V, or `key_type` and `value_type`."""
    size = max(len(w["tokens"]) for w in request["windows"])
    step = size if arm.get("one_pass") else request["step"]
    types = {of: getattr(llama_cpp, f"GGML_TYPE_{arm.get(name) or arm.get('type', 'F16')}") for of, name in TYPES.items()}
    return llama_cpp.Llama(
        request["model"], n_ctx=size, n_batch=step, n_ubatch=step, flash_attn=True, n_gpu_layers=request.get("gpu_layers", 0),
        n_threads=request.get("threads"), verbose=False, **types,
    )  # fmt: skip


class OnePass:
    """The whole window at once, given out step by step."""

    def __init__(self, llama: Any, tokens: list[int]) -> None:
        self.found, self.at = Stepwise(llama, 0).logits(tokens), 0

    def logits(self, tokens: list[int]) -> Any:
        self.at += len(tokens)
        return self.found[self.at - len(tokens) : self.at]

    def cache_bytes(self) -> int:
        return 0


def begin_of(llama: Any, arm: Mapping[str, Any]) -> Begin:
    if arm.get("one_pass"):
        return lambda tokens: OnePass(llama, tokens)
    return lambda tokens: Stepwise(llama, arm.get("forget", 0))


def arms(request: Mapping[str, Any]) -> tuple[dict[str, Begin], dict[str, Any]]:
    return {name: begin_of(context(request, arm), arm) for name, arm in request["arms"].items()}, {"llama_cpp": llama_cpp.__version__}


if __name__ == "__main__":
    main(arms)

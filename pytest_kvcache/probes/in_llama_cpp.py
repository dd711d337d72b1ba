"""Scores and continues texts through the KV caches of llama.cpp, in its own process, by llama-cpp-python; quantises models.

Read in ggml-org/llama.cpp (`src/llama-graph.cpp`): attention reads keys and values from the cache's tensors in every pass, also the first,
so any step sees the precision. A quantised V needs flash attention. llama-cpp-python 0.3.36: `Llama._ctx`, `LlamaBatch`.

An arm: `type` of K and V, or `key_type` and `value_type` (`F16`); `one_pass`; `forget`; `model`, a file of its own, not the request's.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import llama_cpp
import numpy as np
from asked import Vocabulary, main, tokens
from greedy import greedy, prompts_of
from lockstep import Begin, walk

TYPES = {"type_k": "key_type", "type_v": "value_type"}
VERSIONS = {"llama_cpp": llama_cpp.__version__}


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


class OnePass:
    """The whole window at once, given out step by step."""

    def __init__(self, llama: Any, tokens: list[int]) -> None:
        self.found, self.at = Stepwise(llama, 0).logits(tokens), 0

    def logits(self, tokens: list[int]) -> Any:
        self.at += len(tokens)
        return self.found[self.at - len(tokens) : self.at]

    def cache_bytes(self) -> int:
        return 0


def context(request: Mapping[str, Any], arm: Mapping[str, Any], size: int) -> Any:
    """One context of one arm, for so many tokens."""
    step = size if arm.get("one_pass") else min(request["step"], size)
    types = {of: getattr(llama_cpp, f"GGML_TYPE_{arm.get(name) or arm.get('type', 'F16')}") for of, name in TYPES.items()}
    return llama_cpp.Llama(
        arm.get("model", request["model"]), n_ctx=size, n_batch=step, n_ubatch=step, flash_attn=True,
        n_gpu_layers=request.get("gpu_layers", 0), n_threads=request.get("threads"), verbose=False, **types,
    )  # fmt: skip


def begin_of(llama: Any, arm: Mapping[str, Any]) -> Begin:
    if arm.get("one_pass"):
        return lambda tokens: OnePass(llama, tokens)
    return lambda tokens: Stepwise(llama, arm.get("forget", 0))


def arms(request: Mapping[str, Any], size: int) -> dict[str, Begin]:
    """How each arm begins a window. SystemExit where their models have different vocabularies: nothing of them could be compared."""
    contexts = {name: context(request, arm, size) for name, arm in request["arms"].items()}
    sizes = {name: llama.n_vocab() for name, llama in contexts.items()}
    if len(set(sizes.values())) > 1:
        raise SystemExit(f"the arms' models have different vocabularies: {sizes}")
    return {name: begin_of(contexts[name], arm) for name, arm in request["arms"].items()}


class Tokenizer:
    """A file's tokenizer, without its weights."""

    def __init__(self, model: str) -> None:
        self.llama = llama_cpp.Llama(model, vocab_only=True, verbose=False)
        self.vocab = self.llama._model.vocab

    def encode(self, text: str) -> list[int]:
        # `Llama.tokenize` begins with a buffer of the context's length and tokenises a long text twice; no text has more tokens than bytes.
        data = text.encode("utf-8")
        found = np.empty(len(data) + 8, np.int32)
        into = found.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), into, len(found), False, False)
        if count < 0:
            raise ValueError(f"llama.cpp makes {-count} tokens of {len(data)} bytes")
        return [int(token) for token in found[:count]]

    def decode(self, ids: list[int]) -> str:
        given, size = (llama_cpp.llama_token * len(ids))(*ids), 16 * len(ids)
        for _ in range(2):
            data = ctypes.create_string_buffer(size)
            found = llama_cpp.llama_detokenize(self.vocab, given, len(ids), data, size, False, False)
            if found >= 0:
                break
            size = -found  # the bytes that are needed
        return data.raw[: max(found, 0)].decode("utf-8", "replace")


def vocabulary_of(model: str) -> Vocabulary:
    one = Tokenizer(model)
    size, bos, eos = one.llama.n_vocab(), one.llama.token_bos(), one.llama.token_eos()
    ends = frozenset(t for t in range(size) if llama_cpp.llama_vocab_is_eog(one.vocab, t))
    known = {name: token for name, token in (("bos", bos), ("eos", eos)) if token >= 0}
    return Vocabulary(encode=one.encode, decode=one.decode, size=size, ends=ends, **known)


def walked(request: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = walk(request, arms(request, max(len(w["tokens"]) for w in request["windows"])))
    return found | {"told": found["told"] | VERSIONS}


def continued(request: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = vocabulary_of(request["model"])
    prompts = prompts_of(request, vocabulary)
    size = max(map(len, prompts.values())) + request["new"]
    found: dict[str, Any] = greedy(request, prompts, arms(request, size), vocabulary)
    return found | {"told": found["told"] | VERSIONS}


def quantised(request: Mapping[str, Any]) -> dict[str, Any]:
    """`source` as `type` (`F16`, `Q8_0`, `Q4_0`, `Q4_K_M`, ...) at `target`, by llama.cpp's own quantiser. A source that is quantised
    already is taken too: to F16 it only loses what F16 cannot hold, to another type its error is added to that one's."""
    kind = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request['type']}", None)
    if kind is None:
        raise SystemExit(f"llama.cpp has no type {request['type']!r} of a model")
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype, asked.allow_requantize, asked.nthread = kind, True, request.get("threads") or 0
    began = time.perf_counter()
    llama_cpp.llama_log_set(SILENT, None)
    if llama_cpp.llama_model_quantize(request["source"].encode(), request["target"].encode(), ctypes.byref(asked)):
        raise SystemExit(f"llama.cpp could not make {request['type']} of {request['source']}")
    told = {"seconds": time.perf_counter() - began, "bytes": Path(request["target"]).stat().st_size, "type": request["type"]}
    return {"told": told | VERSIONS}


SILENT = llama_cpp.llama_log_callback(lambda *_: None)  # its log has a line for each tensor

if __name__ == "__main__":
    main({
        "walk": walked, "tokens": lambda asked: tokens(asked, vocabulary_of(asked["model"]), VERSIONS), "greedy": continued,
        "quantize": quantised,
    })  # fmt: skip

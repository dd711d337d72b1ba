"""SGLang, TensorRT-LLM and TGI as their sources and documentation say, for machines that have none of them: a real process with a real socket.

    python documented_server.py sglang|tensorrt_llm|tgi VERSION ARGS...

It takes the flags, keys and fields that this version is known to have and refuses all others in the words of argparse, click, clap or
pydantic. What it was told decides what it logs, serves and counts: a word is a token, a token takes 2 ms. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

TOKEN_S, START_S = 0.002, 0.2
MEMORY = 64 * 2**20  # of the device, for the KV cache, where nothing says how much
TEMPLATE = 6  # tokens that a chat template adds
STARTED = time.monotonic()
ON = {"action": "store_true"}
WHOLE: dict[str, Any] = {"type": int}

# Of each flag its spellings, the first version that has it, the first that does not, and what it takes.
SGLANG_FLAGS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("--model-path --model", "", "", {"required": True}), ("--host", "", "", {"default": "127.0.0.1"}),
    ("--port", "", "", WHOLE | {"default": 30000}), ("--device", "", "", {"default": "cuda"}),
    ("--kv-cache-dtype", "", "0.5.4", {"choices": ("auto", "fp8_e5m2", "fp8_e4m3"), "default": "auto"}),
    ("--kv-cache-dtype", "0.5.4", "0.5.5", {"choices": ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16"), "default": "auto"}),
    ("--kv-cache-dtype", "0.5.5", "0.5.16", {"choices": ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"), "default": "auto"}),
    ("--kv-cache-dtype", "0.5.16", "", {
        "choices": ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16", "fp4_e2m1"), "default": "auto",
    }),
    ("--page-size", "0.4.5", "", WHOLE), ("--max-total-tokens", "", "", WHOLE), ("--mem-fraction-static", "", "", {"type": float}),
    ("--max-running-requests", "", "", WHOLE), ("--max-prefill-tokens", "", "", WHOLE | {"default": 16384}),
    ("--disable-radix-cache", "", "", ON), ("--chunked-prefill-size", "", "", WHOLE | {"default": 8192}), ("--context-length", "", "", WHOLE),
    ("--tp-size --tensor-parallel-size --tp", "", "", WHOLE | {"default": 1}), ("--quantization", "", "", {}),
    ("--dtype", "", "", {"choices": ("auto", "half", "float16", "bfloat16", "float", "float32"), "default": "auto"}),
    ("--load-format", "", "", {}), ("--log-level", "", "", {}), ("--log-level-http", "", "", {}), ("--served-model-name", "", "", {}),
    ("--attention-backend", "", "", {}), ("--enable-metrics", "", "", ON), ("--decode-log-interval", "", "", WHOLE | {"default": 40}),
    ("--stream-interval", "", "", WHOLE), ("--skip-server-warmup", "", "", ON), ("--enable-cache-report", "", "", ON),
    ("--disable-cuda-graph", "", "", ON), ("--cuda-graph-max-bs", "", "0.5.20", WHOLE), ("--cuda-graph-max-bs-decode", "0.5.20", "", WHOLE),
    ("--cuda-graph-backend-decode", "0.5.15", "", {}), ("--cuda-graph-backend-prefill", "0.5.15", "", {}),
    ("--enable-hierarchical-cache", "", "", ON), ("--hicache-ratio", "0.4.5", "", {"type": float}), ("--hicache-size", "0.4.6", "", WHOLE),
    ("--hicache-write-policy", "0.4.5", "", {"choices": ("write_back", "write_through", "write_through_selective")}),
    ("--hicache-storage-backend", "0.5.0", "", {"choices": ("file", "mooncake", "hf3fs", "nixl", "aibrix", "dynamic", "eic")}),
    ("--hicache-storage-backend-extra-config", "0.5.0", "", {}),
]  # fmt: skip
TENSORRT_LLM_FLAGS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("model", "", "", {}), ("--host", "", "", {"default": "localhost"}), ("--port", "", "", WHOLE | {"default": 8000}),
    ("--backend", "", "", {"choices": ("pytorch", "tensorrt", "_autodeploy", "trt"), "default": "pytorch"}),
    ("--kv_cache_free_gpu_memory_fraction", "", "", {"type": float}), ("--free_gpu_memory_fraction", "1.2", "", {"type": float}),
    ("--max_batch_size", "", "", WHOLE), ("--max_num_tokens", "", "", WHOLE), ("--max_seq_len", "", "", WHOLE),
    ("--tp_size", "", "", WHOLE), ("--tensor_parallel_size", "1.2", "", WHOLE), ("--log_level", "", "", {}),
    ("--extra_llm_api_options", "", "", {}), ("--config", "1.2", "", {}), ("--enable_chunked_prefill", "1.2", "", ON),
    ("--fail_fast_on_attention_window_too_large", "1.2", "", ON), ("--kv_cache_dtype", "1.3", "", {"choices": ("auto", "fp8", "nvfp4")}),
    ("--served_model_name", "1.3", "", {}), ("--set", "1.3", "", {"action": "append"}),
]  # fmt: skip
QUANTIZE = ["awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"]
TGI_FLAGS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("--model-id", "", "", {"default": "bigscience/bloom-560m"}), ("--revision", "", "", {}), ("--hostname", "", "", {"default": "0.0.0.0"}),
    ("--port -p", "", "", WHOLE | {"default": 3000}), ("--kv-cache-dtype", "2.4", "", {"choices": ("fp8_e4m3fn", "fp8_e5m2")}),
    ("--max-batch-total-tokens", "", "", WHOLE), ("--cuda-memory-fraction", "", "", {"type": float}), ("--max-batch-size", "", "", WHOLE),
    ("--max-concurrent-requests", "", "", WHOLE | {"default": 128}), ("--max-batch-prefill-tokens", "", "", WHOLE),
    ("--max-input-tokens", "", "", WHOLE), ("--max-input-length", "", "", WHOLE), ("--max-total-tokens", "", "", WHOLE),
    ("--num-shard", "", "", WHOLE), ("--sharded", "", "", {}), ("--quantize", "", "", {"choices": tuple(QUANTIZE)}),
    ("--dtype", "", "", {"choices": ("float16", "bfloat16")}), ("--cuda-graphs", "", "", {}), ("--enable-prefill-logprobs", "3.0", "", ON),
    ("--json-output", "", "", ON),
]  # fmt: skip
FLAGS = {"sglang": SGLANG_FLAGS, "tensorrt_llm": TENSORRT_LLM_FLAGS, "tgi": TGI_FLAGS}
PROGRAMS = {"sglang": "launch_server.py", "tensorrt_llm": "trtllm-serve serve", "tgi": "text-generation-launcher"}

# Keys of TensorRT-LLM's file, by the first version that has them and the first that does not.
KEYS = {
    **dict.fromkeys((
        "dtype", "max_batch_size", "max_num_tokens", "enable_chunked_prefill", "max_seq_len", "tensor_parallel_size", "attn_backend",
        "enable_iter_perf_stats", "iter_stats_max_iterations", "stream_interval", "quant_config", "kv_cache_config",
        "kv_cache_config.max_tokens", "kv_cache_config.free_gpu_memory_fraction", "kv_cache_config.enable_block_reuse",
        "kv_cache_config.enable_partial_reuse", "kv_cache_config.copy_on_partial_reuse", "kv_cache_config.host_cache_size",
        "kv_cache_config.secondary_offload_min_priority", "kv_cache_config.onboard_blocks",
    ), ("", "")),
    "kv_cache_dtype": ("", "1.0"), "kv_cache_config.dtype": ("1.0", ""), "kv_cache_config.tokens_per_block": ("1.1", ""),
    "kv_cache_config.max_gpu_total_bytes": ("1.1", ""), "return_perf_metrics": ("1.2", ""), "perf_metrics_max_requests": ("1.2", ""),
    "kv_cache_config.use_kv_cache_manager_v2": ("1.2", ""), "iter_perf_stats_interval": ("1.3", ""),
}  # fmt: skip
TENSORRT_LLM_FIELDS = set(
    [
        "model",
        "prompt",
        "best_of",
        "echo",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "top_p",
        "user",
        "lora_request",
        "use_beam_search",
        "top_k",
        "top_p_min",
        "min_p",
        "repetition_penalty",
        "length_penalty",
        "early_stopping",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "return_context_logits",
        "detokenize",
        "add_special_tokens",
        "response_format",
        "disaggregated_params",
    ]
)


def at_least(version: str, other: str) -> bool:
    """Whether a version is another one or a later one; `1.2.0rc4` counts as 1.2.0."""
    ours, theirs = ([int(n) for n in re.findall(r"\d+", v)[:3]] for v in (version, other))
    return ours + [0] * (3 - len(ours)) >= theirs + [0] * (3 - len(theirs))


def has(version: str, since: str, until: str) -> bool:
    return (not since or at_least(version, since)) and not (until and at_least(version, until))


class Refused(Exception):
    """What a server says of arguments that it does not take, and the status that it leaves with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused({"tensorrt_llm": "Error: ", "tgi": "error: "}.get(self.description or "", f"{self.prog}: error: ") + message, 2)


def parsed(dialect: str, version: str, words: list[str]) -> argparse.Namespace:
    """The arguments as this version of a server reads them; Refused in its own words."""
    parser = Parser(prog=PROGRAMS[dialect], description=dialect, allow_abbrev=False, add_help=False)
    for names, since, until, takes in FLAGS[dialect]:
        if has(version, since, until):
            parser.add_argument(*names.split(), **takes)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        first = next((w for w in unknown if w.startswith("-")), unknown[0]).partition("=")[0]
        raise Refused({
            "sglang": f"usage: {parser.prog} [-h] ...\n{parser.prog}: error: unrecognized arguments: {' '.join(unknown)}",
            "tensorrt_llm": f"Usage: {parser.prog} [OPTIONS] MODEL\nTry '{parser.prog} --help' for help.\n\nError: No such option: {first}",
            "tgi": f"error: unexpected argument '{first}' found\n\nUsage: {parser.prog} [OPTIONS]\n\nFor more information, try '--help'.",
        }[dialect], 2)  # fmt: skip
    return found


def checked(version: str, options: dict[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM's file, all keys of which this version has; Refused as pydantic does."""
    keys = [(key, value) for key, value in options.items()]
    keys += [(f"{key}.{inner}", value) for key, each in options.items() if isinstance(each, dict) for inner, value in each.items()]
    if wrong := [(key, value) for key, value in keys if not has(version, *KEYS.get(key, ("9999", "")))]:
        text = "".join(f"\n{key}\n  Extra inputs are not permitted [type=extra_forbidden, input_value={value!r}]" for key, value in wrong)
        raise Refused(
            f"pydantic_core._pydantic_core.ValidationError: {len(wrong)} validation error{'s'[: len(wrong) - 1]} for LlmArgs{text}", 1
        )
    return options


def rounded(tokens: float, page: int) -> int:
    return int(tokens) // page * page


class Engine:
    """What every one of them does: requests wait, run and are counted; prefixes are found again."""

    body_fields: set[str] | None = None

    def __init__(self, version: str, model: str) -> None:
        self.version, self.model, self.name = version, model, model
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.context = int(self.config["max_position_embeddings"])
        self.slots, self.page, self.pool, self.reuses = 2048, 1, 0, True
        self.lock, self.seen = threading.Lock(), set[tuple[str, ...]]()
        self.running = self.waiting = self.used = self.requests = 0
        self.input = self.output = self.cached = self.reused_pages = self.missed_pages = 0

    def begin(self) -> None:
        self.gate = threading.Semaphore(self.slots)

    def token_bytes(self, kv_dtype: str) -> float:
        """Of a token in the KV cache."""
        width = 0.5 if "fp4" in kv_dtype else 1 if "fp8" in kv_dtype else 2
        return 2 * int(self.config["num_hidden_layers"]) * int(self.config["num_key_value_heads"]) * int(self.config["head_dim"]) * width

    def too_long(self, tokens: int, asked: int) -> tuple[int, Any] | None:
        """Status and text for a request that does not fit."""
        if tokens + asked <= self.context:
            return None
        return 400, {
            "object": "error",
            "message": f"Requested token count exceeds the model's maximum context length of {self.context} tokens.",
        }

    def tokens(self, words: tuple[str, ...], asked: int) -> Iterator[int]:
        """One after another, each when it is made; whoever gets the last one finds the request counted."""
        with self.lock:
            self.waiting += 1
        self.gate.acquire()
        pages = [words[: i + self.page] for i in range(0, len(words) - len(words) % self.page, self.page)]
        held = 0
        with self.lock:
            self.waiting -= 1
            self.running += 1
            found = next((i for i, p in enumerate(pages) if p not in self.seen), len(pages)) if self.reuses else 0
            self.seen.update(pages)
            held = math.ceil(len(words) / self.page) * self.page
            self.used += held
        try:
            due = time.monotonic()
            for i in range(1, asked + 1):
                due += TOKEN_S
                time.sleep(max(0.0, due - time.monotonic()))
                with self.lock:
                    grown = math.ceil((len(words) + i) / self.page) * self.page - held
                    held, self.used = held + grown, self.used + grown
                    if i == asked:
                        self.used, self.running, held = self.used - held, self.running - 1, -1
                        self.count(len(words), asked, found)
                    self.step()
                yield i
        finally:
            with self.lock:
                if held >= 0:  # the client has gone
                    self.used, self.running = self.used - held, self.running - 1
            self.gate.release()

    def count(self, tokens: int, made: int, found: int) -> None:
        self.requests, self.input, self.output = self.requests + 1, self.input + tokens, self.output + made
        self.cached += found * self.page
        if self.reuses:
            self.reused_pages, self.missed_pages = self.reused_pages + found, self.missed_pages + math.ceil(tokens / self.page) - found

    def step(self) -> None:
        """After each step of the scheduler."""

    def health(self) -> None:
        """Whatever answering GET /health does."""


class Sglang(Engine):
    endpoint, log_start = "/v1/completions", "[2026-11-30 22:00:00] "

    def __init__(self, version: str, asked: argparse.Namespace) -> None:
        super().__init__(version, asked.model_path)
        told = vars(asked)
        if told.get("enable_hierarchical_cache") and asked.disable_radix_cache:
            raise Refused("ValueError: The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive", 1)
        if asked.kv_cache_dtype == "fp4_e2m1" and at_least(version, "0.5.16"):
            raise Refused("ValueError: --kv-cache-dtype=fp4_e2m1 is deprecated. Use --kv-cache-dtype=fp4_mx_block16.", 1)
        if asked.chunked_prefill_size > 0 and asked.chunked_prefill_size % (told.get("page_size") or 1):
            raise Refused("AssertionError: chunked_prefill_size must be divisible by page_size", 1)
        self.asked, self.name, self.page = asked, asked.served_model_name or asked.model_path, told.get("page_size") or 1
        self.slots, self.context = asked.max_running_requests or 2048, asked.context_length or self.context
        self.reuses, self.host_tier = not asked.disable_radix_cache, bool(told.get("enable_hierarchical_cache"))
        dtype = self.config["torch_dtype"] if asked.dtype == "auto" else asked.dtype
        kv = {"auto": dtype, "bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(asked.kv_cache_dtype, "uint8")
        self.width = self.token_bytes(asked.kv_cache_dtype)
        profiled = rounded(MEMORY / self.width, self.page)
        self.pool = min(profiled, asked.max_total_tokens or profiled)
        backend = asked.attention_backend or ("intel_amx" if asked.device == "cpu" else "flashinfer")
        self.shown, self.steps = {"running": 0, "used": 0}, 0
        shown = f"model_path={self.model!r}, page_size={self.page}, kv_cache_dtype={asked.kv_cache_dtype!r}, attention_backend={backend!r}"
        self.log = [
            f"server_args=ServerArgs({shown}, context_length={asked.context_length}, max_running_requests={asked.max_running_requests})",
            f"Load weight end. type=LlamaForCausalLM, dtype=torch.{dtype}, avail mem=100.00 GB",
            *([f"Using KV cache dtype: torch.{kv}"] if at_least(version, "0.5.20") else []),
            *(["Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0. This may lead to less accurate results!"]
              if "fp8" in asked.kv_cache_dtype else []),
            f"KV Cache is allocated. #tokens: {self.pool}, K size: 0.03 GB, V size: 0.03 GB",
            f"max_total_num_tokens={self.pool}, chunked_prefill_size={asked.chunked_prefill_size}, max_prefill_tokens={asked.max_prefill_tokens}, "
            f"max_running_requests={self.slots}, context_len={self.context}, available_gpu_mem=1.00 GB",
            "The server is fired up and ready to roll!",
        ]  # fmt: skip

    def step(self) -> None:
        self.steps += 1
        if self.steps % self.asked.decode_log_interval == 0 and self.running:  # nothing is said while it is idle
            self.shown = {"running": self.running, "used": self.used}

    def health(self) -> None:
        list(self.tokens(("Health",), 1))

    def metrics(self) -> tuple[str, str] | None:
        if not self.asked.enable_metrics:
            return None
        new = at_least(self.version, "0.5")
        one = {"model_name": self.name}
        rank = one | ({"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"} if new else {})
        share = round(self.shown["used"] / self.pool, 2)
        rows = [
            ("sglang:num_running_reqs", "gauge", rank, self.shown["running"], ""), ("sglang:num_queue_reqs", "gauge", rank, self.waiting, ""),
            ("sglang:num_used_tokens", "gauge", rank, self.shown["used"], ""), ("sglang:token_usage", "gauge", rank, share, ""),
            ("sglang:max_total_num_tokens", "gauge", rank, self.pool, "0.5.7"), ("sglang:full_token_usage", "gauge", rank, share, "0.5.20"),
            ("sglang:kv_used_tokens", "gauge", rank, self.shown["used"], "0.5.10"),
            ("sglang:cache_config_info", "gauge", rank | {"page_size": self.page, "num_pages": self.pool // self.page}, 1, "0.5.10"),
        ]  # fmt: skip
        counted = [  # with labels: on the page from the first use on
            ("sglang:prompt_tokens_total", "counter", one, self.input, ""), ("sglang:generation_tokens_total", "counter", one, self.output, ""),
            ("sglang:num_requests_total", "counter", one, self.requests, ""),
            ("sglang:cached_tokens_total", "counter", one | ({"cache_source": "device"} if new else {}), self.cached, "0.5"),
            ("sglang:hicache_backup_bytes_total", "counter", rank, int(self.input * self.width) * self.host_tier, "0.5.20"),
        ]  # fmt: skip
        rows += [row for row in counted if row[3]]
        return prometheus([row[:4] for row in rows if has(self.version, row[4], "")]), "text/plain; version=0.0.4"

    def chunk(self, text: str, finish: str | None, usage: Any, first: dict[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}] if text else []
        return {**first, "object": "text_completion", "choices": choices, "usage": usage}

    def usage(self, options: dict[str, Any]) -> tuple[bool, bool]:
        """Whether every event has the counts, and whether one at the end has."""
        return bool(options.get("continuous_usage_stats")) and at_least(self.version, "0.5"), bool(options.get("include_usage"))


class TensorrtLlm(Engine):
    endpoint, log_start, body_fields = "/v1/completions", "[11/30/2026-22:00:00] ", TENSORRT_LLM_FIELDS

    def __init__(self, version: str, asked: argparse.Namespace) -> None:
        super().__init__(version, asked.model)
        file = asked.extra_llm_api_options or getattr(asked, "config", None)
        with open(file or os.devnull, encoding="utf-8") as text:
            told = checked(version, json.loads(text.read() or "{}"))
        cache = told.get("kv_cache_config", {})
        self.name = os.path.basename(os.path.normpath(self.model))
        self.page, self.slots = cache.get("tokens_per_block", 32), told.get("max_batch_size", asked.max_batch_size or 2048)
        self.step_tokens, self.chunked = told.get("max_num_tokens", asked.max_num_tokens or 8192), told.get("enable_chunked_prefill", False)
        self.context, self.reuses = told.get("max_seq_len", asked.max_seq_len or self.context), cache.get("enable_block_reuse", True)
        width = self.token_bytes(cache.get("dtype", told.get("kv_cache_dtype", "auto")))
        self.pool = rounded(min(cache.get("max_gpu_total_bytes") or MEMORY, 2**40) / width, self.page)
        self.pool = min(self.pool, cache.get("max_tokens") or self.pool)
        self.counts, self.iterations = (
            told.get("enable_iter_perf_stats", False),
            deque[Any](maxlen=told.get("iter_stats_max_iterations", 1000)),
        )
        self.iteration = 0
        secondary = rounded(cache.get("host_cache_size", 0) / width, self.page) // self.page
        self.log = [
            f"[TRT-LLM] [I] max_seq_len={self.context}, max_num_requests={self.slots}, max_num_tokens={self.step_tokens}",
            f"[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: {self.pool // self.page}",
            f"[TensorRT-LLM][INFO] Number of blocks in KV cache secondary pool: {secondary}",
            f"[TensorRT-LLM][INFO] Number of tokens per block: {self.page}.",
            f"[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.06 GiB for max tokens in paged KV cache ({self.pool}).",
            f"[TensorRT-LLM][INFO] KV cache block reuse is {'enabled' if self.reuses else 'disabled'}",
            "INFO:     Application startup complete.",
        ]

    def too_long(self, tokens: int, asked: int) -> tuple[int, Any] | None:
        if tokens <= self.step_tokens or self.chunked:
            return super().too_long(tokens, asked)
        words = f"The sum of prompt length ({tokens}.0), query length (0) should not exceed max_num_tokens ({self.step_tokens})"
        return 400, {"object": "error", "message": words, "type": "BadRequestError", "param": None, "code": 400}

    def step(self) -> None:
        if not self.counts:
            return
        self.iteration += 1
        used, most, asked = math.ceil(self.used / self.page), self.pool // self.page, self.reused_pages + self.missed_pages
        self.iterations.append({
            "iter": self.iteration, "iterLatencyMS": TOKEN_S * 1e3, "gpuMemUsage": MEMORY, "numActiveRequests": self.running,
            "numQueuedRequests": self.waiting, "numCompletedRequests": self.requests, "maxNumActiveRequests": self.slots,
            "kvCacheStats": {
                "allocNewBlocks": self.missed_pages, "allocTotalBlocks": asked, "cacheHitRate": self.reused_pages / asked if asked else 0,
                "freeNumBlocks": most - used, "maxNumBlocks": most, "missedBlocks": self.missed_pages, "reusedBlocks": self.reused_pages,
                "tokensPerBlock": self.page, "usedNumBlocks": used,
            },
            "inflightBatchingStats": {"numContextRequests": 0, "numGenRequests": self.running, "numPausedRequests": 0},
        })  # fmt: skip

    def metrics(self) -> tuple[str, str]:
        """What was not read yet: reading takes it away."""
        with self.lock:
            told = json.dumps(list(self.iterations))
            self.iterations.clear()
        return told, "application/json"

    def chunk(self, text: str, finish: str | None, usage: Any, first: dict[str, Any]) -> dict[str, Any]:
        nothing = dict.fromkeys(
            ("token_ids", "logprobs", "context_logits", "stop_reason", "disaggregated_params", "avg_decoded_tokens_per_iter")
        )
        choices = [{"index": 0, "text": text, "finish_reason": finish, **nothing}] if text else []
        return {**first, "object": "text_completion", "choices": choices, "usage": usage}

    def usage(self, options: dict[str, Any]) -> tuple[bool, bool]:
        return bool(options) and options.get("continuous_usage_stats", True), bool(options) and options.get("include_usage", True)


class Tgi(Engine):
    endpoint, log_start = "/v1/chat/completions", "2026-11-30T22:00:00.000000Z  INFO text_generation_launcher: "

    def __init__(self, version: str, asked: argparse.Namespace) -> None:
        super().__init__(version, asked.model_id)
        if asked.dtype and asked.quantize and not asked.quantize.startswith("bitsandbytes"):
            text = "Only 1 can be set between `dtype` and `quantize`, as they both decide how goes the final model."
            raise Refused(f"RuntimeError: {text}\nError: ShardCannotStart", 1)
        prefixes = os.environ.get("PREFIX_CACHING" if at_least(version, "2.4") else "USE_PREFIX_CACHING", "true")
        attention = os.environ.get("ATTENTION", "flashinfer")
        self.reuses, self.page = prefixes in ("1", "true"), {"flashinfer": 1, "flashdecoding": 256}.get(attention, 16)
        self.slots = asked.max_batch_size or asked.max_concurrent_requests
        default = None if at_least(version, "3.0") else min(self.context, 4096)  # from 3.0 on what is not told is left to the memory
        self.longest = asked.max_input_tokens or asked.max_input_length or (default and default - 1)  # of a prompt
        self.context = asked.max_total_tokens or default or self.context
        if self.longest and (asked.max_total_tokens or default) and self.longest >= self.context:
            raise Refused("Error: ArgumentValidation('`max_input_tokens must be < `max_total_tokens`')", 1)
        shards = asked.num_shard or len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","))
        self.pool = rounded(shards * MEMORY / self.token_bytes(getattr(asked, "kv_cache_dtype", None) or "auto"), self.page)
        self.pool = min(self.pool, asked.max_batch_total_tokens or self.pool)
        if self.context > self.pool:
            given = f"Given: {self.context} and {self.pool}"
            raise Refused(f"Error: ArgumentValidation(\"`max_total_tokens` must be <= `max_batch_total_tokens`. {given}\")", 1)  # fmt: skip
        self.log = [
            f"Using attention {attention} - Prefix caching {prefixes}",
            f"KV-cache blocks: {self.pool // self.page}, size: {self.page}",
            f"Setting max batch total tokens to {self.pool}",
            "Connected",
        ]

    def too_long(self, tokens: int, asked: int) -> tuple[int, Any] | None:
        if tokens + asked <= self.context and (not self.longest or tokens <= self.longest):
            return None
        said = f"`inputs` tokens + `max_new_tokens` must be <= {self.context}. Given: {tokens} `inputs` tokens and {asked} `max_new_tokens`"
        return 422, {"error": f"Input validation error: {said}", "error_type": "validation"}

    def metrics(self) -> tuple[str, str]:
        def histogram(name: str, total: int) -> list[tuple[str, str, dict[str, Any], Any]]:
            buckets = [(f"{name}_bucket", name, {"le": le}, self.requests) for le in ("131072", "+Inf")]
            return [*buckets, (f"{name}_sum", name, {}, total), (f"{name}_count", name, {}, self.requests)]

        return prometheus([
            ("tgi_request_count", "counter", {}, self.requests), ("tgi_request_success", "counter", {}, self.requests),
            ("tgi_batch_inference_count", "counter", {"method": "prefill"}, self.requests),
            ("tgi_batch_inference_count", "counter", {"method": "decode"}, self.output - self.requests),
            ("tgi_batch_current_size", "gauge", {}, self.running), ("tgi_batch_current_max_tokens", "gauge", {}, self.used),
            ("tgi_queue_size", "gauge", {}, self.waiting), *histogram("tgi_request_input_length", self.input),
            *histogram("tgi_request_generated_tokens", self.output), *histogram("tgi_request_skipped_tokens", 0),
        ]), "text/plain"  # fmt: skip

    def chunk(self, text: str, finish: str | None, usage: Any, first: dict[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "delta": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": finish}] if text else []
        fingerprint = f"{self.version}-native"
        return {**first, "object": "chat.completion.chunk", "system_fingerprint": fingerprint, "choices": choices, "usage": usage}

    def usage(self, options: dict[str, Any]) -> tuple[bool, bool]:
        return False, bool(options.get("include_usage"))


ENGINES: dict[str, Any] = {"sglang": Sglang, "tensorrt_llm": TensorrtLlm, "tgi": Tgi}


def prometheus(rows: list[tuple[str, str, dict[str, Any], Any]]) -> str:
    """A page of samples; a histogram's have its name where others have their kind."""
    lines, typed = [], set()
    for name, kind, labels, value in rows:
        family, kind = (name, kind) if kind in ("gauge", "counter") else (kind, "histogram")
        if family not in typed:
            lines += [f"# HELP {family} As documented.", f"# TYPE {family} {kind}"]
            typed.add(family)
        inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
        lines.append(f"{name}{'{' + inside + '}' if inside else ''} {float(value)}")
    return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    engine: Any

    def do_GET(self) -> None:
        page = self.engine.metrics() if self.path == "/metrics" else None
        if time.monotonic() - STARTED < START_S:
            self.answer(503, "")
        elif self.path == "/health":
            self.engine.health()
            self.answer(200, "")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"object": "list", "data": [{"id": self.engine.name, "object": "model"}]}))
        elif page:
            self.answer(200, *page)
        else:
            self.answer(404, json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fields = self.engine.body_fields
        if time.monotonic() - STARTED < START_S or self.path != self.engine.endpoint:
            self.answer(404 if time.monotonic() - STARTED >= START_S else 503, "")
        elif fields and (unknown := sorted(set(body) - fields)):
            self.answer(400, json.dumps({"error": f"[{{'type': 'extra_forbidden', 'loc': ('body', {unknown[0]!r})}}]"}))
        elif self.engine.endpoint == "/v1/chat/completions" and body.get("model") != "tgi":
            self.answer(404, json.dumps({"error": f"adapter {body.get('model')} not found", "error_type": "adapter_not_found"}))
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        words = tuple(" ".join(m["content"] for m in body["messages"]).split() if chat else body["prompt"].split())
        words = ("<|template|>",) * TEMPLATE * chat + words
        if refused := self.engine.too_long(len(words), body["max_tokens"]):
            self.answer(refused[0], json.dumps(refused[1]))
            return
        each, end = self.engine.usage(body.get("stream_options") or {})
        first = {"id": "cmpl-0", "created": 1, "model": self.engine.name}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        usage: dict[str, Any] = {}
        for i in self.engine.tokens(words, body["max_tokens"]):
            usage = {"prompt_tokens": len(words), "total_tokens": len(words) + i, "completion_tokens": i}
            self.event(self.engine.chunk(f" w{i}", "length" if i == body["max_tokens"] else None, usage if each else None, first))
        if end:
            self.event(self.engine.chunk("", None, usage, first))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, plain: Any) -> None:
        data = f"data: {plain if isinstance(plain, str) else json.dumps(plain)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would drown the log."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


TAKEN = {
    "sglang": "ERROR:    [Errno 98] error while attempting to bind on address ('{0}', {1}): address already in use",
    "tensorrt_llm": "RuntimeError: Failed to bind socket to {0}:{1}: [Errno 98] Address already in use",
    "tgi": "Error: WebServer(Os {{ code: 98, kind: AddrInUse, message: \"Address already in use\" }}) {0}:{1}",
}  # fmt: skip


def main(dialect: str, version: str, *words: str) -> None:
    try:
        asked = parsed(dialect, version, list(words))
        Handler.engine = engine = ENGINES[dialect](version, asked)
    except Refused as e:
        print(e, file=sys.stderr, flush=True)
        raise SystemExit(e.status) from None
    engine.begin()
    at = (getattr(asked, "hostname", None) or asked.host, asked.port)
    for line in engine.log:
        print(engine.log_start + line, flush=True)
    try:
        server = Server(at, Handler)
    except OSError:
        print(TAKEN[dialect].format(*at), file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    with server:
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])

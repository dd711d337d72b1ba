"""TensorRT-LLM: `trtllm-serve MODEL` with the PyTorch back end. Not yet met: read, and tested against what was read.

Read in NVIDIA/TensorRT-LLM: `tensorrt_llm/commands/serve.py` (1.2), `tensorrt_llm/llmapi/llm_args.py` (0.20, 1.0, 1.2),
`tensorrt_llm/serve/openai_protocol.py` and `openai_server.py` (1.2 and later), `tensorrt_llm/metrics/collector.py` (1.0, 2026),
`docs/source/commands/trtllm-serve/trtllm-serve.rst` (2026).

Whatever an arm asks for goes into its YAML file and nothing of it on the command line: up to 1.2 the file wins over the command line,
later the other way round. JSON is YAML. It refuses fields that it does not know, in the file and in a request. Its JSON page is emptied
by who reads it, and is the only one of old versions with the KV cache in it; its counters there are blocks since the start.
"""

from __future__ import annotations

import json
from typing import Any

from ..core.flags import told
from ..core.framework import Flag, Framework, Launch, Probe
from ..core.readings import Series
from .shared import GIB, NO_MODEL, OUT_OF_MEMORY, ignoring_eos

KV_DTYPES = {name: name for name in ("auto", "fp8", "nvfp4")}
WEIGHT_DTYPES = {name: name for name in ("auto", "bfloat16", "float16")}
DTYPES = {"kv_dtype": KV_DTYPES, "weight_dtype": WEIGHT_DTYPES}
CONFIG = "llm_options.yaml"


def _key(*path: str, since: str = "", until: str = "", scale: int = 1) -> Flag:
    """A key of the file: its words are the path and the value, as JSON."""
    return Flag(words=lambda v: [*path, json.dumps(int(v * scale) if scale > 1 else v)], since=since, until=until)


FLAGS = {
    "weight_dtype": (_key("dtype"),),
    "kv_dtype": (_key("kv_cache_config", "dtype", since="1.0"), _key("kv_cache_dtype", until="1.0")),
    "block_size": (_key("kv_cache_config", "tokens_per_block", since="1.1"),),
    "kv_gib": (_key("kv_cache_config", "max_gpu_total_bytes", since="1.1", scale=GIB),),
    "max_requests": (_key("max_batch_size"),),
    "max_batched_tokens": (_key("max_num_tokens"),),
    "prefix_cache": (_key("kv_cache_config", "enable_block_reuse"),),
    "chunked_prefill": (_key("enable_chunked_prefill"),),
    "context": (_key("max_seq_len"),),
    "cpu_offload_gib": (_key("kv_cache_config", "host_cache_size", scale=GIB),),
}


def options(launch: Launch) -> dict[str, Any]:
    """What the file says: the iterations that its metrics page is made of, and what the arm asks for. With `return_perf_metrics` the server
    would read that page itself, which empties it."""
    found: dict[str, Any] = {"enable_iter_perf_stats": True}
    for *path, said in told("tensorrt_llm", FLAGS, launch.arm, launch.version, DTYPES):
        place = found
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = json.loads(said)
    return found


def files(launch: Launch) -> dict[str, str]:
    return {CONFIG: json.dumps(options(launch), indent=1)}


def argv(launch: Launch) -> list[str]:
    """Its script is that beside the interpreter: never another environment's, which the search path would give."""
    folder, slash, _ = launch.python.rpartition("/")
    said = list(launch.command) or [f"{folder}{slash}trtllm-serve"]
    said += [launch.model, "--host", launch.host, "--port", str(launch.port), "--backend", "pytorch"]
    if launch.tp > 1:
        said += ["--tp_size", str(launch.tp)]
    if launch.log_level:
        said += ["--log_level", launch.log_level]
    return [*said, "--extra_llm_api_options", f"{launch.folder}/{CONFIG}", *launch.serve_args]


PROBE = Probe(
    script="in_tensorrt_llm.py",
    kv={name: {"kv": word} for name, word in KV_DTYPES.items()},
    floor={"kv": "auto", "one_pass": True},
    negative={"kv": "auto", "spoil": True},
    alone=True,
)

TENSORRT_LLM = Framework(
    name="tensorrt_llm",
    argv=argv,
    files=files,
    body=ignoring_eos,
    needs=("tensorrt_llm",),
    cure="pip install 'pytest-kvcache[tensorrt-llm]'",
    distributions=("tensorrt-llm", "torch", "flashinfer-python", "triton", "transformers"),
    flags=FLAGS,
    probe=PROBE,
    tensor_parallel=True,
    metrics="/metrics",
    kv_dtypes=KV_DTYPES,
    weight_dtypes=WEIGHT_DTYPES,
    readings={
        "kv_usage": (Series(name="kvCacheStats.usedNumBlocks", over="kvCacheStats.maxNumBlocks"),),
        "kv_used_tokens": (Series(name="kvCacheStats.usedNumBlocks", times="kvCacheStats.tokensPerBlock"),),
        "kv_capacity_tokens": (Series(name="kvCacheStats.maxNumBlocks", times="kvCacheStats.tokensPerBlock"),),
        "running": (Series(name="numActiveRequests"),),
        "waiting": (Series(name="numQueuedRequests"),),
        "prefix_queries": (
            Series(name="kvCacheStats.reusedBlocks", plus="kvCacheStats.missedBlocks", times="kvCacheStats.tokensPerBlock"),
        ),
        "prefix_hits": (Series(name="kvCacheStats.reusedBlocks", times="kvCacheStats.tokensPerBlock"),),
    },
    unsupported={
        "output": "its JSON page counts no tokens",
        "input": "its JSON page counts no tokens",
        "preemptions": "it shows how many requests are paused now, not how often",
        "offload_stored_bytes": "its JSON page has them by iteration only",
        "offload_loaded_bytes": "its JSON page has them by iteration only",
    },
    known_failures=(
        (r"Failed to bind socket to (\S+)", "the port is taken ({0})"),
        (r"No such option:? '?([^\s']+)", "this version does not know the option {0}"),
        (r"^(\w[\w.]*)\n\s+Extra inputs are not permitted", "this version does not know the setting {0}"),
        (
            r"KvCacheConfig\.dtype is not supported by the TensorRT backend",
            "the TensorRT back end has no KV dtype of its own; the PyTorch one has",
        ),
        (
            r"should not exceed max_num_tokens \((\d+)\)",
            "a prompt is longer than a step may be ({0} tokens): ask for chunked prefill, or max_batched_tokens",
        ),
        (r"maxTokensInPagedKvCache \((\d+)\) must be large enough", "the KV cache, of {0} tokens, is too small for one request"),
        OUT_OF_MEMORY,
        NO_MODEL,
    ),
    history={
        "--kv_cache_free_gpu_memory_fraction": "called --free_gpu_memory_fraction too, from 1.2 on",
        "--config": "came with 1.2; before, --extra_llm_api_options",
    },
    resolved=(
        ("kv_tokens", r"max tokens in paged KV cache \((\d+)\)"),
        ("kv_memory", r"Allocated ([\d.]+ GiB) for max tokens in paged KV cache"),
        ("block_size", r"Number of tokens per block: (\d+)"),
        ("kv_blocks", r"Number of blocks in KV cache primary pool: (\d+)"),
        ("prefix_caching", r"KV cache block reuse is (enabled|disabled)"),
        ("max_model_len", r"max_seq_len=(\d+)"),
        ("max_requests", r"max_num_requests=(\d+)"),
        ("max_batched_tokens", r"max_num_tokens=(\d+)"),
    ),
    source="NVIDIA/TensorRT-LLM 0.20 to 1.2 tensorrt_llm/commands/serve.py, llmapi/llm_args.py",
)

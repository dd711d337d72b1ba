"""TGI (Text Generation Inference): `text-generation-launcher`. Not yet met: read, and tested against what was read.

Read in huggingface/text-generation-inference: `docs/source/reference/launcher.md` (3.0) and `launcher/src/main.rs` (2.x and 3.x) for flags,
`docs/source/reference/metrics.md` for series, `router/src/lib.rs` (2.3 and later) for the request, `router/src/validation.rs` and
`backends/v3/src/main.rs` for its limits, `server/pyproject.toml` and `Dockerfile` for where it is.

Its Python distribution has called itself 2.0.5.dev0 ever since, so its version is not known. Its image has the launcher in another folder
than the interpreter, and the launcher starts `text-generation-server` and `-router` by the search path: the interpreter's folder comes
first in it. Not told how many, it takes all the GPUs that a variable names (`find_num_shards`). Up to 2.x a context must be told with how
much of it a prompt may be, which is 4,095 tokens otherwise.

It fixes `ignore_eos_token: false`, so an answer may end early: such a run is invalid. Only its chat endpoint tells token counts while it
streams. It has no series of the KV cache: the token budget of a batch is what is reserved, and `tgi_request_skipped_tokens` counts
speculated tokens, not reused ones. Whether prefixes are cached is told by a variable.

Asked for `decoder_input_details` it tells of each token of a prompt its own log-probability, of the pass that read it (`PrefillToken` in
`router/src/lib.rs`; `server/text_generation_server/models/flash_causal_lm.py` gathers no other). Nothing makes it say a given text token
by token, and whether that pass attends to the cache depends on the kernel (`layers/attention/cuda.py`: FlashInfer does).
"""

from __future__ import annotations

import os
from typing import Any

from ..core.flags import words
from ..core.framework import Flag, Framework, Launch
from ..core.readings import Series
from .shared import NO_MODEL, OUT_OF_MEMORY, PORT_TAKEN

KV_DTYPES = {"auto": "", "fp8": "fp8_e4m3fn", "fp8_e4m3": "fp8_e4m3fn", "fp8_e5m2": "fp8_e5m2"}
WEIGHT_DTYPES = {name: name for name in ("auto", "bfloat16", "float16")}
DTYPES = {"kv_dtype": KV_DTYPES, "weight_dtype": WEIGHT_DTYPES}

FLAGS = {
    "weight_dtype": (Flag(words=lambda v: ["--dtype", v]),),
    "quantization": (Flag(words=lambda v: ["--quantize", v]),),
    "kv_dtype": (Flag(words=lambda v: ["--kv-cache-dtype", v], since="2.4"),),
    "max_requests": (Flag(words=lambda v: ["--max-batch-size", str(v)]),),
    "max_batched_tokens": (Flag(words=lambda v: ["--max-batch-prefill-tokens", str(v)]),),
    "prefix_cache": (Flag(words=lambda v: [], since="2.2"),),  # by a variable, see `environ`
    "context": (Flag(words=lambda v: ["--max-input-tokens", str(v - 1), "--max-total-tokens", str(v)]),),
}


def argv(launch: Launch) -> list[str]:
    said = list(launch.command) or ["text-generation-launcher"]
    said += ["--model-id", launch.model, "--hostname", launch.host, "--port", str(launch.port), "--num-shard", str(launch.tp)]
    return said + words("tgi", FLAGS, launch.arm, launch.version, DTYPES) + list(launch.serve_args)


def environ(launch: Launch) -> dict[str, str]:
    wanted = launch.arm.prefix_cache
    said = {} if wanted is None else dict.fromkeys(("PREFIX_CACHING", "USE_PREFIX_CACHING"), str(int(wanted)))
    if launch.log_level:
        said["LOG_LEVEL"] = launch.log_level.replace("warning", "warn")  # as Rust calls it
    if "/" in launch.python and not launch.command:
        said["PATH"] = f"{os.path.dirname(launch.python)}:{os.environ.get('PATH', os.defpath)}"
    return said


def body(model: str, prompt: str, osl: int) -> dict[str, Any]:
    """`model` is "tgi": another name is taken for that of an adapter."""
    return {
        "model": "tgi", "messages": [{"role": "user", "content": prompt}], "max_tokens": osl, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


TGI = Framework(
    name="tgi",
    argv=argv,
    environ=environ,
    body=body,
    endpoint="/v1/chat/completions",
    needs=("text_generation_server",),
    cure="run its container by the ini option kv_command_tgi = docker run ... IMAGE",
    distributions=("torch", "text-generation-server", "transformers"),  # its own after torch: it does not tell its version
    flags=FLAGS,
    no_probe="it tells one log-probability of each token of a prompt, its own, and not the likeliest ones: no divergence follows from it",
    tensor_parallel=True,
    checkpoints=True,
    quantizations={"fp8": "fp8"},
    kv_dtypes=KV_DTYPES,
    weight_dtypes=WEIGHT_DTYPES,
    readings={
        "running": (Series(name="tgi_batch_current_size"),),
        "waiting": (Series(name="tgi_queue_size"),),
        "output": (Series(name="tgi_request_generated_tokens_sum"),),
        "input": (Series(name="tgi_request_input_length_sum"),),
    },
    unsupported={
        **dict.fromkeys(("kv_usage", "kv_used_tokens", "kv_capacity_tokens"), "it has no series of the KV cache"),
        **dict.fromkeys(("prefix_queries", "prefix_hits"), "it counts no reused tokens; those it calls skipped were speculated"),
        "preemptions": "it reserves all that a request may need, and preempts none",
        **dict.fromkeys(("offload_stored_bytes", "offload_loaded_bytes"), "it offloads nothing"),
    },
    known_failures=(
        PORT_TAKEN,
        (r"unexpected argument '([^']+)'", "this version does not know the argument {0}"),
        (
            r"`max_total_tokens` must be <= `max_batch_total_tokens`\. Given: (\d+) and (\d+)",
            "the context of {0} tokens is larger than the KV cache, which holds {1}",
        ),
        (
            r"`max_batch_prefill_tokens` must be >= `max_input_tokens`\. Given: (\d+) and (\d+)",
            "a prompt of {1} tokens is longer than a step may be ({0}): ask for more max_batched_tokens, or a shorter context",
        ),
        (
            r"Not enough memory to handle (\d+) prefill tokens",
            "no memory is left for a prefill of {0} tokens: ask for fewer max_batched_tokens",
        ),
        OUT_OF_MEMORY,
        NO_MODEL,
    ),
    known_warnings=(
        ("attention_backend_changed", r"Forcing attention to '?(\w+)'?"),
        ("prefix_cache_off", r"(Disabling prefix caching because of [^\n]*)"),
    ),
    resolved=(
        ("attention_backend", r"Using attention (\w+) - Prefix caching"),
        ("prefix_caching", r"Using attention \w+ - Prefix caching (\w+)"),
        ("kv_blocks", r"KV-cache blocks: (\d+)"),
        ("block_size", r"KV-cache blocks: \d+, size: (\d+)"),
        ("kv_tokens", r"(?:Setting max batch total tokens to|Inferred max batch total tokens:) (\d+)"),
    ),
    source="huggingface/text-generation-inference 2.3 to 3.x launcher/src/main.rs, router/src/lib.rs",
)

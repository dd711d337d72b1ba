"""transformers: `transformers serve --continuous-batching`, the embedded default on a CPU.

Read in huggingface/transformers 5.24.0: flags in `src/transformers/cli/serve.py`; the request in
`cli/serving/completion.py` (`prompt` must be a string, `stream_options` is ignored, the final chunk always carries
`usage`); `generation_config` and the pinned model in `cli/serving/utils.py`; an `eos_token_id` of -1 disables the end
of text in `generation/continuous_batching/requests.py`. It exports no metrics page.

Of what it decides itself it tells two things: that continuous batching replaced the attention (`continuous_api.py`, a
warning), and with every request whether it batches continuously. Blocks and memory of its cache go to a logger
("ContinuousBatchingLogger") that `--log-level` does not reach: unknown here.

A GGUF file is unpacked once into 16-bit safetensors: served directly, its weights stay packed and `serve` fails on the
missing architecture (seen with 5.24.0).
"""

from __future__ import annotations

import json
from typing import Any

from ..core.flags import words
from ..core.framework import Flag, Framework, Launch, Probe
from ..core.readings import READINGS
from .shared import NO_MODEL, OUT_OF_MEMORY, PORT_TAKEN, UNPACK_GGUF

# With a fixed greedy configuration the first request, which fixes the batching manager's settings, is like all others.
_GENERATION = json.dumps({"do_sample": False, "eos_token_id": -1})

CPU_MEMORY = 0.6  # what a server takes of a CPU's memory by itself (`resolve_max_memory_percent`, `continuous_batching/initialization.py`)

FLAGS = {
    "weight_dtype": (Flag(words=lambda v: ["--dtype", v]),),
    "quantization": (Flag(words=lambda v: ["--quantization", v]),),
    "block_size": (Flag(words=lambda v: ["--cb-block-size", str(v)]),),
    "max_batched_tokens": (Flag(words=lambda v: ["--cb-max-batch-tokens", str(v)]),),
}
WEIGHT_DTYPES = {name: name for name in ("auto", "bfloat16", "float16", "float32")}
QUANTIZATIONS = {"int8": "bnb-8bit", "int4": "bnb-4bit"}  # by bitsandbytes
DTYPES = {"weight_dtype": WEIGHT_DTYPES, "quantization": QUANTIZATIONS}


def argv(launch: Launch) -> list[str]:
    said = list(launch.command) or [launch.python, "-m", "transformers.cli.transformers", "serve"]
    said += [launch.model, "--continuous-batching", "--host", launch.host, "--port", str(launch.port)]
    said += ["--device", "cpu" if launch.device == "cpu" else "cuda"]
    if launch.arm.weight_dtype == "auto":
        said += ["--dtype", "bfloat16"]
    said += words("transformers", FLAGS, launch.arm, launch.version, DTYPES)
    if launch.arm.memory_share < 1:
        said += ["--cb-max-memory-percent", f"{CPU_MEMORY * launch.arm.memory_share:.3g}"]
    if launch.log_level:
        said += ["--log-level", launch.log_level]
    return said + list(launch.serve_args)


def body(model: str, prompt: str, osl: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": osl, "stream": True, "generation_config": _GENERATION}


# `serve` has no quantised cache; its library has (`QuantizedCache`, `src/transformers/cache_utils.py`), by these back ends. Their errors on
# SmolLM2 differ by ten times at one number of bits, so the best of each is taken: HQQ has 8 bits, quanto 4.
PROBE = Probe(
    script="in_transformers.py",
    kv={
        "auto": {"backend": "half"},
        "fp8": {"backend": "fp8"},
        "int8": {"backend": "hqq", "bits": 8},
        "int4": {"backend": "quanto", "bits": 4},
    },
    weights={"auto": {}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"}},
    negative={"backend": "absmax", "bits": 2},
    needs={
        "kv_dtype=int8": ("hqq", "pip install hqq"),
        **dict.fromkeys(("kv_dtype=int4", "quantization=int8", "quantization=int4"), ("optimum.quanto", "pip install optimum-quanto")),
    },
    on={"cpu": {"dtype": "float32"}},  # in bfloat16 the order of the arithmetic alone diverges by half of what 8 bits do, and takes longer
)

TRANSFORMERS = Framework(
    name="transformers",
    argv=argv,
    body=body,
    needs=("torch", "transformers", "uvicorn", "fastapi", "openai"),
    cure="pip install 'pytest-kvcache[cpu]'",
    distributions=("transformers", "torch"),
    env={"TOKENIZERS_PARALLELISM": "false"},
    prepare=UNPACK_GGUF,
    flags=FLAGS,
    probe=PROBE,
    weight_dtypes=WEIGHT_DTYPES,
    quantizations=QUANTIZATIONS,
    unsupported=dict.fromkeys(READINGS, "transformers serve has no metrics page"),
    known_failures=(
        PORT_TAKEN,
        (r"No such option:? '?([^\s']+)", "this version of transformers does not know the option {0}"),
        (r"Missing dependencies for serving", "its serving extra is not installed: pip install 'transformers[serving]'"),
        OUT_OF_MEMORY,
        NO_MODEL,
    ),
    resolved=(
        ("attention_backend", r"Switching from \S+ to (\w+)\. If you need"),
        ("continuous_batching", r"\[Request received\] Model: .*, CB: (True|False)"),
    ),
    source="huggingface/transformers 5.24.0 src/transformers/cli/serve.py",
)

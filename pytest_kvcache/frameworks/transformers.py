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

from ..core.spec import Framework, Launch

# With a fixed greedy configuration the first request, which fixes the batching manager's settings, is like all others.
_GENERATION = json.dumps({"do_sample": False, "eos_token_id": -1})

CPU_MEMORY = 0.6  # what a server takes of a CPU's memory by itself (`resolve_max_memory_percent`, `continuous_batching/initialization.py`)

_UNPACK_GGUF = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig
source, target = sys.argv[1:]
folder, name = os.path.split(os.path.abspath(source))
config = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=config)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
"""


def argv(launch: Launch) -> list[str]:
    words = list(launch.command) or [launch.python, "-m", "transformers.cli.transformers", "serve"]
    words += [launch.model, "--continuous-batching", "--host", launch.host, "--port", str(launch.port)]
    words += ["--device", "cpu" if launch.device == "cpu" else "cuda"]
    words += ["--dtype", "bfloat16" if launch.arm.weight_dtype == "auto" else launch.arm.weight_dtype]
    if launch.arm.block_size is not None:
        words += ["--cb-block-size", str(launch.arm.block_size)]
    if launch.arm.memory_share < 1:
        words += ["--cb-max-memory-percent", f"{CPU_MEMORY * launch.arm.memory_share:.3g}"]
    return words + list(launch.serve_args)


def body(model: str, prompt: str, osl: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": osl, "stream": True, "generation_config": _GENERATION}


TRANSFORMERS = Framework(
    name="transformers",
    argv=argv,
    body=body,
    needs=("torch", "transformers", "uvicorn", "fastapi", "openai"),
    cure="pip install 'pytest-kvcache[cpu]'",
    distributions=("transformers", "torch"),
    env={"TOKENIZERS_PARALLELISM": "false"},
    prepare=_UNPACK_GGUF,
    weight_dtypes=("auto", "bfloat16", "float16", "float32"),
    known_failures=(
        (r"address already in use", "the port is taken"),
        (r"No such option:? '?([^\s']+)", "this version of transformers does not know the option {0}"),
        (r"Missing dependencies for serving", "its serving extra is not installed: pip install 'transformers[serving]'"),
        (r"DefaultCPUAllocator: can't allocate memory|OutOfMemoryError|std::bad_alloc", "out of memory"),
        (r"(?:Repository Not Found|LocalEntryNotFoundError|couldn't connect to)", "the model cannot be fetched from the hub"),
    ),
    resolved=(
        ("attention_backend", r"Switching from \S+ to (\w+)\. If you need"),
        ("continuous_batching", r"\[Request received\] Model: .*, CB: (True|False)"),
    ),
    source="huggingface/transformers 5.24.0 src/transformers/cli/serve.py",
)

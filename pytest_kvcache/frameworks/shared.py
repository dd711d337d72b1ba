"""What several adapters say alike."""

from __future__ import annotations

from typing import Any

# Python source for `Framework.prepare`: 16-bit safetensors from a GGUF file, for frameworks that serve no packed weights.
UNPACK_GGUF = """
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

GIB = 2**30

# Patterns of logs that mean the same whoever wrote them.
PORT_TAKEN = (r"address already in use", "the port is taken")
INVALID_CHOICE = (r"argument (--[\w-]+): invalid choice: ('[^']*')", "this version has no {1} for {0}")
NO_KV_MEMORY = "no memory is left for the KV cache: see what else uses the device"
UNKNOWN_ARGUMENT = (r"unrecognized arguments?: (\S+)", "this version does not know the argument {0}")
OUT_OF_MEMORY = (
    r"OutOfMemoryError: ([^\n]*)|(CUDA out of memory[^\n]*)|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|MemoryError",
    "out of memory",
)
NO_MODEL = (
    r"(?:Repository Not Found|LocalEntryNotFound|couldn't connect to|is not a valid model identifier)",
    "the model cannot be fetched from the hub",
)


def ignoring_eos(model: str, prompt: str, osl: int) -> dict[str, Any]:
    """A streamed completion of exactly `osl` tokens, greedy, with the tokens so far in every event."""
    return {
        "model": model, "prompt": prompt, "max_tokens": osl, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip

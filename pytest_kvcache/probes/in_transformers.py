"""Scores a text through the KV caches of Hugging Face transformers, in its own process: `DynamicCache` and `QuantizedCache`.

Read in transformers 5.24 (`src/transformers/cache_utils.py`): a quantised layer gives back the raw tensors of its first update and reads
its quantised ones on every later one, so only steps shorter than the window see the precision. `residual_length` is the step's: a longer
one would leave the newest tokens in 16 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from lockstep import Begin, main

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Stepwise:
    """A window through a cache that grows."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def logits(self, tokens: list[int]) -> Any:
        ids = torch.tensor([tokens], device=self.model.device)
        return self.model(ids, past_key_values=self.cache, use_cache=True).logits[0].float().cpu().numpy()

    def cache_bytes(self) -> int:
        return sum(tensor_bytes(layer.__dict__) for layer in self.cache.layers)


class OnePass:
    """The whole window at once; the head is applied step by step, so that the logits of one step are all there is."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.model, self.at = model, 0
        self.hidden = model.base_model(torch.tensor([tokens], device=model.device), use_cache=False).last_hidden_state[0]

    def logits(self, tokens: list[int]) -> Any:
        rows = self.hidden[self.at : self.at + len(tokens)]
        self.at += len(tokens)
        return self.model.get_output_embeddings()(rows).float().cpu().numpy()

    def cache_bytes(self) -> int:
        return 0


def tensor_bytes(found: Any) -> int:
    """Of all tensors in a layer's cache, however the back end nests them."""
    if isinstance(found, torch.Tensor):
        inner = [getattr(found, name) for name in getattr(found, "__tensor_flatten__", lambda: ([], None))()[0]]
        return sum(map(tensor_bytes, inner)) if inner else found.numel() * found.element_size()
    if isinstance(found, Mapping):
        return sum(map(tensor_bytes, found.values()))
    return sum(map(tensor_bytes, found)) if isinstance(found, list | tuple) else 0


def cache_of(arm: Mapping[str, Any], config: Any, step: int) -> Any:
    """A fresh cache as an arm asks for it: `backend` and `bits`, or neither for the model's own precision."""
    if "backend" not in arm:
        return transformers.DynamicCache(config=config)
    if arm["backend"] == "fp8":
        return transformers.QuantizedCache("fp8", config)
    return transformers.QuantizedCache(arm["backend"], config, nbits=arm["bits"], q_group_size=arm.get("group", 64), residual_length=step)


def begin_of(model: Any, arm: Mapping[str, Any], step: int) -> Begin:
    if arm.get("one_pass"):
        return lambda tokens: OnePass(model, tokens)
    return lambda tokens: Stepwise(model, cache_of(arm, model.config, step))


def arms(request: Mapping[str, Any]) -> tuple[dict[str, Begin], dict[str, Any]]:
    torch.set_grad_enabled(False)
    device = request.get("device", "cpu")
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=DTYPES[request.get("dtype", "bfloat16")])
        .to(device)
        .eval()
    )
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "attention": model.config._attn_implementation}
    return {name: begin_of(model, arm, request["step"]) for name, arm in request["arms"].items()}, about


if __name__ == "__main__":
    main(arms)

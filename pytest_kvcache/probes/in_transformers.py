"""Scores and continues texts through the KV caches of Hugging Face transformers, in its own process: `DynamicCache` and `QuantizedCache`.

Read in transformers 5.24 (`src/transformers/cache_utils.py`): a quantised layer gives back the raw tensors of its first update and reads
its quantised ones on every later one, so only steps shorter than the window see the precision. `residual_length` is the step's: a longer
one would leave the newest tokens in 16 bits.

An arm is empty (the model's own precision), `one_pass`, a `backend` (`quanto`, `hqq`, `fp8`, or `absmax`, which only simulates one), or a
`fault` (faults.py). `weights` of an arm, or of the request for all, are quantised after loading (narrow.py), on a copy of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import torch
import transformers
from asked import Vocabulary, main, tokens
from greedy import greedy, prompts_of
from lockstep import Begin, walk
from narrow import narrow
from one_pass import Fresh, OnePass

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}


class Stepwise:
    """A window through a cache that grows."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache

    def logits(self, tokens: list[int]) -> Any:
        ids = torch.tensor([tokens], device=self.model.device)
        return self.model(ids, past_key_values=self.cache, use_cache=True).logits[0].float().cpu().numpy()

    def cache_bytes(self) -> int:
        return sum(x.cache_bytes() if isinstance(x, faults.Altered) else tensor_bytes(x.__dict__) for x in self.cache.layers)


def tensor_bytes(found: Any) -> int:
    """Of all tensors in a layer's cache, however the back end nests them."""
    if isinstance(found, torch.Tensor):
        inner = [getattr(found, name) for name in getattr(found, "__tensor_flatten__", lambda: ([], None))()[0]]
        return sum(map(tensor_bytes, inner)) if inner else found.numel() * found.element_size()
    if isinstance(found, Mapping):
        return sum(map(tensor_bytes, found.values()))
    return sum(map(tensor_bytes, found)) if isinstance(found, list | tuple) else 0


def cache_of(arm: Mapping[str, Any], config: Any, step: int) -> Any:
    """A fresh cache as an arm asks for it: `backend` and `bits`, or neither for the model's own precision; `half` is that, but no more
    than 16 bits."""
    if "fault" in arm or arm.get("backend") == "absmax":
        return faults.cache_of(arm, config)
    if arm.get("backend") == "half" and config.dtype == torch.float32:
        return faults.halved(config)
    if arm.get("backend", "half") == "half":
        return transformers.DynamicCache(config=config)
    if arm["backend"] == "fp8":
        return transformers.QuantizedCache("fp8", config)
    return transformers.QuantizedCache(arm["backend"], config, nbits=arm["bits"], q_group_size=arm.get("group", 64), residual_length=step)


def begin_of(model: Any, arm: Mapping[str, Any], step: int) -> Begin:
    if arm.get("one_pass"):
        return lambda tokens: OnePass(model, tokens)
    if arm.get("fault") == "fresh":
        return lambda tokens: Fresh(model, len(tokens))
    return lambda tokens: Stepwise(model, cache_of(arm, model.config, step))


def loaded(request: Mapping[str, Any], weights: str | None) -> tuple[Any, str]:
    """A model of its own, and what quantised its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=DTYPES[request.get("dtype", "bfloat16")])
    model = model.to(request.get("device", "cpu")).eval()
    return model, f"{weights} by {narrow(model, weights)}" if weights else ""


def arms(request: Mapping[str, Any]) -> tuple[dict[str, Begin], dict[str, Any]]:
    """How each arm begins a window, and what to tell: the versions, `weights` of the arms whose are quantised, the arms whose cache is
    only `simulated`, and those with a `fault`."""
    torch.set_grad_enabled(False)
    asked = request["arms"]
    weights = {name: arm.get("weights") or request.get("weights") for name, arm in asked.items()}
    models = {kind: loaded(request, kind) for kind in dict.fromkeys(weights.values())}
    about = {
        **VERSIONS,
        "attention": next(iter(models.values()))[0].config._attn_implementation,
        "weights": {name: models[kind][1] for name, kind in weights.items() if kind},
        "simulated": [name for name, arm in asked.items() if arm.get("backend") == "absmax" and "fault" not in arm],
        "faults": {name: arm["fault"] for name, arm in asked.items() if "fault" in arm},
    }
    return {name: begin_of(models[weights[name]][0], arm, request["step"]) for name, arm in asked.items()}, about


def vocabulary_of(model: str) -> Vocabulary:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    try:
        ends = transformers.GenerationConfig.from_pretrained(model).eos_token_id  # what `generate` stops at
    except OSError:  # a folder without one
        ends = tokenizer.eos_token_id

    def encode(text: str) -> list[int]:
        # not verbose: a text is longer than the model's context, which is no news
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return Vocabulary(
        encode=encode, decode=decode, size=len(tokenizer), bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id,
        ends=ends if isinstance(ends, list) else [] if ends is None else [ends],
    )  # fmt: skip


def walked(request: Mapping[str, Any]) -> dict[str, Any]:
    begin, about = arms(request)
    found: dict[str, Any] = walk(request, begin)
    return found | {"told": found["told"] | about}


def continued(request: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = vocabulary_of(request["model"])
    prompts = prompts_of(request, vocabulary)
    begin, about = arms(request)
    found: dict[str, Any] = greedy(request, prompts, begin, vocabulary)
    return found | {"told": found["told"] | about}


if __name__ == "__main__":
    main({"walk": walked, "tokens": lambda asked: tokens(asked, vocabulary_of(asked["model"]), VERSIONS), "greedy": continued})

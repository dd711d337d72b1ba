"""Weights of a transformers model quantised after loading: by optimum-quanto where it is importable, else by torchao.

The head stays as it is, as in transformers' own quantisers (`modules_to_not_convert`): its error goes into every logit directly.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

INT8, INT4 = "int8", "int4"


def head_of(model: Any) -> str:
    """The head's name within the model."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def by_quanto(model: Any, weights: str) -> str:
    """In place, every linear layer, a scale for each row (8 bits) or each 128 of it (4 bits).

    The rounded values stay, widened once: quanto widens them in every forward (`optimum/quanto/tensor/weights/qbytes.py`, `qbits.py` of
    0.2.7), which on a CPU takes many times what the rest does and gives the same logits to the rounding of a sum.
    """
    quanto = importlib.import_module("optimum.quanto")
    quanto.quantize(model, weights={INT8: quanto.qint8, INT4: quanto.qint4}[weights], exclude=head_of(model))
    quanto.freeze(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, quanto.QLinear):
            plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            plain.weight, plain.bias = torch.nn.Parameter(module.weight.dequantize(), requires_grad=False), module.bias
            model.set_submodule(name, plain)
    return f"optimum-quanto {quanto.__version__}"


def by_torchao(model: Any, weights: str) -> str:
    """In place. 8 bits only: its layouts of 4 bits are of graphics cards."""
    torchao = importlib.import_module("torchao.quantization")
    if weights == INT4:
        raise SystemExit("weights int4: torchao's need a graphics card; install optimum-quanto")
    head = head_of(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda m, name: isinstance(m, torch.nn.Linear) and name != head)
    return f"torchao {importlib.import_module('torchao').__version__}"


BY: Mapping[str, Any] = {"optimum.quanto": by_quanto, "torchao": by_torchao}


def narrow(model: Any, weights: str) -> str:
    """What quantised the model's weights, in place. SystemExit for a precision that is none and where no library is there."""
    if weights not in (INT8, INT4):
        raise SystemExit(f"weights {weights!r}: {INT8} or {INT4}")
    for module, quantise in BY.items():
        if importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module):
            return str(quantise(model, weights))
    raise SystemExit(f"weights {weights}: neither optimum-quanto nor torchao is installed")

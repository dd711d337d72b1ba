"""Cases of kinds `metrics_page` and `metrics_pair` on the product: a server's page in the words of the cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pytest_kvcache.core.framework import Framework
from pytest_kvcache.core.readings import NO_DATA, NOT_EXPORTED, Readings, Series, grown, nothing, readings
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import TENSORRT_LLM
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM

from .catalogue import body, includes

# llama.cpp's own server has no adapter; `tools/server/README.md` of ggml-org/llama.cpp names its series. The last two series are those of older versions.
LLAMA_CPP = dataclasses.replace(
    TRANSFORMERS,
    name="llamacpp",
    unsupported={},
    readings={
        "running": (Series(name="llamacpp:requests_processing"),),
        "waiting": (Series(name="llamacpp:requests_deferred"),),
        "output": (Series(name="llamacpp:tokens_predicted_total"),),
        "input": (Series(name="llamacpp:prompt_tokens_total"),),
        "kv_usage": (Series(name="llamacpp:kv_cache_usage_ratio"),),
        "kv_used_tokens": (Series(name="llamacpp:kv_cache_tokens"),),
    },
)
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP, "tgi": TGI, "trtllm": TENSORRT_LLM, "transformers": TRANSFORMERS}
REASONS = {NOT_EXPORTED, NO_DATA}
AS_THEY_ARE = ("kv_usage", "kv_usage_max", "kv_used_tokens", "kv_capacity_tokens", "running", "waiting", "preemptions")
# How a field of `expected` is compared with what was found.
TESTS: dict[str, Callable[[Any, Any], bool]] = {"warnings": includes}


def engine(case: Mapping[str, Any]) -> Framework:
    """The adapter of a case's engine; AssertionError for one that this runner does not know."""
    name = case.get("engine", "vllm")
    assert name in ENGINES, f"this runner does not know the engine {name}"
    return ENGINES[name]


def page_of(case: Mapping[str, Any]) -> bytes:
    """The page of an answer; an answer that is an error needs none."""
    return body(case) if any(not name.endswith(".json") for name in case.get("files", ())) else b""


def read(case: Mapping[str, Any]) -> Readings:
    """What the product's core makes of the page."""
    framework, status = engine(case), case["http"]["status"]
    if status != 200:
        return nothing(f"http_{status}")
    return readings(page_of(case).decode(errors="replace"), framework.readings, framework.unsupported)


def figures(said: Readings) -> dict[str, Any]:
    """The fields of the cases; None for what does not exist."""
    values, usage = said.values, said.values.get("kv_usage")
    queries, hits = values.get("prefix_queries"), values.get("prefix_hits")
    return {name: values.get(name) for name in AS_THEY_ARE} | {
        "kv_usage_percent": None if usage is None else 100 * usage,
        "prefix_hit_rate": hits / queries if queries and hits is not None else None,
        "kv_unavailable_reason": _reason(said.absent.get("kv_usage")), "warnings": said.warnings,
    }  # fmt: skip


def _reason(said: str | None) -> str | None:
    """A framework's own sentence says why it exports none."""
    return said if said is None or said in REASONS or said.startswith("http_") else NOT_EXPORTED


def pair(case: Mapping[str, Any]) -> dict[str, Any]:
    """What two pages say of the time between them."""
    framework = engine(case)
    before, after = (readings(case[name], framework.readings, framework.unsupported) for name in ("before", "after"))
    deltas, why = grown(before.values, after.values, ("preemptions", "output"))
    return {
        "preemptions": deltas.get("preemptions"), "generation_tokens": deltas.get("output"),
        "unavailable_reason": next(iter(why.values()), None), "warnings": (*before.warnings, *after.warnings),
    }  # fmt: skip

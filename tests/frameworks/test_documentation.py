"""docs/frameworks.md says of every adapter what it can be told; the table is made here from the adapters themselves."""

from pathlib import Path

from pytest_kvcache import frameworks
from pytest_kvcache.core.checkpoints import FORMATS
from pytest_kvcache.core.flags import COMMON
from pytest_kvcache.core.readings import READINGS
from pytest_kvcache.core.spec import Arm

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
ORDER = ("transformers", "vllm", "llama_cpp", "sglang", "tensorrt_llm", "tgi")


def settings():
    full = Arm(
        kv_dtype="x", weight_dtype="x", quantization="x", block_size=1, kv_gib=1.0, max_requests=1, max_batched_tokens=1, prefix_cache=True,
        chunked_prefill=True, context=1, cpu_offload_gib=1.0, disk_offload_gib=1.0,
    )  # fmt: skip
    return list(full.asked())


def cell(flags, name):
    rows = flags.get(name, ())
    since = [r.since for r in rows]
    return "-" if not rows else "yes" if "" in since else f"from {min(since)} on"


def table():
    adapters = [frameworks.load(name) for name in ORDER]
    yield "| | " + " | ".join(ORDER) + " |"
    yield "|---" * (len(ORDER) + 1) + "|"
    for name in settings():
        yield f"| `{name}` | " + " | ".join(cell(a.flags, name) for a in adapters) + " |"
    weights = [", ".join(f"`{q}`" for q in [*a.quantizations, *(FORMATS if a.checkpoints else ())]) or "-" for a in adapters]
    yield "| weights of fewer bits, served | " + " | ".join(weights) + " |"
    for what, has in (("KV precisions", "kv"), ("weights made at load", "weights")):
        scored = [", ".join(f"`{k}`" for k in COMMON if a.probe and k in getattr(a.probe, has)) or "-" for a in adapters]
        yield f"| texts scored with {what} | " + " | ".join(scored) + " |"
    for name in READINGS:
        yield f"| reads `{name}` | " + " | ".join("yes" if name in a.readings else "-" for a in adapters) + " |"


def test_the_page_says_what_the_adapters_say():
    assert {*ORDER, "openai"} == set(frameworks.names())  # the last is told nothing: it runs already
    assert "\n".join(table()) in PAGE.read_text()

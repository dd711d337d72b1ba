"""The KV pool of SGLang from within: what runs in its scheduler's process, which alone has it. Needs SGLang's interpreter.

Read in sgl-project/sglang 0.5.10.post1, 0.5.16 and 0.5.23 (`python/sglang/srt/`): `Engine.run_scheduler_process_func` is what a subclass
may start in place of `run_scheduler_process` (`entrypoints/engine.py`; from 0.5.7 on); `Engine.collective_rpc` calls a method of the
scheduler by its name and waits for it (`managers/scheduler.py`, `handle_rpc_request`); a pool's tensors are lists in attributes whose
names have `buffer` in them, in pools within it for models that have several kinds of layers (`mem_cache/memory_pool.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's own scheduler, with two methods more."""
    from sglang.srt.managers import scheduler  # type: ignore[import-not-found]

    scheduler.Scheduler.probe_zero = zero
    scheduler.Scheduler.probe_tell = tell
    scheduler.run_scheduler_process(*args, **kwargs)


def quiet(*_: Any) -> None:
    """In place of what SGLang does where its scheduler has failed, and has said why: no line comes after that one."""
    os._exit(1)


def zero(self: Any) -> None:
    """Zeroes all that is cached in place, between two batches: what the radix tree has is found there as before, but is nothing."""
    found = storages(self.token_to_kv_pool_allocator.get_kvcache())
    for storage in found:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
    torch.get_device_module(found[0].device.type).synchronize()  # the next forward may run on another stream


def tell(self: Any, path: str) -> None:
    """Writes what the cache is made of as JSON; sizes in bytes and tokens. An answer of `collective_rpc` has no room for it."""
    pool = self.token_to_kv_pool_allocator.get_kvcache()
    told = {
        "attention": type(self.tp_worker.model_runner.attn_backend).__name__,
        "kv_dtype": str(pool.dtype).removeprefix("torch."),
        "kv_tokens": pool.size,
        "kv_bytes_per_token": sum(s.nbytes() for s in storages(pool)) / (pool.size + pool.page_size),  # one page more is for padding
    }
    Path(path).write_text(json.dumps(told), encoding="utf-8")


def storages(pool: Any) -> list[Any]:
    """Of a pool's tensors, each once. RuntimeError where it has none: nothing could be zeroed."""
    found = {s.data_ptr(): s for s in map(torch.Tensor.untyped_storage, tensors(pool))}
    if not found:
        raise RuntimeError(f"no tensors are known of a {type(pool).__name__}")
    return list(found.values())


def tensors(pool: Any) -> list[Any]:
    found = []
    for name, value in vars(pool).items():
        if "buffer" in name:
            found += [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
        elif hasattr(value, "get_key_buffer"):
            found += tensors(value)
    return found

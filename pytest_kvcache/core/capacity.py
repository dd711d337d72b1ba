"""What a server's KV cache holds against arithmetic, and what it did when it was filled. Pure.

A server tells how many tokens its pool holds and how many bytes it takes (`kv_tokens` and `kv_memory` of `Framework.resolved`); the
bytes of a token are the one by the other. What they should be follows from the model's own configuration and the precision that was
asked for (`core.kv_size`). What a server does not tell has a reason and is no figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .flags import unsupported
from .framework import Framework
from .kv_size import FORMATS, bytes_per_token, layers_of
from .metrics import SIZES
from .record import OK, RequestRecord
from .scenarios import Capacity
from .spec import Arm, json_hash

VERSION = 1  # of what a scenario's hash stands for
TOLD = ("kv_tokens", "kv_memory")  # names of `Framework.resolved`

LEAST_RATIO = 0.95  # of the bytes that arithmetic gives: no cache can be smaller, so below it one of the two is not of this server
ASKED_POOL = 0.02  # a pool that was asked for in GiB is as large as that
RANKS_DIFFER = 0.05  # pools of the ranks of one engine differ by less; others are several caches
ABOVE = 1.5  # times what the pool holds is asked for at once

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])i?B\b")  # those who write GB mean 2**30 too (SGLang's `mem_cache/memory_pool.py`)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# -- before it is measured ----------------------------------------------------------------------------------------------


def unsized(framework: Framework, scenario: Capacity, named: Iterable[str], *, beside: str = "") -> str:
    """Why the sizes of the arms that a test names cannot be measured on the framework, or `beside` an option; empty when they can."""
    if beside:
        return f"what a KV cache holds is read from a fresh server's own log, once; leave {beside} out"
    if missing := [name for name in TOLD if name not in dict(framework.resolved)]:
        what = " and ".join({"kv_tokens": "how many tokens its KV cache holds", "kv_memory": "how many bytes it takes"}[m] for m in missing)
        return f"{framework.name} does not tell {what}"
    why = {a.name: unsupported(framework, a) for a in scenario.arms}
    refused = [why[name] for name in named if why.get(name)] or (list(why.values()) if all(why.values()) else [])
    return refused[0] if refused else ""


def workload(scenario: Capacity) -> str:
    """What a stored number is of: what is asked of the cache."""
    return json_hash([VERSION, str(scenario)])


# -- what it should hold, and what it says ------------------------------------------------------------------------------


def format_of(framework: Framework, arm: Arm, resolved: Mapping[str, Any]) -> str:
    """The row of `kv_size.FORMATS` for what an arm asks for; empty where there is none. Another name of one word of the framework is as
    good (llama.cpp has a number for `int8`, which is that of `q8_0`)."""
    if arm.kv_dtype == "auto":
        said = resolved.get("dtype", "auto") if arm.weight_dtype == "auto" else arm.weight_dtype
        return str(said) if said in FORMATS else "auto"
    word = framework.kv_dtypes.get(arm.kv_dtype)
    names = [arm.kv_dtype, str(word), *(name for name, its in framework.kv_dtypes.items() if its == word)]
    return next((n for n in names if n in FORMATS), "")


def expected(config: Mapping[str, Any], form: str, tp: int = 1, longest: int | None = None) -> tuple[float | None, str]:
    """Bytes of a token on one GPU by the model's configuration, and the arithmetic in words; None with the reason where that is not known.

    Where some layers keep a window or a state, what a server counts as a token of its pool is its own affair.
    """
    text, layers = config.get("text_config") or config, layers_of(config)
    if layers is None:
        return None, "the model's configuration (config.json, or the head of its GGUF file) is not here, or does not tell its shape"
    if layers.full + layers.sliding < int(text["num_hidden_layers"]):
        return None, "some layers of the model keep a state of fixed size, which shares the pool"
    if layers.sliding and layers.window and not (longest and longest <= layers.window):
        return None, f"{layers.sliding} layers of the model keep {layers.window} tokens only, which shares of a pool differ in"
    if form not in FORMATS:
        return None, "the arithmetic of this precision is not known"
    heads = "one latent" if layers.latent else f"{layers.heads} KV heads"
    how = f"{layers.full + layers.sliding} layers x {heads} x ({layers.key} + {layers.value}) numbers, {form}" + (
        f", tp {tp}" if tp > 1 else ""
    )
    return bytes_per_token(layers, FORMATS[form], tp), how


def size(said: Any) -> float | None:
    """Bytes of what a server says: `22.50 MiB`, a number, `K size: 0.21 GB, V size: 0.21 GB`; of several ranks the smallest, which is what
    all can use. None where that is no one size."""
    if isinstance(said, bool) or not isinstance(said, int | str):
        return None
    if isinstance(said, int):
        return float(said) or None
    found = [_one_size(part) for part in said.split(" + ")]
    sizes = [s for s in found if s]
    if not sizes or len(sizes) < len(found) or max(sizes) > min(sizes) * (1 + RANKS_DIFFER):
        return None
    return min(sizes)


def _one_size(text: str) -> float:
    return float(text) if text.isdecimal() else sum(float(n) * _UNITS[unit] for n, unit in _SIZE.findall(text))


def pool(resolved: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Tokens and bytes of the pool as a server tells them, and why there is no figure of what it does not tell."""
    tokens, taken = resolved.get("kv_tokens"), size(resolved.get("kv_memory"))
    found: dict[str, float] = {}
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        found["kv_tokens"] = tokens
    if taken:
        found["kv_bytes"] = taken
    wanted = zip(TOLD, ("kv_tokens", "kv_bytes"), strict=True)
    lacking = [f"{name} ({resolved[name]!r} is no one number)" if name in resolved else name for name, its in wanted if its not in found]
    why = f"the server told no {' and no '.join(lacking)}"
    names = () if not lacking else SIZES if "kv_tokens" not in found else ("kv_bytes_per_token", "kv_size_ratio")
    return found, dict.fromkeys(names, why)


def blocks(resolved: Mapping[str, Any]) -> dict[str, int]:
    """Blocks of the pool and tokens of a block, where it has such and tells them."""
    return {name: n for name in ("kv_blocks", "block_size") if type(n := resolved.get(name)) is int and n > 0}


def asked_pool(arm: Arm, taken: float | None) -> str:
    """How a server's pool is not of the size that an arm asks for; empty when it is, or nothing is asked or told."""
    if arm.kv_gib is None or taken is None or abs(taken / (arm.kv_gib * 2**30) - 1) <= ASKED_POOL:
        return ""
    return f"kv_gib={arm.kv_gib:g} was not applied: the server's KV cache takes {taken / 2**30:.4g} GiB"


def taken_by(scenario: Capacity, block: int = 1) -> int:
    """Tokens of the pool that a request takes, in whole blocks."""
    return math.ceil((scenario.isl + scenario.osl) / block) * block


def fits(tokens: float, share: float, scenario: Capacity, block: int = 1) -> int:
    """How many requests take a share of a pool of so many tokens, in whole blocks."""
    return math.floor(share * tokens / taken_by(scenario, block))


def longest(resolved: Mapping[str, Any], tokens: float | None) -> tuple[int | None, str]:
    """The longest request that a server says it takes, in tokens of input and output; None with the reason where it is not known."""
    said = resolved.get("max_model_len")
    if type(said) is not int:
        return None, f"the server told no longest context ({said!r})" if said else "the server told no longest context"
    if tokens is None or tokens < said:
        return None, f"the pool is not known to hold a whole context of {said} tokens"
    return said, ""


# -- after: figures and what is wrong -----------------------------------------------------------------------------------


def figures(told: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an arm from `load["capacity"]`; what was not told is absent."""
    tokens, taken, by_arithmetic = told.get("kv_tokens"), told.get("kv_bytes"), told.get("expected_bytes_per_token")
    each = taken / tokens if tokens and taken else None
    found = {"kv_tokens": tokens, "kv_bytes_per_token": each, "kv_size_ratio": each / by_arithmetic if each and by_arithmetic else None}
    return {name: float(v) for name, v in found.items() if v}


def outcome(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What became of requests: how many, how many of them failed, and how the first of these did."""
    failed = [r for r in records if r.outcome != OK]
    return {"requests": len(records), "failed": len(failed)} | (
        {"first": f"{failed[0].outcome}: {failed[0].error[:200]}"} if failed else {}
    )


ANSWERED, REFUSED, HUNG, BROKE = "answered", "refused", "hung", "broke"  # what may become of a request that cannot fit


def problem(told: Mapping[str, Any]) -> str:
    """The first thing that an arm's cache did which none may; empty when there is nothing."""
    ratio = figures(told).get("kv_size_ratio")
    if wrong := told.get("not_asked_pool"):
        return str(wrong)
    if ratio is not None and ratio < LEAST_RATIO:
        return (
            f"the server tells {figures(told)['kv_bytes_per_token']:.6g} bytes a token, {ratio:.3g} of what {told['expected_by']} take:"
            " no cache can be smaller, so one of the two is not of this server"
        )
    return _of_blocks(told) or _of_batch(told) or _of_above(told) or _of_drain(told) or _of_longest(told)


def _of_blocks(told: Mapping[str, Any]) -> str:
    tokens, count, block = (told.get(name) for name in ("kv_tokens", "kv_blocks", "block_size"))
    if not (tokens and count and block) or tokens <= count * block:
        return ""
    return f"the server tells {tokens:.0f} tokens, but {count} blocks of {block} hold {count * block}"


def _of_batch(told: Mapping[str, Any]) -> str:
    batch = told.get("batch") or {}
    if not batch.get("preempted"):
        return ""
    return f"the server preempted {batch['preempted']:.0f} of {batch['requests']} requests at {batch['share']:.0%} of its pool; none may be"


def _of_above(told: Mapping[str, Any]) -> str:
    above = told.get("above") or {}
    if not above.get("failed"):
        return ""
    at_once = f"{above['requests']} requests at once ({above['share']:.0%} of its pool)"
    return f"{above['failed']} of {at_once} failed, where each should wait its turn; the first: {above['first']}"


def _of_drain(told: Mapping[str, Any]) -> str:
    drained = told.get("drained") or {}
    usage, before, running = (drained.get(name) for name in ("usage", "before", "running"))
    if running:
        return f"the server says that {running:.0f} requests run, {drained['seconds']:g} s after all had ended"
    if usage is not None and before is not None and usage > before + 1e-9:
        return f"{usage:.2%} of the pool was in use {drained['seconds']:g} s after all requests had ended, {before:.2%} before them"
    return ""


def _of_longest(told: Mapping[str, Any]) -> str:
    limit = told.get("longest") or {}
    if wrong := limit.get("short"):
        return f"a request of {limit['fits']} of its {limit['tokens']} tokens of context did not get them: {wrong}"
    if limit.get("failed"):
        return f"a request of {limit['fits']} of its {limit['tokens']} tokens of context failed: {limit['first']}"
    beyond = limit.get("beyond") or {"became": REFUSED}
    ends = {ANSWERED: "was answered as if it fitted", HUNG: "was not refused but hung", BROKE: "broke the connection"}
    if beyond["became"] == REFUSED and beyond.get("status", 400) < 500:
        return ""
    end = ends.get(beyond["became"], f"was refused by no clear error but HTTP {beyond.get('status')}")
    return f"a request of {beyond['tokens']} tokens, beyond its context of {limit['tokens']}, {end}: {beyond['words']}"

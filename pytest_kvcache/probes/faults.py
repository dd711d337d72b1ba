"""Caches of transformers that are wrong on purpose, and one that simulates a precision: what any judgement of quality must tell apart.

Needs torch and transformers only. In every one a step reads its own tokens as they are and all before them as they were kept, as
`QuantizedCache` does. Faults, by `fault` of an arm:

* `ignored`: asks for a precision (`backend`, `bits`) and gets the plain cache. Every figure is exactly the 16-bit one.
* `scale`: what is kept is `factor` (1.25) times too great; `of` is `keys`, `values` or both. A wrong scale of an 8-bit float cache.
* `zeros`: the KV head `head` (0) of every layer reads zeros. A head that was not copied, or lies on a lost rank.
* `twice`: values quantised twice, in groups of two sizes. A cache around an engine that quantises already.
* `fresh`: never read. Each step computes all before it anew, so no precision is seen whatever is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

Kept = Callable[[Any, str], Any]  # of states [batch, heads, tokens, width], and whether they are `keys` or `values`: what the cache keeps
WIDEST, GROUP = 8, 64


def absmax(states: Any, bits: int, group: int) -> Any:
    """As symmetric codes of `bits` bits with one 16-bit scale for each `group` elements of a head make them (2 bits: -1, 0 and 1)."""
    width, most = states.shape[-1], 2 ** (bits - 1) - 1
    groups = torch.nn.functional.pad(states.float(), (0, -width % group)).unflatten(-1, (-1, group))
    # As it would be stored: a scale in float32 would make the precision look better than it is.
    scales = (groups.abs().amax(-1, keepdim=True) / most).half().float()
    codes = (groups / scales.clamp(min=torch.finfo(torch.float16).tiny)).round().clamp(-most, most)
    return (codes * scales).flatten(-2)[..., :width].to(states.dtype)


class Altered(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """A layer that keeps what `kept` makes of its states. `bits` and `group`, where they are known, say what storing them would take."""

    keys: Any
    values: Any

    def __init__(self, kept: Kept, bits: int = 0, group: int = GROUP) -> None:
        super().__init__()
        self.kept, self.bits, self.group = kept, bits, group

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        read = torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)
        self.keys = torch.cat([self.keys, self.kept(key_states, "keys")], dim=-2)
        self.values = torch.cat([self.values, self.kept(value_states, "values")], dim=-2)
        return read

    def cache_bytes(self) -> int:
        """Of the codes and their scales, had they been stored; of the tensors where nothing was quantised."""
        states = [s for s in (self.keys, self.values) if s is not None and s.numel()]
        if not self.bits:
            return sum(s.numel() * s.element_size() for s in states)
        return sum(s.numel() // s.shape[-1] * (-(-s.shape[-1] * self.bits // 8) + 2 * -(-s.shape[-1] // self.group)) for s in states)


class Half(Altered):
    """A layer of 16 bits of a model that computes in 32."""

    def __init__(self) -> None:
        super().__init__(lambda states, _: states.half().to(states.dtype))

    def cache_bytes(self) -> int:
        return sum(2 * s.numel() for s in (self.keys, self.values) if s is not None)


def halved(config: Any) -> Any:
    """A fresh cache of 16 bits; layers with a window of their own stay as they are."""
    cache = transformers.DynamicCache(config=config)
    cache.layers = [Half() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _scaled(arm: Mapping[str, Any]) -> Kept:
    factor, of = arm.get("factor", 1.25), arm.get("of", "both")
    return lambda states, what: states * factor if of in ("both", what) else states


def _without_head(arm: Mapping[str, Any]) -> Kept:
    def kept(states: Any, what: str) -> Any:
        found = states.clone()
        found[:, arm.get("head", 0)] = 0
        return found

    return kept


def _twice(arm: Mapping[str, Any]) -> Kept:
    bits, group = arm.get("bits", 4), arm.get("group", GROUP)

    def kept(states: Any, what: str) -> Any:
        once = absmax(states, bits, group)
        # Of one grid a second time changes nothing: only other groups have other scales.
        return absmax(once, bits, group // 2) if what == "values" else once

    return kept


FAULTS: dict[str, Callable[[Mapping[str, Any]], Kept] | None] = {"ignored": None, "scale": _scaled, "zeros": _without_head, "twice": _twice}


def cache_of(arm: Mapping[str, Any], config: Any) -> Any:
    """A fresh cache of an arm with a `fault` of FAULTS, or of the `backend` `absmax`. SystemExit for one that does not exist and for a
    model that has other layers than those of full attention."""
    cache = transformers.DynamicCache(config=config)
    bits, group = arm.get("bits", WIDEST), arm.get("group", GROUP)
    if not 2 <= bits <= WIDEST or group < 2:
        raise SystemExit(f"absmax: 2 to {WIDEST} bits in groups of at least 2, not {bits} in {group}")
    if "fault" in arm and arm["fault"] not in FAULTS:
        raise SystemExit(f"no such fault: {arm['fault']!r}; there are fresh, {', '.join(FAULTS)}")
    if "fault" not in arm:
        layers = [Altered(lambda states, _: absmax(states, bits, group), bits, group) for _ in cache.layers]
    elif make := FAULTS[arm["fault"]]:
        layers = [Altered(make(arm)) for _ in cache.layers]
    else:
        return cache
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise SystemExit("absmax and faults: only for models whose layers all attend to everything")
    cache.layers = layers
    return cache

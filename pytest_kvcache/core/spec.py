"""What is asked: scenarios, gates, arms, models. Frozen values, known at collection."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROFILES = ("smoke", "ci", "full", "acceptance")


class SpecError(ValueError):
    """A declared value that cannot be right; the message is one line for the user."""


class UserError(Exception):
    """Something the user can cure; the message says where, what, and what to type next."""


def json_hash(value: Any) -> str:
    """A short SHA-256 of a JSON-plain value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


OTHER = "other"  # `Arm.build` of the build that `--kv-ab` names, and the ending of its arms' names
PLANNED = ("build", "memory_share")  # fields of an arm that only the plan sets


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One server configuration of a scenario. Fields left at their default are the framework's own choice.

    Of the cache: `kv_dtype`, `block_size` (tokens), `kv_gib` (its pool), `prefix_cache` on or off, `cpu_offload_gib` and
    `disk_offload_gib` (what a second tier may hold). Of the weights: `weight_dtype` and `quantization` (the
    method, `fp8`; or the kind of a checkpoint that the catalogue names, `w8a8`, `awq`, `gptq`). Of the
    batch: `max_requests` served at a time, `max_batched_tokens` of a step, `chunked_prefill` on or off. `context` is the longest request,
    in tokens. `build` is which of two builds of the framework serves it: the session's own (empty), or OTHER (`--kv-ab`). `memory_share`
    is what its server may take of the memory that it would take alone: servers that live side by side share it. The plan sets both.
    """

    name: str = "base"
    kv_dtype: str = "auto"
    weight_dtype: str = "auto"
    quantization: str = "auto"
    block_size: int | None = None
    kv_gib: float | None = None
    max_requests: int | None = None
    max_batched_tokens: int | None = None
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    context: int | None = None
    cpu_offload_gib: float | None = None
    disk_offload_gib: float | None = None
    build: str = ""
    memory_share: float = 1.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise SpecError(f"Arm: name={self.name!r} may hold letters, digits, '_', '.' and '-' only; it is part of every key")
        if self.name.endswith(f".{OTHER}") != (self.build == OTHER):
            raise SpecError(f"Arm: name={self.name!r}: the ending .{OTHER} is that of the other build of --kv-ab")

    def asked(self) -> dict[str, Any]:
        """What this arm itself asks of the server; part of the identity of every number measured on it."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("name", *PLANNED) and v not in (None, "auto")}


BASE = (Arm(),)


@dataclass(frozen=True)
class Gate:
    """What a test claims: `metric` is no worse than its baseline by more than `margin` (a fraction; None: the default).

    A change smaller than `floor`, in the metric's own unit, is no loss either, however large a fraction it is. `arm` claims it of
    one arm only. With `against`, another arm, no baseline is asked: the two are measured in turns, and `arm` is no worse than
    `against` by more than `margin`, or it is `at_least` so many times as good (1.2: 1.2 times the rate, or the time divided by it).
    With `limit` no baseline is asked either: a figure of a text (`kld.mean`, `top1`, ...) is no worse than that, in its own unit.
    """

    metric: str
    margin: float | None = None
    floor: float = 0.0
    arm: str | None = None
    against: str | None = None
    at_least: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 < self.margin < 1:
            raise SpecError(f"Gate({self.metric!r}): margin={self.margin!r} must lie between 0 and 1 (0.05 is 5 %)")
        if not 0 <= self.floor < math.inf:
            raise SpecError(f"Gate({self.metric!r}): floor={self.floor!r} must be 0 or a change in the metric's own unit")
        if self.against is not None and (self.arm is None or self.arm == self.against):
            raise SpecError(f"Gate({self.metric!r}): against={self.against!r} needs arm=NAME, the other arm that is claimed to be no worse")
        alone = self.margin is None and not self.floor and self.against is None and self.at_least is None
        if self.limit is not None and not (alone and 0 < self.limit < math.inf):
            raise SpecError(f"Gate({self.metric!r}): limit={self.limit!r} must be above 0, and stands alone or with arm")
        if self.at_least is None:
            return
        if self.against is None or self.margin is not None or self.floor:
            raise SpecError(f"Gate({self.metric!r}): at_least={self.at_least!r} goes with arm and against, and without margin or floor")
        if isinstance(self.at_least, bool) or not isinstance(self.at_least, (int, float)) or not 0.01 <= self.at_least <= 100:
            raise SpecError(f"Gate({self.metric!r}): at_least={self.at_least!r} must be a factor from 0.01 to 100 (1.2: a fifth better)")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A catalogue row: published figures of one card (or `cpu`), with the titles of their sources."""

    key: str
    label: str
    nvml_names: tuple[str, ...] = ()
    memory_gb: float | None = None
    bandwidth_gb_s: float | None = None
    bf16_tflops: float | None = None
    tdp_w: float | None = None
    source: str = ""

    @property
    def kind(self) -> str:
        return "cpu" if self.key == "cpu" else "gpu"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to serve: a catalogue row, or one made from a path or a hub id.

    `package` and `package_file` name a distribution that carries the weights; `path` is set once located. `parameters` are
    the weights that every decoded token is multiplied with (a tied embedding once, an input embedding of its own not). `config` is what
    its config.json says of its shape; a `dummy` has that shape, random weights, and the tokenizer of the embedded model. `checkpoints`
    are hub ids of its weights quantised beforehand, by the name that an arm asks for them with (`w8a8`, `awq`, `gptq`, `fp8`).
    """

    key: str
    hub_id: str | None = None
    path: str | None = None
    package: str | None = None
    package_file: str | None = None
    context: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    parameters: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    dummy: bool = False
    source: str = ""

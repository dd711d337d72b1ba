"""What is asked: scenarios, gates, arms, models. Frozen values, known at collection."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
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
    `disk_offload_gib` (what a second tier may hold). Of the weights: `weight_dtype` and `quantization` (the method: `fp8`, `awq`). Of the
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


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """What every kind of load declares. Every request has exactly `isl` input and `osl` output tokens.

    `requests` is the number measured in a run. `profile` is the smallest profile that includes the scenario, `device` the
    kind it is meant for (`cpu`, `gpu` or `any`); both only select and are no part of the identity.
    """

    isl: int
    osl: int
    requests: int | None = None
    seed: int = 0
    arms: tuple[Arm, ...] = BASE
    profile: str = field(default="ci", compare=False)
    device: str = field(default="any", compare=False)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("isl", "osl"):
            if not _whole(getattr(self, name)):
                raise SpecError(f"{kind}: {name}={getattr(self, name)!r} must be a whole number of at least 1")
        if self.requests is not None and not _whole(self.requests):
            raise SpecError(f"{kind}: requests={self.requests!r} must be a whole number of at least 1")
        if self.profile not in PROFILES:
            raise SpecError(f"{kind}: profile={self.profile!r} is none of {', '.join(PROFILES)}")
        if self.device not in ("any", "cpu", "gpu"):
            raise SpecError(f"{kind}: device={self.device!r} is none of any, cpu, gpu")
        names = [a.name for a in self.arms]
        if not names or len(set(names)) != len(names):
            raise SpecError(f"{kind}: arms need distinct names, got {names}")

    @property
    @abstractmethod
    def n_requests(self) -> int:
        """Requests measured in a run."""

    @abstractmethod
    def load_parts(self) -> list[str]:
        """What the id says of the load between the lengths and the number of requests."""

    def __str__(self) -> str:
        """The scenario's id: its fields that are not at their default, in a fixed order."""
        parts = [f"isl{self.isl}", f"osl{self.osl}", *self.load_parts()]
        if self.requests is not None:
            parts.append(f"n{self.requests}")
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    def applies_to(self, profile: str, device: str) -> bool:
        """Whether `profile` on a device of kind `device` (`cpu` or `gpu`) includes this scenario."""
        return self.device in ("any", device) and PROFILES.index(self.profile) <= PROFILES.index(profile)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class ClosedLoop(Scenario):
    """`concurrency` clients, each sending its next request when the last is answered.

    Default `requests`: eight rounds at concurrency 1, six rounds of all clients above, so that a CPU run lasts seconds.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if not _whole(self.concurrency):
            raise SpecError(f"ClosedLoop: concurrency={self.concurrency!r} must be a whole number of at least 1")
        Scenario.__post_init__(self)
        if self.requests is not None and self.requests < self.concurrency:
            raise SpecError(f"ClosedLoop: requests={self.requests} leaves some of {self.concurrency} clients idle")

    @property
    def n_requests(self) -> int:
        return self.requests or (8 if self.concurrency == 1 else 6 * self.concurrency)

    def load_parts(self) -> list[str]:
        return [f"c{self.concurrency}"]


ARRIVALS = ("poisson", "constant", "gamma")


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Scenario):
    """Requests arrive at `rate` a second whatever is still open, by a schedule fixed by the seed.

    `arrivals`: `poisson`, `constant`, or `gamma` gaps with a coefficient of variation of 1/sqrt(`burstiness`): below 1
    burstier than Poisson. Default `requests`: half a minute of them, at least 20. Every latency begins at the scheduled
    moment.
    """

    rate: float
    arrivals: str = "poisson"
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        Scenario.__post_init__(self)
        if not (isinstance(self.rate, (int, float)) and 0 < self.rate < 1e6):
            raise SpecError(f"OpenLoop: rate={self.rate!r} must be requests a second above 0")
        if self.arrivals not in ARRIVALS:
            raise SpecError(f"OpenLoop: arrivals={self.arrivals!r} is none of {', '.join(ARRIVALS)}")
        if not (isinstance(self.burstiness, (int, float)) and 0 < self.burstiness < 1e6):
            raise SpecError(f"OpenLoop: burstiness={self.burstiness!r} must be above 0 (1 is Poisson)")
        if self.burstiness != 1.0 and self.arrivals != "gamma":
            raise SpecError(f"OpenLoop: burstiness={self.burstiness!r} has no meaning for {self.arrivals} arrivals; use arrivals='gamma'")

    @property
    def n_requests(self) -> int:
        return self.requests or max(20, round(30 * self.rate))

    def load_parts(self) -> list[str]:
        parts = [f"r{self.rate:g}"]
        if self.arrivals != "poisson":
            parts.append(self.arrivals + (f"{self.burstiness:g}" if self.arrivals == "gamma" else ""))
        return parts


@dataclass(frozen=True)
class Gate:
    """What a test claims: `metric` is no worse than its baseline by more than `margin` (a fraction; None: the default).

    A change smaller than `floor`, in the metric's own unit, is no loss either, however large a fraction it is. `arm` claims it of
    one arm only. With `against`, another arm, no baseline is asked: the two are measured in turns, and `arm` is no worse than
    `against` by more than `margin`, or it is `at_least` so many times as good (1.2: 1.2 times the rate, or the time divided by it).
    """

    metric: str
    margin: float | None = None
    floor: float = 0.0
    arm: str | None = None
    against: str | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 < self.margin < 1:
            raise SpecError(f"Gate({self.metric!r}): margin={self.margin!r} must lie between 0 and 1 (0.05 is 5 %)")
        if not 0 <= self.floor < math.inf:
            raise SpecError(f"Gate({self.metric!r}): floor={self.floor!r} must be 0 or a change in the metric's own unit")
        if self.against is not None and (self.arm is None or self.arm == self.against):
            raise SpecError(f"Gate({self.metric!r}): against={self.against!r} needs arm=NAME, the other arm that is claimed to be no worse")
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
    its config.json says of its shape; a `dummy` has that shape, random weights, and the tokenizer of the embedded model.
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
    dummy: bool = False
    source: str = ""

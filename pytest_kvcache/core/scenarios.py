"""What a test asks to be measured: loads and texts. Frozen values, known at collection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from .lengths import Length, is_length
from .schemes import Scheme
from .spec import BASE, PROFILES, Arm, SpecError

DEFAULT_SCHEME = Scheme(window=512, first=257, bos=None, step=64)  # half of each window is context; every step reads back those before it


# One token a step, as decoding does it: engines decode by other kernels than those of a prefill.
DECODING = Scheme(window=256, first=129, bos=None, step=1)


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """What a test asks to be measured. `profile` is the smallest profile that includes the scenario, `device` the kind it is meant for
    (`cpu`, `gpu` or `any`); both only select and are no part of the identity."""

    arms: tuple[Arm, ...] = BASE
    profile: str = field(default="ci", compare=False)
    device: str = field(default="any", compare=False)

    def __post_init__(self) -> None:
        kind = type(self).__name__
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
        """How many samples a run has: requests, or windows of a text."""

    @abstractmethod
    def __str__(self) -> str:
        """The scenario's id, part of every key: its fields that are not at their default, in a fixed order."""

    def applies_to(self, profile: str, device: str) -> bool:
        """Whether `profile` on a device of kind `device` (`cpu` or `gpu`) includes this scenario."""
        return self.device in ("any", device) and PROFILES.index(self.profile) <= PROFILES.index(profile)


@dataclass(frozen=True, kw_only=True)
class Traffic(Scenario):
    """Requests of exactly `isl` input and `osl` output tokens each, or of as many as are drawn for each (`Uniform`, `LogNormal`,
    `Empirical`); `requests` is the number measured in a run."""

    isl: Length
    osl: Length
    requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("isl", "osl"):
            if not is_length(getattr(self, name)):
                what = "a whole number of at least 1, or Uniform, LogNormal or Empirical"
                raise SpecError(f"{kind}: {name}={getattr(self, name)!r} must be {what}")
        if self.requests is not None and not _whole(self.requests):
            raise SpecError(f"{kind}: requests={self.requests!r} must be a whole number of at least 1")
        Scenario.__post_init__(self)

    @abstractmethod
    def load_parts(self) -> list[str]:
        """What the id says of the load between the lengths and the number of requests."""

    def __str__(self) -> str:
        parts = [f"isl{self.isl}", f"osl{self.osl}", *self.load_parts()]
        if self.requests is not None:
            parts.append(f"n{self.requests}")
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class ClosedLoop(Traffic):
    """`concurrency` clients, each sending its next request when the last is answered.

    Default `requests`: eight rounds at concurrency 1, six rounds of all clients above, so that a CPU run lasts seconds.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if not _whole(self.concurrency):
            raise SpecError(f"ClosedLoop: concurrency={self.concurrency!r} must be a whole number of at least 1")
        Traffic.__post_init__(self)
        if self.requests is not None and self.requests < self.concurrency:
            raise SpecError(f"ClosedLoop: requests={self.requests} leaves some of {self.concurrency} clients idle")

    @property
    def n_requests(self) -> int:
        return self.requests or (8 if self.concurrency == 1 else 6 * self.concurrency)

    def load_parts(self) -> list[str]:
        return [f"c{self.concurrency}"]


ARRIVALS = ("poisson", "constant", "gamma")


@dataclass(frozen=True, kw_only=True)
class OpenLoop(Traffic):
    """Requests arrive at `rate` a second whatever is still open, by a schedule fixed by the seed.

    `arrivals`: `poisson`, `constant`, or `gamma` gaps with a coefficient of variation of 1/sqrt(`burstiness`): below 1
    burstier than Poisson. Default `requests`: half a minute of them, at least 20. Every latency begins at the scheduled
    moment.
    """

    rate: float
    arrivals: str = "poisson"
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        Traffic.__post_init__(self)
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


@dataclass(frozen=True, kw_only=True)
class Text(Scenario):
    """Windows of a text (`--kv-corpus`), scored through the cache of each arm side by side, token by token against `reference`, the arm
    of 16 bits. Each window begins with an empty cache; fewer are scored where the text is shorter, which its hash tells.

    Beside it each arm goes on writing from a fixed set of prompts (`answer_tokens` each; 0: none), and does `tasks` short tasks of each
    kind: these are shown, but for garbage, which makes an arm invalid. Measured inside the engine's interpreter, once: the same text gives
    the same figures.
    """

    windows: int = 8
    scheme: Scheme = DEFAULT_SCHEME
    reference: str = "fp16"
    answer_tokens: int = 32
    tasks: int = 0

    def __post_init__(self) -> None:
        Scenario.__post_init__(self)
        if not _whole(self.windows):
            raise SpecError(f"Text: windows={self.windows!r} must be a whole number of at least 1")
        if self.tasks and not self.answer_tokens:
            raise SpecError(f"Text: tasks={self.tasks!r} are done beside the answers; leave answer_tokens above 0")
        if self.reference not in (a.name for a in self.arms):
            raise SpecError(f"Text: reference={self.reference!r} is none of its arms {[a.name for a in self.arms]}")

    @property
    def n_requests(self) -> int:
        return self.windows

    def __str__(self) -> str:
        return f"text-{self.scheme}-n{self.windows}" + (f"-tasks{self.tasks}" if self.tasks else "")


@dataclass(frozen=True, kw_only=True)
class Capacity(Scenario):
    """What the KV cache of each arm holds, told by a fresh server and held against the arithmetic of the model's own configuration.

    Then as many requests of `isl` and `osl` tokens at once as fill the share `fill` of it, at least one: none may be preempted, and all
    that was taken must be free again afterwards. With a fill above 0 also half as many again as it holds, all of which must be answered. A
    request of the longest context is answered, one that is longer is refused. No speed is measured: one run decides.
    """

    isl: int
    osl: int
    fill: float = 0.9

    def __post_init__(self) -> None:
        Scenario.__post_init__(self)
        for name in ("isl", "osl"):
            if not _whole(getattr(self, name)):
                raise SpecError(f"Capacity: {name}={getattr(self, name)!r} must be a whole number of at least 1")
        if isinstance(self.fill, bool) or not isinstance(self.fill, (int, float)) or not 0 <= self.fill < 1:
            raise SpecError(f"Capacity: fill={self.fill!r} must be a share of the pool from 0 to below 1")

    @property
    def n_requests(self) -> int:
        return 1

    def __str__(self) -> str:
        return f"capacity-isl{self.isl}-osl{self.osl}" + ("" if self.fill == 0.9 else f"-fill{self.fill:g}")

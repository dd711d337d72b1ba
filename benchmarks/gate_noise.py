"""Made-up sessions of gates: what two runs of one build differ by, as the simulation of the gate draws it.

All is in natural logs of a run's figure, oriented so that + is worse. A run is its build's true level, plus the shift of its session
(one part common to all gates, one of each gate's own), plus a straight drift within the session, plus its restart's own noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]

BASE_SESSIONS, BASE_RUNS = 5, 2  # a full baseline on a GPU: 5 sessions of 2 restarts
BLOCK = 30  # gates that share their server starts


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations of logs, so 0.02 is 2 %.

    `cv` is the median over the gates of the restart noise's sd; the gates' own are log-normal about it with sd `spread` of the log,
    cut off at `least` and `most`. `drift` is the change from the first to the last run of a session, up or down by chance.
    `shared` is the share of the restart variance that the gates of a block have in common.
    """

    cv: float
    spread: float = 0.4
    least: float = 0.005
    most: float = 0.05
    restart: str = "t4"
    common_sd: float = 0.003
    own_sd: float = 0.004
    drift: float = 0.005
    shared: float = 0.0


def gate_cvs(rng: np.random.Generator, noise: Noise, gates: int) -> Logs:
    """The restart sd of each gate, shape (gates,)."""
    return np.clip(noise.cv * np.exp(noise.spread * rng.standard_normal(gates)), noise.least, noise.most)


def restarts(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Logs:
    """Restart noise of sd 1: `normal`, or `t4`, Student's t with 4 degrees of freedom (variance 2), whose tails are heavy."""
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "t4":
        return rng.standard_t(4, shape) / math.sqrt(2)
    raise ValueError(f"restart noise {kind!r}: known are normal, t4")


def sessions(rng: np.random.Generator, noise: Noise, cvs: Logs, count: int, runs: int) -> Logs:
    """`count` sessions of `runs` runs each of one build, shape (gates, count, runs)."""
    gates = len(cvs)
    starts = restarts(rng, noise.restart, (gates, count, runs))
    if noise.shared:
        of_block = restarts(rng, noise.restart, (-(-gates // BLOCK), count, runs)).repeat(BLOCK, axis=0)[:gates]
        starts = math.sqrt(1 - noise.shared) * starts + math.sqrt(noise.shared) * of_block
    shift = noise.common_sd * rng.standard_normal((1, count, 1)) + noise.own_sd * rng.standard_normal((gates, count, 1))
    direction = rng.choice([-1.0, 1.0], (gates, count, 1))
    return cvs[:, None, None] * starts + shift + noise.drift * direction * np.linspace(-0.5, 0.5, runs)


def draw(seed: tuple[int, ...], noise: Noise, *, gates: int, runs: int) -> tuple[Logs, Logs]:
    """A baseline and a session of the same build: (gates, 5, 2) and (gates, runs). The same seed gives the same noise."""
    rng = np.random.default_rng(seed)
    cvs = gate_cvs(rng, noise, gates)
    return sessions(rng, noise, cvs, BASE_SESSIONS, BASE_RUNS), sessions(rng, noise, cvs, 1, runs)[:, 0]


def as_figures(logs: Logs, better: str, level: float = 100.0) -> Any:
    """What a run would have measured, as nested lists of floats: `level` at 0, and the worse the larger the log."""
    return (level * np.exp(logs if better == "lower" else -logs)).tolist()

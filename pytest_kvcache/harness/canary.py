"""A fixed small piece of work with no framework in it: how fast is the machine itself right now?

A neighbour on the same host takes speed without leaving a trace in /proc (shared caches, memory, the other half of a
core). The engine then looks slower, and so does this. It is timed in CPU time and pinned to one core after another, so
that a smaller share of the machine (a quota, fewer cores) does not change it: that is for the environment to name.
"""

from __future__ import annotations

import os
import threading
import time
from statistics import median

CORES = 4  # at most this many cores are tried
ROUNDS = 7


def canary_ms() -> float:
    """Milliseconds of CPU time for the fixed work, on the slowest of the cores tried."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(_slowest_core()))
    thread.start()  # in a thread of its own: pinning must not stick to the caller
    thread.join()
    return found[0]


def _slowest_core() -> float:
    import numpy as np

    small = np.linspace(0.1, 1.0, 60_000)  # stays in the cache: arithmetic
    large = np.ones(12_000_000)  # 96 MB, beyond the caches: memory
    cores = sorted(os.sched_getaffinity(0))[:CORES] if hasattr(os, "sched_setaffinity") else [-1]
    times = []
    for core in cores:
        if core >= 0:
            os.sched_setaffinity(0, {core})
        rounds = []
        for _ in range(ROUNDS):
            began = time.thread_time_ns()
            for _ in range(6):
                np.exp(small)
            for _ in range(2):
                np.add(large, 1.0, out=large)
            rounds.append((time.thread_time_ns() - began) / 1e6)
        times.append(median(rounds))
    return max(times)

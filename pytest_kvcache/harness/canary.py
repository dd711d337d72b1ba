"""A fixed small piece of work with no framework in it: in what state is the machine itself right now?

A host moves the cores of a virtual machine about: as two threads of one core, or next to a busy neighbour, they get
less memory bandwidth. Nothing in /proc tells (no steal, no other process), one thread alone does not feel it, and the
engine is 20 % slower for half a minute (seen). So the work runs on all cores at once. It is timed in CPU time: a quota
does not change it, that is for the environment to name.
"""

from __future__ import annotations

import os
import threading
import time
from statistics import fmean, median

MOST_CORES = 16
ROUNDS = 7
ELEMENTS = 8_000_000  # 64 MB a core, beyond its share of the caches


def canary() -> dict[str, float]:
    """`ms`: CPU time of the fixed work, mean over the cores that did it together; `cores`: how many they were."""
    cores = sorted(os.sched_getaffinity(0))[:MOST_CORES] if hasattr(os, "sched_getaffinity") else [-1]
    found: list[float] = []
    together = threading.Barrier(len(cores))
    # Threads of their own: pinning must not stick to the caller. numpy lets go of the interpreter's lock meanwhile.
    threads = [threading.Thread(target=lambda c=core: found.append(_work(c, together))) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"ms": round(fmean(found), 4), "cores": len(cores)}


def _work(core: int, together: threading.Barrier) -> float:
    import numpy as np

    if core >= 0:
        os.sched_setaffinity(0, {core})
    array, rounds = np.ones(ELEMENTS), []
    together.wait()
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        np.add(array, 1.0, out=array)
        rounds.append((time.thread_time_ns() - began) / 1e6)
    return median(rounds)

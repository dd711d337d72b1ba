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
from typing import Any

MOST_CORES = 16
ROUNDS = 7
ELEMENTS = 8_000_000  # 64 MB a core, beyond its share of the caches


def canary() -> dict[str, Any] | None:
    """CPU time of the fixed work, mean over the cores that did it together; see `core.canary`.

    None where the cores cannot be had (no memory for the arrays, no leave to pin).
    """
    cores = sorted(os.sched_getaffinity(0))[:MOST_CORES] if hasattr(os, "sched_getaffinity") else [-1]
    found: list[float] = []
    together = threading.Barrier(len(cores))
    # Threads of their own: pinning must not stick to the caller. numpy lets go of the interpreter's lock meanwhile.
    threads = [threading.Thread(target=_work, args=(core, together, found)) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"on": f"{len(cores)} cores", "ms": {"memory": round(fmean(found), 4)}} if len(found) == len(cores) else None


def _work(core: int, together: threading.Barrier, found: list[float]) -> None:
    import numpy as np

    rounds = []
    try:
        if core >= 0:
            os.sched_setaffinity(0, {core})
        array = np.ones(ELEMENTS)
        together.wait(timeout=30)
    except (OSError, MemoryError, threading.BrokenBarrierError):
        together.abort()  # nobody may wait for this core
        return
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        np.add(array, 1.0, out=array)
        rounds.append((time.thread_time_ns() - began) / 1e6)
    found.append(median(rounds))

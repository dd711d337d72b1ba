"""Who holds a GPU's memory, and waiting until a stopped server has given its own back: processes are gone before their memory is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..core.spec import UserError
from .nvml import gpus_in_use, opened

SLACK_BYTES = 256 * 2**20
LIMIT_S = 60.0
SAY_AFTER_S = 5.0
POLL_S = 0.2
MIB = 2**20


def handles_of(nvml: Any, env: Mapping[str, str], count: int | None = None) -> list[Any]:
    """Of the cards or the slice that a server with this environment is given; of those the first `count`, which it uses."""
    found = []
    for device in gpus_in_use(env)[:count]:
        with suppress(nvml.NVMLError):
            found.append(nvml.nvmlDeviceGetHandleByUUID(device.get("mig_uuid") or device.get("uuid")))
    return found


def used_bytes(env: Mapping[str, str], count: int | None = None) -> int | None:
    """Memory in use on the GPUs of a server with this environment; None where that cannot be read (memory shared with the host, say)."""
    try:
        with opened() as nvml:
            try:
                return sum(int(nvml.nvmlDeviceGetMemoryInfo(h).used) for h in handles_of(nvml, env, count)) or None
            except nvml.NVMLError:
                return None
    except (UserError, AttributeError):
        return None


def users(env: Mapping[str, str], count: int | None = None) -> list[str]:
    """`pid 4711 (python3) 3000 MiB` of the processes that hold memory on these GPUs, the largest first; empty where none can be seen."""
    import psutil

    found: dict[int, int] = {}
    try:
        with opened() as nvml:
            for handle in handles_of(nvml, env, count):
                with suppress(nvml.NVMLError):
                    for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                        found[one.pid] = found.get(one.pid, 0) + int(one.usedGpuMemory or 0)
    except (UserError, AttributeError):
        return []
    told = []
    for pid, used in sorted(found.items(), key=lambda item: -item[1]):
        name = "of another container"  # its pid means nothing here
        with suppress(psutil.Error):
            name = psutil.Process(pid).name()
        told.append(f"pid {pid} ({name})" + (f" {used // MIB} MiB" if used else ""))
    return told


@contextmanager
def given_back(env: Mapping[str, str], say: Callable[[str], None], count: int | None = None) -> Iterator[None]:
    """Leaves when no more of the GPUs' memory is in use than when it was entered, or says what still is after a minute."""
    before = used_bytes(env, count)
    try:
        yield
    finally:
        if before is not None:
            _wait(env, before, say, count)


def _wait(env: Mapping[str, str], before: int, say: Callable[[str], None], count: int | None) -> None:
    began, told = time.monotonic(), False
    while (now := used_bytes(env, count)) is not None and now > before + SLACK_BYTES:
        waited = time.monotonic() - began
        if waited > LIMIT_S:
            held = ", ".join(users(env, count)) or "no process that can be seen"
            say(f"  the GPU still has {(now - before) // MIB} MiB more in use than before the start, {waited:.0f} s after the stop: {held}")
            return
        if waited > SAY_AFTER_S and not told:
            say(f"  waiting for the GPU's memory to be free again, at most {LIMIT_S:.0f} s")
            told = True
        time.sleep(POLL_S)

"""A GPU while it is measured on: whether it was slowed, and who else computes on it. Reads several times a second, from another thread.

Functions, bits and units as in the NVML API reference ("Device Queries", `nvmlClocksEventReasons`, `nvmlProcessUtilizationSample_t`) and in
nvidia-ml-py, whose older versions say "throttle" for "event". What cannot be read is absent and never 0.

In a container NVML may tell the host's pids, which mean nothing here. Another's is therefore a process that was on the card before the
server was started, and one of this machine's that has the driver open and is not ours; any other pid is taken for one of ours.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from .gpu_memory import MIB, handles_of
from .nvml import opened

INTERVAL_S = 0.2
OTHERS_EVERY = 5  # readings; who else is there changes more slowly, and costs more to ask
SLOWED = {"power cap": 0x4, "hardware slowdown": 0x8, "heat": 0x20 | 0x40, "power brake": 0x80}


@dataclass(kw_only=True)
class Cards:
    """The cards (or the slice) of a server, open for readings. `before` are the processes that were there before it."""

    nvml: Any
    handles: list[Any]
    before: Set[int] = field(default_factory=frozenset)

    def reasons(self) -> list[int]:
        """Why the clocks are not at their highest, bits of each card that says so."""
        found = []
        for handle in self.handles:
            for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
                with suppress(self.nvml.NVMLError, AttributeError):
                    found.append(int(getattr(self.nvml, name)(handle)))
                    break
        return found

    def processes(self) -> dict[int, int]:
        """Bytes of each process that computes, or could, by its pid."""
        found: Counter[int] = Counter()
        for handle in self.handles:
            with suppress(self.nvml.NVMLError, AttributeError):
                for one in self.nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[one.pid] += int(one.usedGpuMemory or 0)
        return dict(found)

    def busy(self, since_us: int) -> dict[int, int] | None:
        """The share of the multiprocessors, in percent, that each process used lately; None where that cannot be read."""
        found: Counter[int] = Counter()
        for handle in self.handles:
            try:
                for one in self.nvml.nvmlDeviceGetProcessUtilization(handle, since_us):
                    found[one.pid] = max(found[one.pid], int(one.smUtil))
            except (self.nvml.NVMLError, AttributeError) as e:
                if type(e).__name__ != "NVMLError_NotFound":  # nobody computed
                    return None
        return dict(found)


@contextmanager
def cards(env: Mapping[str, str], count: int | None = None) -> Iterator[Cards]:
    """The cards of a server with this environment, of which it uses the first `count`, and who is on them now; UserError where there are
    none."""
    with opened() as nvml:
        found = Cards(nvml=nvml, handles=handles_of(nvml, env, count))
        found.before = frozenset(found.processes())
        yield found


class GpuWatch:
    """Watches cards over a window; afterwards `seen` has what `core.validity` looks at: the number of `readings` and in which share of them
    each reason had `slowed` a card, and the `foreign` processes with the share of the multiprocessors (percent) that they used on average.
    `own` gives the pids that are ours."""

    def __init__(self, cards: Cards, own: Callable[[], Set[int]] = frozenset) -> None:
        self.seen: dict[str, Any] = {}
        self._cards, self._own = cards, own
        self._readings, self._slowed, self._rounds = 0, Counter[str](), 0
        self._held: dict[int, int] = {}
        self._busy: dict[int, int] | None = {}
        self._since = int(time.time() * 1e6)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kv-gpu-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._look_at_others()
        self.seen = {
            "readings": self._readings, "slowed": {name: round(n / self._readings, 4) for name, n in self._slowed.items()},
            "foreign": [self._told(pid, used) for pid, used in sorted(self._held.items(), key=lambda item: -item[1])],
        }  # fmt: skip

    def _watch(self) -> None:
        n = 0
        while True:
            for bits in self._cards.reasons():
                self._readings += 1
                self._slowed.update(name for name, mask in SLOWED.items() if bits & mask)
            if self._stop.wait(INTERVAL_S):
                return
            n += 1
            if n % OTHERS_EVERY == 0:
                self._look_at_others()

    def _look_at_others(self) -> None:
        own, since = self._own(), self._since
        self._since, self._rounds = int(time.time() * 1e6), self._rounds + 1
        foreign = {pid: used for pid, used in self._cards.processes().items() if pid not in own and self._is_anothers(pid)}
        self._held |= foreign
        busy = self._cards.busy(since) if foreign else {}
        if busy is None or self._busy is None:
            self._busy = None
        else:
            self._busy = {pid: self._busy.get(pid, 0) + busy.get(pid, 0) for pid in self._held}

    def _is_anothers(self, pid: int) -> bool:
        return pid in self._cards.before or has_driver_open(pid)

    def _told(self, pid: int, used: int) -> dict[str, Any]:
        import psutil

        name = "of another container"
        with suppress(psutil.Error):
            name = psutil.Process(pid).name()
        percent = None if self._busy is None else round(self._busy.get(pid, 0) / self._rounds, 1)
        return {"pid": pid, "name": name, "percent": percent, "mib": used // MIB}


def has_driver_open(pid: int) -> bool:
    """Whether a process of this machine's table has a device of the driver open; True as well where that may not be looked at."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/dev/nvidia"):
                    return True
    except PermissionError:
        return True
    except OSError:  # there is no such process
        return False
    return False

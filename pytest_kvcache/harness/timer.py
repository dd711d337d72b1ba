"""Exact times of CLOCK_MONOTONIC: a file descriptor that becomes readable at one (Linux timerfd), and the wall clock in its terms."""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress


class Timer:
    """epoll's own time-out is rounded to milliseconds; this one is exact to the kernel's timers. Times in ns."""

    def __init__(self) -> None:
        import ctypes  # os.timerfd_create came with Python 3.13

        self._libc, self._armed = ctypes.CDLL(None, use_errno=True), 0
        clock_monotonic = 1
        self.fd: int = self._libc.timerfd_create(clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def at(self, ns: int) -> None:
        """Become readable at `ns`, at once if that is past."""
        if ns != self._armed:
            self._armed, absolute = ns, 1
            self._libc.timerfd_settime(self.fd, absolute, struct.pack("qqqq", 0, 0, ns // 10**9, ns % 10**9 or 1), None)

    def clear(self) -> None:
        self._armed = 0
        with suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


class WallClock:
    """Times of the wall clock, by which the kernel stamps, as times of CLOCK_MONOTONIC; it is slewed and may be set. All in ns.

    `steps` counts how often it was set: its offset had jumped by more than STEP between two looks.
    """

    EVERY, STEP = 20_000_000, 1_000_000

    def __init__(self) -> None:
        self.steps = 0
        self._offset, self._looked = offset(), time.perf_counter_ns()

    def monotonic(self, wall: int) -> int:
        return wall - self._offset

    def keep(self, at: int) -> None:
        """Look again if the last look is EVERY or more ago."""
        if at - self._looked > self.EVERY:
            self.look(at)

    def look(self, at: int) -> None:
        found = offset()
        self.steps += abs(found - self._offset) > self.STEP
        self._offset, self._looked = found, at


EXACT = 20_000


def offset() -> int:
    """Wall clock minus CLOCK_MONOTONIC in ns, to EXACT: taken anew when this process was held up between the two."""
    best, width = 0, 0
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if not width or after - before < width:
            best, width = wall - (before + after) // 2, after - before
        if width < EXACT:
            break
    return best

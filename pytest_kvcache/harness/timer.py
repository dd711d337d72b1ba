"""A file descriptor that becomes readable at an absolute time of CLOCK_MONOTONIC (Linux timerfd)."""

from __future__ import annotations

import os
import struct
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

"""Run as a script between pytest and an engine: when pytest is gone for whatever reason, so is the engine.

Its stdin is a pipe from pytest, which closes when pytest lets go of it or dies, even by SIGKILL. Then the engine gets
SIGTERM and a grace period, what outlives it SIGTERM and a moment, and everything below this process SIGKILL. As a subreaper
it keeps below it what fled into a session of its own or lost its parent. Standard library only: it runs with `python -I -S`.

    supervisor.py PID-OF-PYTEST GRACE-SECONDS ARGV...   prints the engine's pid, or one line that says why there is none
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NoReturn

LINGER_S = 3.0  # Python's resource tracker, for one, unlinks an engine's shared memory only once the engine is gone
KILL_S = 8.0  # a process in an uninterruptible sleep must not keep us for ever
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


def _prctl() -> Callable[[int, int], object]:
    """prctl(2), loaded before any fork; does nothing where there is none."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl  # noqa: B018  (raises where it is missing)
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


def descendants() -> list[int]:
    """All processes below this one, zombies too."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(pid))
    found = [os.getpid()]
    for known in found:
        found += children.get(known, ())
    return found[1:]


def send(number: int, pids: Iterable[int], how: Callable[[int, int], None] = os.kill) -> None:
    for pid in pids:
        with suppress(OSError):
            how(pid, number)


class Supervisor:
    def __init__(self, argv: list[str]) -> None:
        self.code: int | None = None
        self.wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        # A handler, not SIG_IGN, which the engine would inherit. SIGCHLD wakes the select below.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        me, prctl, null = os.getpid(), _prctl(), subprocess.DEVNULL
        prctl(SET_CHILD_SUBREAPER, 1)

        def before_exec() -> None:
            prctl(SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)

        # Kept alive: a Popen that is collected takes the exit code of a short-lived engine with it.
        self.engine = subprocess.Popen(argv, stdin=null, stdout=2, stderr=2, process_group=0, preexec_fn=before_exec)
        self.pid = self.engine.pid

    def wait(self, files: list[int], timeout: float) -> list[int]:
        """Waits for a file, a signal or the time; keeps the engine's exit code when it has ended."""
        ready = select.select([*files, self.wake], [], [], timeout)[0]
        if self.wake in ready:
            os.read(self.wake, 4096)
        self.reap()
        return ready

    def reap(self) -> None:
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self.code = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            pass

    def watch(self, parent: int, grace_s: float) -> None:
        """Until the engine ends or pytest is gone; a forked child of pytest may hold the pipe open, hence getppid."""
        while self.code is None and os.getppid() == parent:
            if 0 in self.wait([0], 1.0) and not os.read(0, 64):
                break
        end = time.monotonic() + grace_s
        if self.code is None:
            send(signal.SIGTERM, [self.pid], os.killpg)
        while self.code is None and time.monotonic() < end:
            self.wait([], max(0.0, end - time.monotonic()))

    def linger(self) -> None:
        """What the engine leaves below us may end by itself."""
        end, told = time.monotonic() + LINGER_S, False
        while (left := descendants()) and time.monotonic() < end:
            if not told:
                send(signal.SIGTERM, left)
                told = True
            self.wait([], 0.05)

    def kill(self) -> None:
        """Kills until nothing is left: while one is killed another may be born."""
        if not os.path.exists("/proc/self/stat"):
            return send(signal.SIGKILL, [self.pid], os.killpg)
        end = time.monotonic() + KILL_S
        while (left := descendants()) and time.monotonic() < end:
            send(signal.SIGKILL, left)
            time.sleep(0.02)
            self.reap()


def main(parent: int, grace_s: float, argv: list[str]) -> NoReturn:
    try:
        supervisor = Supervisor(argv)
    except (OSError, subprocess.SubprocessError) as e:
        print(f"cannot start {argv[0]}: {getattr(e, 'strerror', None) or e}", flush=True)
        sys.exit(127)
    try:
        print(supervisor.pid, flush=True)
        supervisor.watch(parent, grace_s)
        if supervisor.code is not None:
            supervisor.linger()
    finally:
        supervisor.kill()
    code = supervisor.code
    sys.exit(0 if code is None else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])

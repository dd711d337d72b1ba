"""The machine while it is measured on: one session at a time per device, and a watch over who else used the CPU."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pytest_kvcache.core import cgroup, cputime
from pytest_kvcache.core.commandline import masked_words
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.core.text import one_line

from .gpu_watch import Cards, GpuWatch

LOCK_DIR_ENV = "KV_LOCK_DIR"
REMIND_S, LIMIT_S = 60.0, 12 * 3600.0  # profile full takes a night
SAMPLE_COST_SHARE = 0.003
"""Share of one core that sampling may take: with thousands of processes samples become rarer, not dearer."""
LONGEST_COMMAND = 2**14  # characters of a command line that are looked at; far fewer are shown

_held: set[int] = set()


def lock_path(device: str) -> Path:
    """The lock file of a device (`cpu`, or the UUID of a GPU or of a MIG slice), the same for every user.

    Not below TMPDIR where there is a /tmp: CI runners give each job its own, and two jobs must exclude each other.
    """
    shared = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    directory = os.environ.get(LOCK_DIR_ENV) or os.path.join(shared, "pytest-kvcache-locks")
    return Path(directory) / (re.sub(r"[^A-Za-z0-9._-]+", "_", device) + ".lock")


@contextmanager
def lease(device: str, *, say: Callable[[str], None], poll_s: float = 0.5) -> Iterator[None]:
    """Hold `device` alone on this machine; waits for the present holder and says who it is. Ends with the process."""
    if sys.platform == "win32":
        raise UserError(f"device {device}: measuring needs a system with flock (Linux or macOS)")
    fd = _acquire(device, say, poll_s)
    try:
        _sign(fd)
        yield
    finally:
        # A forked child that unwinds through here owns no lock: its copy was closed, and the number may be reused.
        if fd in _held:
            _held.discard(fd)
            os.close(fd)


def _acquire(device: str, say: Callable[[str], None], poll_s: float) -> int:
    path = lock_path(device)
    _close_in_children()
    started = time.monotonic()
    next_word = started
    while True:
        fd = _open(path, device)
        try:
            while not _try_lock(fd, path, device):
                now = time.monotonic()
                if now >= next_word:
                    since = f" (for {now - started:.0f} s now, at most {LIMIT_S / 3600:g} h)" if next_word > started else ""
                    say(f"waiting for device {device}: {_holder(fd)} is measuring on it{since}")
                    next_word = now + REMIND_S
                if now - started > LIMIT_S:
                    raise UserError(
                        f"device {device}: {_holder(fd)} has been measuring on it for {LIMIT_S / 3600:g} h; this session gives up"
                    )
                time.sleep(poll_s)
            if _is_current(fd, path):
                _held.add(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@cache
def _close_in_children() -> None:
    """A forked child shares the lock; without this it would keep it after this process was killed."""

    def close_all() -> None:
        while _held:
            with suppress(OSError):
                os.close(_held.pop())

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close_all)


def _open(path: Path, device: str) -> int:
    """Open or create the lock file so that every user can, whatever the umask and whoever made it."""
    give_up = time.monotonic() + 0.5
    try:
        _make_directory(path.parent)
        while True:
            try:
                return _open_once(path)
            except (FileExistsError, FileNotFoundError, PermissionError):
                # Just now created or deleted by another, or created and not yet opened to all.
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)
    except OSError as e:
        raise _unusable(path, device, e) from e


def _open_once(path: Path) -> int:
    """One try. Never O_CREAT on an existing file: in a sticky directory Linux denies that for another's file."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | flags)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)  # enough for a lock; only the holder's name stays unwritten
    except FileNotFoundError:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
        os.fchmod(fd, 0o666)
        return fd


def _make_directory(directory: Path) -> None:
    """Create it open to all users, each able to delete only its own files; one that exists is left as it is."""
    with suppress(FileExistsError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
        directory.chmod(0o1777)


def _unusable(path: Path, device: str, error: OSError) -> UserError:
    return UserError(
        f"{path}: cannot be used as the lock of device {device} ({error.strerror}); "
        f"set {LOCK_DIR_ENV} to a local directory that every user of this machine may write"
    )


def _try_lock(fd: int, path: Path, device: str) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise _unusable(path, device, e) from e
    return True


def _is_current(fd: int, path: Path) -> bool:
    """Whether the locked file is still the one at `path`: a cleaner of temporary files may have removed it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(fd: int) -> None:
    """Write `pid<TAB>argv`, for those who wait."""
    program = Path(sys.argv[0] or "python")
    name = program.parent.name if program.name == "__main__.py" else program.name
    text = f"{os.getpid()}\t{shlex.join([name, *masked_words(sys.argv[1:])])[:300]}\n"
    with suppress(OSError):  # opened for reading only, or the disk is full: the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace"), 0)


def _holder(fd: int) -> str:
    text = ""
    for _ in range(5):  # the holder may be between locking and signing
        text = os.pread(fd, 4096, 0).decode(errors="replace")
        if text:
            break
        time.sleep(0.02)
    pid, _, argv = text.partition("\t")
    return f"pid {pid} ({one_line(' '.join(argv.split()))})" if pid.isdecimal() else "another process"


class LoadWatch:
    """Watches the CPUs over a measuring window; afterwards `seen` says who used them (`core.cputime.summarise`).

    Ours are this process and the pids that `own()` gives, with all their descendants; other children of this process
    count as foreign while they live. `own` is called about once a second, from another thread. `device` is the kind of device that is
    measured: what others may take depends on it; with its `cards` they are watched as well (`seen["gpu"]`, see `harness.gpu_watch`).
    """

    def __init__(
        self, own: Callable[[], Set[int]] = frozenset, *, interval_s: float = 1.0, device: str = "cpu", cards: Cards | None = None
    ) -> None:
        self.seen: dict[str, Any] = {}
        self._gpu = None if cards is None else GpuWatch(cards, own)
        self._told: dict[str, Any] = {} if device == "cpu" else {"device": device}
        self._own = own
        self._interval_s = interval_s
        self._ledger = cputime.Ledger(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kv-load-watch", daemon=True)
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        if self._gpu:
            self._gpu.__enter__()
        if _is_linux():
            self._sample()
            self._before = _machine()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._gpu:
            self._gpu.__exit__(kind, error, at)
            self._told = self._told | {"gpu": self._gpu.seen}
        if not _is_linux():
            self.seen = {**dict.fromkeys(cputime.FIGURES), "foreign": [], **self._told}
            return
        self._stop.set()
        self._thread.join()
        if self._error is None:
            self._sample()
            cores, hz = len(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
            self.seen = cputime.summarise(self._before, _machine(), self._ledger, cores=cores, hz=hz) | self._told
        elif kind is None:
            raise self._error

    def _watch(self) -> None:
        cost = 0.0
        try:
            while not self._stop.wait(max(self._interval_s, cost / SAMPLE_COST_SHARE)):
                before = time.thread_time()
                self._sample()
                cost = time.thread_time() - before
        except Exception as e:  # of the caller's own(); a silent watch would call its server foreign
            self._error = e

    def _sample(self) -> None:
        self._ledger.update(_processes(), self._own())
        for entry in self._ledger.unnamed():
            raw = _read(f"/proc/{entry.last.pid}/cmdline") or ""
            words = masked_words(raw[:LONGEST_COMMAND].rstrip("\0").split("\0"))  # of other people, who type passwords there
            entry.command = one_line(" ".join(" ".join(words).split()))[:80]
            entry.command_of = entry.last.name


def _is_linux() -> bool:
    return sys.platform.startswith("linux")


def _processes() -> Iterator[cputime.Stat]:
    """All visible processes. Plain system calls: a file object each would double the cost."""
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            try:
                stat = cputime.parse_stat(os.read(fd, 1024))
            finally:
                os.close(fd)
        except OSError:  # it has just ended
            continue
        if stat is not None:
            yield stat


def _machine() -> cputime.Machine:
    hz = os.sysconf("SC_CLK_TCK")
    busy, steal = cputime.parse_machine(_read("/proc/stat") or "", hz) or (None, None)
    psi = cputime.parse_pressure(_read("/proc/pressure/cpu") or "")
    throttled = cgroup.throttled_s(_read)
    return cputime.Machine(time.monotonic(), time.process_time(), busy, steal, psi, throttled)


def _read(path: str) -> str | None:
    """The text of a small kernel file, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None

"""--kv-restart: a command that ends in time or not at all, and a server that is seen to be gone and to come back."""

import itertools
import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import restart


def gone(pid):
    with suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    return True


def all_gone(file):
    pids, end = file.read_text().split(), time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return len(pids) == 2 and all(map(gone, pids))


@pytest.fixture
def two_that_stay(tmp_path):
    """A command that starts a process beside itself and then waits for another, and the file of their pids."""
    pids = tmp_path / "pids"
    return f"sleep 60 & echo $! >> {pids}; sleep 60 & echo $! >> {pids}; wait", pids


def test_its_code_and_its_last_line_are_told():
    assert restart.run("echo one; echo no such unit >&2; exit 5", 20) == (5, "no such unit")
    assert restart.run("true", 20) == (0, "")


def test_what_does_not_end_in_time_is_ended_with_all_that_it_started(two_that_stay):
    command, pids = two_that_stay
    with pytest.raises(UserError, match=r"--kv-restart: the command did not end within 0\.5 s and was stopped; .* kv_start_timeout$"):
        restart.run(command, 0.5)
    assert all_gone(pids)


def test_so_it_is_when_the_user_interrupts(two_that_stay):
    command, pids = two_that_stay

    def interrupt():
        end = time.monotonic() + 20
        while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            restart.run(command, 30)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert all_gone(pids)


def test_the_server_that_it_leaves_behind_lives_on(tmp_path):
    assert restart.run(f"sleep 60 & echo $! > {tmp_path / 'pid'}", 20)[0] == 0
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    os.kill(pid, signal.SIGKILL)


T, F, N = True, False, None


@pytest.mark.parametrize(("looks", "came_back"), [
    ((T, F, T), True), ((T, T, N, F, N, F, N, T), True), ((T, F, T, F), True),
    ((T,), False), ((T, F), False), ((N,), False), ((T, N, T), False), ((N, T), False), ((F,), False),
    ((F, F, T), True), ((F, N, T), True),  # it had ended before, and not for a moment only
    ((F, T), False), ((F, T, F), False), ((F, T, F, T), True), ((N, F, T), False), ((N, T, F, T), True),
])  # fmt: skip
def test_only_what_was_there_then_gone_and_there_again_came_back(monkeypatch, looks, came_back):
    """The last look stands for all that follow."""
    monkeypatch.setattr(restart, "LOOK_S", 0.001)
    monkeypatch.setattr(restart, "GONE_LOOK_S", 0.001)
    told, seen = itertools.chain(looks, itertools.repeat(looks[-1])), []

    def there():
        seen.append(next(told))
        return seen[-1]

    with restart.Watch(there) as watch:
        end = time.monotonic() + 10
        while len(seen) < len(looks) + 3 and not watch.came_back and time.monotonic() < end:
            time.sleep(0.001)
    assert watch.came_back is came_back


def test_the_last_look_comes_after_the_restart(monkeypatch):
    """A server that was seen to be gone is looked at once more when it has answered."""
    state = [True]
    with restart.Watch(lambda: state[-1]) as watch:
        state.append(False)
        end = time.monotonic() + 10
        while watch.seen != [True, False] and time.monotonic() < end:
            time.sleep(0.01)
        state.append(True)
    assert watch.came_back

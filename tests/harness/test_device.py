"""The lease and the load watch against real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pytest_kvcache.core import cputime
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.core.validity import load_problem
from pytest_kvcache.harness import device
from pytest_kvcache.harness.device import LoadWatch, lease

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

ROOT = Path(device.__file__).parents[2]
HOLD = """
import fcntl, os, sys
from pytest_kvcache.harness.device import lease
if "nobody" in sys.argv:
    os.setuid(65534)
with lease("cpu", say=lambda s: print(s, flush=True), poll_s=0.02):
    if "fork" in sys.argv and os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    print("held", flush=True)
    sys.stdin.readline()
"""
BURN = """
import os, time
try:
    os.nice(-10)  # so that it gets its core on a busy machine, too, where we may
except OSError:
    pass
while time.process_time() < {}: pass
"""
Holder = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(device.LOCK_DIR_ENV, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def holder(locks: Path) -> Iterator[Holder]:
    """Starts a process that takes the lease of `cpu`, says so, and keeps it until a line comes in."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLD, *args]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env, preexec_fn=hears_interrupts)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def hears_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 10)[0], "nothing said within 10 s"
    return process.stdout.readline().decode().strip()


def release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    assert process.wait(10) == 0


def test_second_process_waits_says_who_holds_it_and_gets_it(holder: Holder, locks: Path) -> None:
    first = holder("--kv-gpu=cpu")
    assert line(first) == "held"
    second = holder()
    assert line(second) == f"waiting for device cpu: pid {first.pid} (-c --kv-gpu=cpu) is measuring on it"
    assert (locks / "cpu.lock").read_text() == f"{first.pid}\t-c --kv-gpu=cpu\n"
    release(first)
    assert line(second) == "held"
    assert (locks / "cpu.lock").read_text().startswith(f"{second.pid}\t")


@pytest.mark.parametrize("args", [(), ("fork",)], ids=["alone", "forked child lives on"])
def test_the_lock_dies_with_a_killed_holder(holder: Holder, args: tuple[str, ...]) -> None:
    first = holder(*args)
    assert line(first) == "held"
    second = holder()
    assert line(second).startswith("waiting for device cpu: pid")
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    assert line(second) == "held"


def test_waiting_can_be_interrupted(holder: Holder) -> None:
    first, second = holder(), holder()
    waiting = second if line(first) == "held" else first
    if waiting is second:
        assert line(second).startswith("waiting")
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(10) != 0


def test_a_lock_file_deleted_meanwhile_is_made_anew(holder: Holder, locks: Path) -> None:
    first = holder()
    assert line(first) == "held"
    second = holder()
    assert line(second).startswith("waiting")
    (locks / "cpu.lock").unlink()
    release(first)
    assert line(second) == "held"
    assert line(holder()) == f"waiting for device cpu: pid {second.pid} (-c) is measuring on it"


def test_devices_are_independent_and_a_lease_ends_with_its_block(locks: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with lease("GPU-1f/0", say=said.append), lease("cpu", say=said.append):
            assert sorted(p.name for p in locks.iterdir()) == ["GPU-1f_0.lock", "cpu.lock"]
    with pytest.raises(ZeroDivisionError), lease("cpu", say=said.append):
        _ = 1 / 0
    with lease("cpu", say=said.append):
        assert said == []


def test_the_wait_is_told_again_only_after_a_while(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "REMIND_S", 0.2)
    monkeypatch.setattr(sys, "argv", ["/x/pytest/__main__.py", "-k", "a b"])
    said: list[str] = []

    class Enough(Exception):
        pass

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise Enough

    started = time.monotonic()
    with lease("cpu", say=say), pytest.raises(Enough), lease("cpu", say=say, poll_s=0.02):
        pass
    assert time.monotonic() - started >= 0.2
    assert said[0] == f"waiting for device cpu: pid {os.getpid()} (pytest -k 'a b') is measuring on it"
    assert said[1] == said[0] + " (for 0 s now, at most 12 h)"


def test_modes_do_not_depend_on_the_umask(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        with lease("cpu", say=print):
            assert locks.stat().st_mode & 0o7777 == 0o1777
            assert (locks / "cpu.lock").stat().st_mode & 0o7777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o666, 0o644])
def test_another_users_lock_file_can_be_locked(holder: Holder, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)
        monkeypatch.setenv(device.LOCK_DIR_ENV, f"{shared}/locks")
        with lease("cpu", say=print):
            os.chmod(f"{shared}/locks/cpu.lock", mode)
        other = holder("nobody")
        assert line(other) == "held"
        signed_by = Path(f"{shared}/locks/cpu.lock").read_text().partition("\t")[0]
        assert signed_by == str(other.pid if mode == 0o666 else os.getpid())


def test_who_waits_is_told_of_the_holder_in_one_plain_line(locks: Path) -> None:
    """Any user of the machine can write into the file."""

    class Enough(Exception):
        pass

    def say(text: str) -> None:
        said.append(text)
        raise Enough

    said: list[str] = []
    with lease("cpu", say=print):
        (locks / "cpu.lock").write_text("12\t\x1b[2Jx\r\npass  all\u202e")
        with pytest.raises(Enough), lease("cpu", say=say):
            pass
    assert said == [r"waiting for device cpu: pid 12 (\x1b[2Jx pass all\u202e) is measuring on it"]


def test_an_unusable_directory_is_the_users_to_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(device.LOCK_DIR_ENV, str(tmp_path / "file"))
    why = r"cpu\.lock: cannot be used as the lock of device cpu .*set KV_LOCK_DIR"
    with pytest.raises(UserError, match=why), lease("cpu", say=print):
        pass


@pytest.fixture
def burner() -> Iterator[Callable[[float], int]]:
    """Starts a process that keeps one core busy until it has used some seconds of it, and gives its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(seconds: float) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", BURN.format(seconds)]))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_foreign_command_line_is_shown_without_its_secrets_and_on_one_line() -> None:
    words = ["-u", "me:Zq9a", "--password=Zq9b", "--api-key", "Zq9c", "--x", "\x1b[31m\n"]
    process = subprocess.Popen([sys.executable, "-c", BURN.format(30), *words], executable=sys.executable)
    long = subprocess.Popen(["p", "-c", BURN.format(30), "--token=" + "Zq9" * 100, "x" * 100], executable=sys.executable)
    try:
        with LoadWatch(interval_s=0.1) as watch:
            time.sleep(1.0)
    finally:
        for p in (process, long):
            p.kill()
            p.wait()
    kept = {e.last.pid: e.command for e in watch._ledger.entries.values() if e.command}
    assert {process.pid, long.pid} <= set(kept)
    assert "Zq9" not in json.dumps(watch.seen) + str(load_problem(watch.seen)) + str(kept)
    assert all(text.isprintable() and len(text) <= 80 for text in kept.values())


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("mysql\0-uroot\0--password=Zq9\0", "mysql -uroot --password=***"),
        ("vllm serve m --api-key Zq9 --port 1\0\0\0\0", "vllm serve m --api-key *** --port 1"),  # it has set its own title
        ("sh\0-c\0PGPASSWORD=Zq9 psql -h x\0", "sh -c PGPASSWORD=***"),
        ("curl\0https://u:Zq9@h/?sig=Zq9\0", "curl https://***@h/?sig=***"),
        ("x\0" + "-a\0" * 20 + "--token=" + "Zq9" * 9 + "\0", ("x " + "-a " * 20 + "--token=***")[:80]),
        ("x\0\x1b]0;title\x07\0a\nb\0", r"x \x1b]0;title\x07 a b"),
        ("\0\0", ""),
        ("", ""),
    ],
)
def test_command_lines_as_they_are_kept(monkeypatch: pytest.MonkeyPatch, raw: str, shown: str) -> None:
    watch = LoadWatch()
    stat = cputime.Stat(pid=7, start=1, name="x", ppid=1, ticks=0, child_ticks=0)
    monkeypatch.setattr(device, "_read", lambda path: raw)
    for ticks in (0, 1000):
        monkeypatch.setattr(device, "_processes", lambda ticks=ticks: iter([stat._replace(ticks=ticks)]))
        watch._sample()
    (entry,) = watch._ledger.entries.values()
    assert entry.command == shown


def cpu_s(pid: int) -> float:
    """What another tool says; the burner's share of a core depends on what else runs here."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_a_foreign_burner_is_named_and_makes_the_window_invalid(burner: Callable[[float], int]) -> None:
    pid = burner(30)
    time.sleep(0.3)
    before = cpu_s(pid)
    with LoadWatch() as watch:
        time.sleep(2.5)
    used = cpu_s(pid) - before
    seen = watch.seen
    top = next(p for p in seen["foreign"] if p["pid"] == pid)
    assert (top["name"][:6], len(top["cmdline"])) == ("python", 80)
    assert 0.5 < top["cores"] < 1.2
    assert top["cores"] * seen["wall_s"] == pytest.approx(used, abs=0.1)
    assert seen["busy_cores"] >= seen["foreign_cores"] > 0.9 * top["cores"]
    assert max(seen["own_cores"], seen["client_cores"]) < 0.3
    assert seen["wall_s"] == pytest.approx(2.5, abs=0.5)
    assert seen["cores"] == len(os.sched_getaffinity(0))
    assert f"pid {pid} " in (load_problem(seen) or "")
    assert json.loads(json.dumps(seen)) == seen


def test_our_own_burner_is_not_foreign(burner: Callable[[float], int]) -> None:
    pid = burner(30)
    time.sleep(0.3)
    before = cpu_s(pid)
    with LoadWatch(own=lambda: {pid}) as watch:
        time.sleep(2.5)
    used = cpu_s(pid) - before
    assert 0.5 < watch.seen["own_cores"] < 1.3
    assert watch.seen["own_cores"] * watch.seen["wall_s"] == pytest.approx(used, abs=0.2)
    assert pid not in [p["pid"] for p in watch.seen["foreign"]]
    assert watch.seen["client_cores"] < 0.3


@pytest.mark.clock
def test_a_burner_that_came_and_went_is_still_named(burner: Callable[[float], int]) -> None:
    with LoadWatch(interval_s=0.3) as watch:
        pid = burner(1.5)
        os.waitpid(pid, 0)
        time.sleep(0.5)
    found = {p["pid"]: p for p in watch.seen["foreign"]}
    assert pid in found
    assert "python" in found[pid]["cmdline"]
    assert 0.1 < found[pid]["cores"] * watch.seen["wall_s"] < 1.7, "looks are farther apart where they cost more"


def test_work_of_this_process_and_of_children_it_waited_for_is_ours() -> None:
    with LoadWatch(interval_s=60) as watch:
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        subprocess.run([sys.executable, "-c", BURN.format(0.4)], check=True)
    used = watch.seen["own_cores"] * watch.seen["wall_s"]
    assert watch.seen["client_cores"] * watch.seen["wall_s"] == pytest.approx(0.5, abs=0.1)
    assert used == pytest.approx(0.9, abs=0.15)


def test_watching_is_cheap() -> None:
    before = time.process_time()
    processes = len(list(device._processes()))
    for _ in range(9):
        list(device._processes())
    assert (time.process_time() - before) / 10 / processes < 50e-6  # 200 processes a second: 1 % of a core


def test_an_error_of_the_callers_own_is_not_lost() -> None:
    calls = iter(range(100))

    def own() -> set[int]:
        if next(calls) == 1:
            raise ValueError("gone")
        return set()

    with pytest.raises(ValueError, match="gone"), LoadWatch(own, interval_s=0.01):
        time.sleep(0.2)


def test_an_error_inside_the_window_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), LoadWatch() as watch:
        _ = 1 / 0
    assert watch.seen["wall_s"] > 0


def test_elsewhere_than_linux_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_is_linux", lambda: False)
    with LoadWatch() as watch:
        pass
    assert watch.seen == {**dict.fromkeys(cputime.FIGURES), "foreign": []}
    assert load_problem(watch.seen) is None

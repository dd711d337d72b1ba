"""A stopped server's GPU memory is waited for, and who holds it is named; NVML is played back."""

import os
import sys
import types

import psutil
import pytest

from pytest_kvcache.core.framework import Framework, Launch
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.frameworks.shared import OUT_OF_MEMORY
from pytest_kvcache.harness import gpu_memory
from pytest_kvcache.harness.gpu_memory import MIB, given_back, used_bytes, users
from pytest_kvcache.harness.server import EngineProcess

from ..recorded_nvml import RecordedNvml, card, mig_slice, numbered, sliced

NOBODY = 2**30  # no pid of any machine
MINE = psutil.Process().name()
ERROR = {"error": "NotSupported"}


def memory(used):
    return {"MemoryInfo": {"struct": {"total": 150754820096, "used": used * MIB}}}


def holders(*pids):
    return {"ComputeRunningProcesses": [{"struct": {"pid": pid, "usedGpuMemory": used and used * MIB}} for pid, used in pids]}


def uuid(n):
    return numbered(n)["nvmlDeviceGetUUID"]


@pytest.fixture
def play(monkeypatch):
    """Stands for pynvml; the clock only goes on when somebody sleeps, and `then` says what is in use after each sleep."""

    def use(*cards, then=(), **more):
        fake, clock, coming = RecordedNvml(*cards, **more), [0.0], iter(then)

        def sleep(seconds):
            clock[0] += seconds
            if (now := next(coming, None)) is not None:
                fake.cards[0]["nvmlDeviceGetMemoryInfo"] = memory(now)["MemoryInfo"] if now != ERROR else ERROR

        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(gpu_memory, "time", types.SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        fake.clock = clock
        return fake

    return use


SLICE = mig_slice(1, "1g.18gb", **memory(70))
BOTH = {"CUDA_VISIBLE_DEVICES": f"{uuid(0)},{uuid(1)}"}


@pytest.mark.parametrize(("cards", "env", "used"), [
    ([card(**memory(300))], {}, 300), ([numbered(0, **memory(300)), numbered(1, **memory(40))], BOTH, 340),
    ([numbered(0, **memory(300)), numbered(1, **memory(40))], {"CUDA_VISIBLE_DEVICES": uuid(1)}, 40),
    ([sliced(card(**memory(300)), SLICE)], {"CUDA_VISIBLE_DEVICES": SLICE["nvmlDeviceGetUUID"]}, 70),
    ([card(MemoryInfo=ERROR)], {}, None), ([card(MemoryInfo=None)], {}, None), ([card(**memory(0))], {}, None), ([], {}, None),
    ([card(**memory(300))], {"CUDA_VISIBLE_DEVICES": ""}, None),
])  # fmt: skip
def test_memory_in_use_is_that_of_the_servers_own_cards(play, cards, env, used):
    fake = play(*cards)
    assert used_bytes(env) == (None if used is None else used * MIB)
    assert fake.open == 0


def test_without_a_driver_nothing_is_read(play):
    play(init="DriverNotLoaded")
    assert used_bytes({}) is None and users({}) == []


@pytest.mark.parametrize(("cards", "told"), [
    ([card(**holders((NOBODY, 20), (os.getpid(), 3000)))], [f"pid {os.getpid()} ({MINE}) 3000 MiB", f"pid {NOBODY} (of another container) 20 MiB"]),
    ([card(**holders((NOBODY, None)))], [f"pid {NOBODY} (of another container)"]),
    ([numbered(0, **holders((NOBODY, 20))), numbered(1, **holders((NOBODY, 22)))], [f"pid {NOBODY} (of another container) 42 MiB"]),
    ([card(**holders())], []), ([card(ComputeRunningProcesses=ERROR)], []), ([card()], []), ([], []),
])  # fmt: skip
def test_users_are_named_the_largest_first(play, cards, told):
    play(*cards)
    assert users(BOTH if len(cards) > 1 else {}) == told


@pytest.mark.parametrize(("before", "at_stop", "then", "seconds", "said"), [
    (100, 100, [], 0, []), (100, 300, [], 0, []),  # within what a driver keeps
    (100, 9000, [5000, 100], 0.4, []), (9000, 100, [], 0, []),
    (100, 9000, [9000] * 30 + [100], 6.2, ["  waiting for the GPU's memory to be free again, at most 60 s"]),
    (100, 9000, [ERROR], 0.2, []),  # no longer to be read
])  # fmt: skip
def test_memory_is_waited_for_as_long_as_it_falls_back(play, before, at_stop, then, seconds, said):
    fake, lines = play(card(**memory(before)), then=then), []
    with given_back({}, lines.append):
        fake.cards[0].update(card(**memory(at_stop)))
    assert lines == said and fake.clock[0] == pytest.approx(seconds)


@pytest.mark.parametrize(("held", "words"), [
    (holders((NOBODY, 8900)), f"pid {NOBODY} (of another container) 8900 MiB"), ({}, "no process that can be seen"),
])  # fmt: skip
def test_memory_that_stays_in_use_is_told_with_who_holds_it(play, monkeypatch, held, words):
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 1.0)
    fake, lines = play(card(**memory(100), **held)), []
    with given_back({}, lines.append):
        fake.cards[0].update(card(**memory(9000)))
    assert lines == [f"  the GPU still has 8900 MiB more in use than before the start, 1 s after the stop: {words}"]


def test_where_nothing_was_read_before_nothing_is_waited_for(play):
    fake = play(card(MemoryInfo=ERROR))
    with given_back({}, pytest.fail):
        fake.cards[0].update(card(**memory(9000)))
    assert fake.clock == [0.0]


def test_an_error_passes_through_once_the_memory_is_back(play):
    fake = play(card(**memory(100)), then=[100])
    with pytest.raises(KeyError), given_back({}, pytest.fail):
        fake.cards[0].update(card(**memory(9000)))
        raise KeyError
    assert fake.clock[0] == pytest.approx(0.2)


@pytest.mark.parametrize(("device", "log", "named"), [
    ("gpu", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True), ("gpu", "ValueError: no such model", False),
    ("cpu", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
])  # fmt: skip
def test_a_server_that_found_no_memory_names_who_has_it(play, tmp_path, device, log, named):
    play(card(**holders((os.getpid(), 3000))))
    framework = Framework(name="x", argv=lambda launch: ["x"], body=dict, needs=(), cure="", known_failures=(OUT_OF_MEMORY,))
    (tmp_path / "x.log").write_text(log)
    process = EngineProcess(framework, Launch(python="python", model="m", port=1, device=device, arm=Arm()), tmp_path / "x.log")
    words = str(process.failure("the engine exited with code 1"))
    assert (f"on the GPU now: pid {os.getpid()} ({MINE}) 3000 MiB" in words) is named

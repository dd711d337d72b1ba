"""What a watch over a GPU sees: recorded answers of NVML, played back."""

import os
import sys
import time

import pytest

from pytest_kvcache.harness import gpu_watch
from pytest_kvcache.harness.device import LoadWatch
from pytest_kvcache.harness.gpu_watch import GpuWatch, cards, has_driver_open

from ..recorded_nvml import RecordedNvml, card, numbered

NOBODY = 2**30  # no pid of any machine
NOT_FOUND, NOT_SUPPORTED = {"error": "NotFound"}, {"error": "NotSupported"}


def on_it(*pids):
    return [{"struct": {"pid": pid, "usedGpuMemory": 3 * 2**30}} for pid in pids]


def busy(**percents):
    return [{"struct": {"pid": int(pid[1:]), "smUtil": percent}} for pid, percent in percents.items()]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(gpu_watch, "INTERVAL_S", 0.005)


@pytest.fixture
def watch(monkeypatch):
    """What is seen of cards while `during` may change them; `own` are our pids."""

    def one(*recorded, during=lambda fake: None, own=frozenset(), env=None, count=None):
        fake = RecordedNvml(*recorded)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        with cards(env or {}, count) as found:
            with GpuWatch(found, lambda: own) as seen:
                during(fake)
                time.sleep(0.1)
        assert fake.open == 0
        return seen.seen

    return one


@pytest.mark.parametrize(("bits", "slowed"), [
    (0x0, {}), (0x1, {}), (0x2 | 0x100, {}), (0x4, {"power cap": 1.0}), (0x8, {"hardware slowdown": 1.0}), (0x20, {"heat": 1.0}),
    (0x40 | 0x8, {"hardware slowdown": 1.0, "heat": 1.0}), (0x80 | 0x4, {"power cap": 1.0, "power brake": 1.0}),
])  # fmt: skip
@pytest.mark.parametrize("name", ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"])
def test_why_the_clocks_were_lower_by_either_name(watch, name, bits, slowed):
    seen = watch(card(**{name: bits}))
    assert seen["readings"] >= 5 and seen["slowed"] == slowed


def test_a_slowdown_of_a_part_of_the_window_is_told_as_its_share(watch):
    def hot_later(fake):
        time.sleep(0.1)
        fake.cards[0]["nvmlDeviceGetCurrentClocksEventReasons"] = 0x20

    assert 0.2 < watch(card(CurrentClocksEventReasons=0), during=hot_later)["slowed"]["heat"] < 0.8


def test_every_card_of_the_server_is_read(watch):
    both = f"{numbered(0)['nvmlDeviceGetUUID']},{numbered(1)['nvmlDeviceGetUUID']}"
    recorded = numbered(0, CurrentClocksEventReasons=0), numbered(1, CurrentClocksEventReasons=0x80)
    assert watch(*recorded, env={"CUDA_VISIBLE_DEVICES": both})["slowed"] == {"power brake": 0.5}
    assert watch(*recorded, env={"CUDA_VISIBLE_DEVICES": both[: both.index(",")]})["slowed"] == {}
    assert watch(*recorded, env={"CUDA_VISIBLE_DEVICES": both}, count=1)["slowed"] == {}, "it uses the first one only"


@pytest.mark.parametrize("recorded", [card(), card(CurrentClocksEventReasons=NOT_SUPPORTED, ComputeRunningProcesses=NOT_SUPPORTED)])
def test_what_cannot_be_read_is_absent(watch, recorded):
    assert watch(recorded) == {"readings": 0, "slowed": {}, "foreign": []}


@pytest.mark.parametrize(("utilization", "percent"), [
    (busy(p1073741824=40), 40.0), (busy(p7=90), 0.0), (NOT_FOUND, 0.0), (NOT_SUPPORTED, None), (None, None),
])  # fmt: skip
def test_who_was_there_before_the_server_is_another_whatever_his_pid(watch, utilization, percent):
    seen = watch(card(ComputeRunningProcesses=on_it(NOBODY), ProcessUtilization=utilization))
    assert seen["foreign"] == [{"pid": NOBODY, "name": "of another container", "percent": percent, "mib": 3072}]


def test_our_own_and_pids_of_another_table_are_no_strangers(watch):
    def started(fake):
        fake.cards[0]["nvmlDeviceGetComputeRunningProcesses"] = on_it(os.getpid(), NOBODY)

    assert watch(card(ComputeRunningProcesses=[]), during=started, own={os.getpid()})["foreign"] == []


def test_a_process_of_this_machine_that_came_later_is_one_if_it_has_the_driver_open(watch, monkeypatch):
    def came(fake):
        fake.cards[0]["nvmlDeviceGetComputeRunningProcesses"] = on_it(os.getpid())

    recorded = card(ComputeRunningProcesses=[], ProcessUtilization=busy(**{f"p{os.getpid()}": 10}))
    assert watch(recorded, during=came)["foreign"] == [], "a pid of the host's that happens to be one here"
    monkeypatch.setattr(gpu_watch, "has_driver_open", lambda pid: True)
    (stranger,) = watch(recorded, during=came)["foreign"]
    assert stranger["pid"] == os.getpid() and 0 < stranger["percent"] <= 10


def test_who_has_the_driver_open_is_seen_by_his_files(monkeypatch):
    assert not has_driver_open(NOBODY)
    assert not has_driver_open(os.getpid())
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert has_driver_open(os.getpid())

    def refused(path):
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refused)
    assert has_driver_open(os.getpid()), "of another user: he may"


def test_the_watch_over_the_machine_has_that_over_its_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(card(CurrentClocksEventReasons=0x20)))
    with cards({}) as found:
        with LoadWatch(device="gpu", cards=found) as watched:
            time.sleep(0.05)
        assert watched.seen["device"] == "gpu" and watched.seen["gpu"]["slowed"] == {"heat": 1.0}
        with pytest.raises(ZeroDivisionError), LoadWatch(device="gpu", cards=found) as watched:
            raise ZeroDivisionError
        assert watched.seen["gpu"]["readings"], "also of a load that failed"


def test_the_names_are_those_of_the_binding():
    pynvml = pytest.importorskip("pynvml")
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetHandleByUUID"):
        assert hasattr(pynvml, name)
    assert any(hasattr(pynvml, f"nvmlDeviceGetCurrentClocks{word}Reasons") for word in ("Event", "Throttle"))
    bits = {"HwSlowdown": 0x8, "SwThermalSlowdown": 0x20, "HwThermalSlowdown": 0x40, "HwPowerBrakeSlowdown": 0x80, "SwPowerCap": 0x4}
    for name, bit in bits.items():
        found = [getattr(pynvml, f"nvmlClocks{word}Reason{name}", None) for word in ("Event", "Throttle")]
        assert bit in found, name

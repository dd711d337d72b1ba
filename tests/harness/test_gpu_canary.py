"""The GPU's canary without a GPU: rounds read on a real one, a driver that answers as the CUDA Driver API says, and what cannot be had."""

import ctypes
import json

import pytest

from pytest_kvcache.harness import gpu_canary
from pytest_kvcache.harness.gpu_canary import Driver, NoCanary, card, slowest

# One H200, 2026-12-01: `python -I gpu_canary.py 1`, the first and the last rounds.
ROUNDS = {
    "uuid": "GPU-7fa58b2f-8016-ba90-aea5-bac85273433d", "copy": [2.0405, 2.0455, 2.0517], "arithmetic": [2.8065, 2.8104, 2.8177],
}  # fmt: skip


class Library:
    """A driver that does nothing and says that each event lies so many ms after the last; `refuses` names calls that fail."""

    def __init__(self, refuses=(), lacks=()):
        self.refuses, self.lacks, self.calls = set(refuses), set(lacks), []

    def __getattr__(self, name):
        if name in self.lacks:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
            elif name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 132
            elif name == "cuDeviceGetUuid_v2":
                arguments[0][:] = bytes(range(16))
            elif name == "cuEventElapsedTime":
                arguments[0]._obj.value = 2.5
            return 2 if name in self.refuses else 0

        return call


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(gpu_canary, "WARM_S", 0.0)


def test_the_slowest_of_several_cards_counts():
    other = ROUNDS | {"uuid": "GPU-2", "copy": [2.2, 2.3, 2.1], "arithmetic": [2.0, 2.1, 2.2]}
    assert slowest([ROUNDS], {"driver": "580.159.04", "vbios": "96.00"}) == {
        "on": f"{ROUNDS['uuid']}, driver 580.159.04, vbios 96.00",
        "ms": {"copy": 2.0455, "arithmetic": 2.8104},
    }
    assert slowest([ROUNDS, other], {"driver": "580"}) == {
        "on": f"GPU-2, {ROUNDS['uuid']}, driver 580",
        "ms": {"copy": 2.2, "arithmetic": 2.8104},
    }


def test_a_card_is_asked_for_the_same_work_every_time():
    library = Library()
    found = card(Driver(library), 0)
    assert found == {"uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "copy": [2.5] * 15, "arithmetic": [2.5] * 15}
    launches = [a for name, a in library.calls if name == "cuLaunchKernel"]
    copies = [a for name, a in library.calls if name == "cuMemcpyDtoDAsync_v2"]
    assert len(launches) == 15
    assert {a[1:7] for a in launches} == {(132 * 8, 1, 1, 256, 1, 1)}
    assert len(copies) == 15 * 8
    assert {a[2].value for a in copies} == {2**29}


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuModuleLoadData", "cuLaunchKernel", "cuEventSynchronize"])
def test_a_call_that_fails_is_no_canary_and_is_named(call):
    with pytest.raises(NoCanary, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        card(Driver(Library(refuses=[call])), 0)


def test_a_driver_that_lacks_a_call_is_no_canary():
    with pytest.raises(NoCanary, match="the driver has no cuDeviceGetUuid_v2"):
        card(Driver(Library(lacks=["cuDeviceGetUuid_v2"])), 0)


def test_fewer_cards_than_the_server_uses_is_no_canary(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    with pytest.raises(NoCanary, match="CUDA shows 0 of 2 cards"):
        gpu_canary.main(2)


@pytest.mark.parametrize(("source", "why"), [
    ("import sys; sys.exit('cuInit: CUDA_ERROR_NO_DEVICE')", "cuInit: CUDA_ERROR_NO_DEVICE"),
    ("import os; os._exit(3)", "exit code 3"),
    ("print('no JSON')", "no JSON"),
    ("import time; time.sleep(60)", "timed out"),
])  # fmt: skip
def test_a_child_that_has_none_says_why(tmp_path, monkeypatch, source, why):
    child = tmp_path / "child.py"
    child.write_text(source)
    monkeypatch.setattr(gpu_canary, "__file__", str(child))
    monkeypatch.setattr(gpu_canary, "LIMIT_S", 5.0 if "sleep" not in source else 0.5)
    with pytest.raises(NoCanary, match=why):
        gpu_canary.gpu_canary({}, {})


def test_a_child_that_has_one_is_read(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(f"import sys; assert sys.argv[1:] == ['2']; print('''{json.dumps([ROUNDS])}''')")
    monkeypatch.setattr(gpu_canary, "__file__", str(child))
    assert gpu_canary.gpu_canary({}, {}, 2)["ms"] == {"copy": 2.0455, "arithmetic": 2.8104}

"""The canary is a time of all cores together, and leaves the caller where it is."""

import os

from pytest_kvcache.harness.canary import canary


def test_it_is_a_time_and_pins_nobody_else():
    before = os.sched_getaffinity(0)
    found = canary()
    assert found["ms"].keys() == {"memory"}
    assert 0.1 < found["ms"]["memory"] < 1000
    assert found["on"] == f"{min(len(before), 16)} cores"
    assert os.sched_getaffinity(0) == before


def test_it_stays_on_the_cores_it_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert canary()["on"] == "1 cores"
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_where_a_core_cannot_be_had_there_is_no_canary(monkeypatch):
    def refused(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert canary() is None

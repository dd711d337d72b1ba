"""The canary repeats itself, leaves the caller where it is, and does not feel a smaller share of the machine."""

import os

from pytest_kvcache.harness.canary import canary_ms


def test_it_is_a_time_and_pins_nobody_else():
    before = os.sched_getaffinity(0)
    assert 0.1 < canary_ms() < 1000
    assert os.sched_getaffinity(0) == before


def test_it_stays_on_the_cores_it_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert canary_ms() > 0.1
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)

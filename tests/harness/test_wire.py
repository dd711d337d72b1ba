"""The load loop inside this process: what it says of itself when it is held up, and when the clock is set."""

import json
import socket
import time

import pytest

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.core.record import OK
from pytest_kvcache.harness import timer
from pytest_kvcache.harness import wire as wires
from pytest_kvcache.harness.digest import Digest
from pytest_kvcache.harness.loadgen import client_figures
from pytest_kvcache.harness.wire import Wire

from ..mockserver import MockServer

pytestmark = pytest.mark.clock


def body(tokens):
    return json.dumps({"prompt": "a b", "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}).encode()


def drive(url, n=4, tokens=10, **shape):
    load = Load(bodies=(body(tokens),) * n, osl=(tokens,) * n, **(shape or {"concurrency": 2}))
    digest = Digest(load, range(n))
    wire = Wire(Target(base_url=url, endpoint="/v1/completions"), load, digest)
    wire.connect()
    start = digest.zero = time.perf_counter_ns() + 5_000_000
    wire.run(start)
    wire.digest_all()
    assert {row[Digest.OUTCOME] for row in digest.rows} == {OK}
    return wire, digest


def sent_and_first(digest):
    return [(row[1], row[4]) for row in digest.rows]


def test_a_loop_that_is_held_up_shows_it():
    with MockServer(mode="schedule", ttft=10, tpot=4) as server:
        calm, _ = drive(server.url)
        pool = wires.Connections
        held = type("Held", (pool,), {"__init__": lambda self, e: (pool.__init__(self, e), setattr(self, "epoll", _Slow(self.epoll)))[0]})
        wires.Connections = held
        try:
            slow, _ = drive(server.url)
        finally:
            wires.Connections = pool
    assert sorted(slow.loop_lag)[len(slow.loop_lag) // 2] > 15e6
    assert sorted(calm.loop_lag)[len(calm.loop_lag) // 2] < 15e6


class _Slow:
    """An epoll whose process is away for 40 ms before each look."""

    def __init__(self, epoll):
        self.epoll = epoll

    def poll(self, timeout):
        time.sleep(0.04)
        return self.epoll.poll(timeout)

    def __getattr__(self, name):
        return getattr(self.epoll, name)


@pytest.mark.parametrize("step_ns", [-3_000_000_000, -30_000_000, 30_000_000, 3_000_000_000])
def test_a_clock_that_is_set_is_noticed_and_gives_no_time_before_the_send(monkeypatch, step_ns):
    real, calls = timer.offset, []

    def stepped():
        calls.append(1)
        return real() + (step_ns if len(calls) < 3 else 0)

    monkeypatch.setattr(timer, "offset", stepped)
    with MockServer(mode="schedule", ttft=30, tpot=2) as server:
        wire, digest = drive(server.url)
    assert wire.clock_steps >= 1
    for sent, first in sent_and_first(digest):
        assert 0.02 < first - sent < 0.2, "the truth is 0.03"


def test_the_two_clocks_are_compared_exactly():
    offsets = [timer.offset() for _ in range(50)]
    assert max(offsets) - min(offsets) < 5_000_000
    assert abs(offsets[0] - (time.time_ns() - time.perf_counter_ns())) < 50_000_000


def test_the_figures_of_several_workers_are_those_of_all():
    part = {
        "stamps": "kernel", "priority": "nice 0", "load_cpu_s": 1.0, "decode_s": 0.5, "load_s": 4.0, "read_lag": [90, 9, 1], "send_lag": [1_000_000],
        "slot_gaps": [2_000_000, 4_000_000], "loop_lag": [5_000_000], "clock_steps": 1,
    }  # fmt: skip
    found = client_figures([part, {**part, "load_cpu_s": 2.0}], 0.1)
    assert found["workers"] == 2
    assert found["cpu_s"] == 4.0
    assert found["cores"] == 0.5, "that of the busiest"
    assert found["slot_idle_s"] == pytest.approx(0.012)
    assert found["slot_gap_ms"] == {"p50": 2.0, "p99": 4.0, "max": 4.0}
    assert found["clock_steps"] == 2
    assert found["read_lag_ms"]["p50"] == pytest.approx(0.0164, abs=1e-4)


def test_more_bytes_than_may_wait_are_decoded_while_the_load_runs(monkeypatch):
    monkeypatch.setattr(wires, "KEPT", 1000)
    during = []
    with MockServer(mode="schedule", ttft=2, tpot=1) as server:
        load = Load(bodies=(body(20),) * 12, osl=(20,) * 12, concurrency=2)
        digest = Digest(load, range(12))
        wire = Wire(Target(base_url=server.url, endpoint="/v1/completions"), load, lambda d: (during.append(wire.left), digest(d)))
        wire.connect()
        digest.zero = time.perf_counter_ns() + 5_000_000
        wire.run(digest.zero)
        left = len(during)
        wire.digest_all()
    assert left >= 5
    assert sorted(row[0] for row in digest.rows) == list(range(12))


def test_a_replay_that_does_not_come_ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        load = Load(bodies=(b"{}",), osl=(1,), concurrency=1)
        wire = Wire(Target(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", endpoint="/"), load, lambda d: None)
        wire.connect()
        with pytest.raises(TimeoutError, match="1 of 1 reads did not come"):
            wire.turns(1, patience_s=0.2)
        wire.close()

"""The process that makes load: reads a job from its standard input, runs it at the given moment, answers with what it saw.

It does nothing else, so that neither pytest's threads nor its garbage collector are in any latency. Frames are a length and
msgpack. It ends when its input does.
"""

from __future__ import annotations

import gc
import os
import resource
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ..core.load import Load, Target
from .digest import Digest
from .wire import Wire

if TYPE_CHECKING:
    from .proxied import Proxied

LENGTH = struct.Struct("<Q")
Number = int | float | None
# The fields of `RequestRecord`, in their order.
Row = tuple[
    int, float, Number, float, Number, Number, Number, Number, int | None, int | None, int, int, int | None, str, str, tuple[str, ...]
]  # fmt: skip


class Result(msgspec.Struct):
    """What a worker saw of its share of a load: rows, counts (see `core.record.Trace`) and what it used itself."""

    rows: list[Row]
    itl: dict[str, list[Any]]
    arrivals: dict[str, list[Any]]
    client: dict[str, Any]


def send(stream: BinaryIO, value: Any) -> None:
    """One frame: its length and msgpack."""
    data = msgspec.msgpack.encode(value)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: BinaryIO, kind: Any = Any) -> Any:
    """The next frame, a value of that kind; EOFError when there is none."""
    head = stream.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else -1
    data = stream.read(size) if size > 0 else b""
    if len(data) != size:  # the other side has died, perhaps in the middle of it
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _on_time() -> Iterator[str]:
    """Real-time scheduling while the load runs, where that is allowed, else what niceness there is; which it was.

    Other processes must not delay sends: on a machine with two cores arrivals at 500 a second were Poisson at the server with
    it and in bunches without. The load needs a fraction of a core; decoding, which needs a whole one, comes after it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        yield f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
        return
    try:
        yield "realtime"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _driver(target: Target) -> type[Wire] | type[Proxied]:
    if target.proxy:
        from .proxied import Proxied

        return Proxied
    return Wire


def run(job: dict[str, Any], stdin: BinaryIO, stdout: BinaryIO) -> None:
    """One load: connections first, then `ready`; the start comes as a moment; then the result."""
    if "replay" in job:
        from .calibrate import replay

        send(stdout, replay(*job["replay"]))
        return
    target = msgspec.convert(job["target"], Target)
    load = msgspec.convert(job["load"], Load)
    digest = Digest(load, job["index"])
    wire = _driver(target)(target, load, digest, asleep=stdin.fileno())
    wire.connect()
    gc.collect()
    gc.freeze()
    gc.disable()
    send(stdout, "ready")
    start = digest.zero = receive(stdin)
    began, cpu = time.perf_counter_ns(), cpu_s()
    with _on_time() as scheduler:
        wire.run(start)
    loaded, cpu_loaded = wire.loaded, cpu_s()
    wire.digest_all()
    counts = digest.counts()
    client = {
        "load_cpu_s": cpu_loaded - cpu, "decode_s": cpu_s() - cpu_loaded, "load_s": (loaded - min(began, start)) / 1e9,
        "priority": scheduler,
        "stamps": "kernel" if wire.kernel else "read", "read_lag": wire.read_lag, "send_lag": wire.send_lag.tolist(),
        "slot_gaps": wire.slot_gaps.tolist(), "loop_lag": wire.loop_lag.tolist(), "clock_steps": wire.clock_steps,
    }  # fmt: skip
    gc.enable()
    gc.unfreeze()
    send(stdout, Result(rows=digest.rows, client=client, **counts))


def main() -> None:
    with suppress(OSError):  # where it is allowed: an engine that keeps all cores busy must not delay the client's stamps
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    try:
        while True:
            run(receive(stdin), stdin, stdout)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass

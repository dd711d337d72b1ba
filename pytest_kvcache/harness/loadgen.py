"""Make a load by worker processes and gather what they saw."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import starmap
from subprocess import PIPE, Popen, TimeoutExpired
from types import TracebackType
from typing import Any, Self

from ..core.load import Load, Seen, Target
from ..core.metrics import quantile
from ..core.record import RequestRecord
from ..core.spec import UserError
from . import child
from .loadworker import Result, receive, send
from .wire import LAG_STEP

START_IN_NS = 5_000_000  # from the order to the first send: all workers have it by then
_MAIN = "import sys; sys.path[:] = {path!r}; from pytest_kvcache.harness.loadworker import main; main()"
Glance = Callable[[], None]


class Workers:
    """Load workers, started once and used for any number of loads. Leaving the context ends them, whatever they do."""

    def __init__(self, count: int = 1) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        self._processes: list[Popen[bytes]] = []
        self.grow(count)

    def grow(self, count: int) -> None:
        """Have at least so many workers."""
        # The path is handed over, so `site` (and the hooks that .pth files bring) need not run again.
        command = [sys.executable, "-I", "-S", "-c", _MAIN.format(path=[p or os.getcwd() for p in sys.path])]
        while len(self._processes) < count:
            self._processes.append(
                child.start("the load generator", command, stdin=PIPE, stdout=PIPE, stderr=self._errors, start_new_session=True)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            if kind is not None:
                process.kill()
        for process in self._processes:
            try:
                process.wait(2)
            except TimeoutExpired:
                process.kill()
                process.wait()
        self._errors.close()

    def pids(self) -> set[int]:
        return {p.pid for p in self._processes}

    def run(self, target: Target, load: Load, *, glance: Glance | None = None, glance_s: float = 3.0) -> Seen:
        """Send the load, shared among the workers; what they saw, in the order of the requests.

        `glance` is called every `glance_s` seconds and may raise to end the load. UserError when a worker dies.
        """
        streams = load.concurrency or len(load.bodies)
        used = self._processes[: max(1, min(len(self._processes), streams))]
        began = time.perf_counter()
        for part, process in enumerate(used):
            index, share = load.share(part, len(used))
            self._tell(process, {"target": _plain(target), "load": _plain(share), "index": index})
        self._gather(used, glance, glance_s)
        zero = time.perf_counter_ns() + START_IN_NS
        for process in used:
            self._tell(process, zero)
        start_s = time.perf_counter() - began
        return _merged(zero, start_s, self._gather(used, glance, glance_s, Result))

    def replay(self, *size: int) -> dict[str, float]:
        """What the load generator needs on this machine (see `harness.calibrate.replay`)."""
        first = self._processes[:1]
        self._tell(first[0], {"replay": size})
        found: dict[str, float] = self._gather(first, None, 60.0)[0]
        return found

    def _tell(self, process: Popen[bytes], value: Any) -> None:
        try:
            send(process.stdin, value)  # type: ignore[arg-type]
        except OSError:
            raise self._died(process) from None

    def _gather(self, used: Sequence[Popen[bytes]], glance: Glance | None, glance_s: float, kind: Any = Any) -> list[Any]:
        """One frame from each of the workers."""
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for process in used:
                selector.register(process.stdout, selectors.EVENT_READ, process)  # type: ignore[arg-type]
            while len(found) < len(used):
                ready = selector.select(glance_s)
                if not ready and glance:
                    glance()
                for key, _ in ready:
                    try:
                        with _collector_rests():
                            found[key.data.pid] = receive(key.data.stdout, kind)
                    except EOFError:
                        raise self._died(key.data) from None
                    selector.unregister(key.fileobj)
        return [found[p.pid] for p in used]

    def _died(self, process: Popen[bytes]) -> UserError:
        code = process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return UserError(f"the load generator (pid {process.pid}) {how}" + (f": {last[0]}" if last else ""))


def run(target: Target, load: Load, *, workers: int = 1) -> Seen:
    """Send one load by workers of its own."""
    with Workers(workers) as pool:
        return pool.run(target, load)


def _plain(value: Target | Load) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@contextmanager
def _collector_rests() -> Iterator[None]:
    """Many small values that all live on: the collector would look through them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _merged(zero: int, start_s: float, parts: list[Result]) -> Seen:
    with _collector_rests():
        rows = sorted(row for part in parts for row in part.rows)
        records = tuple(starmap(RequestRecord, rows))
    return Seen(
        zero_ns=zero, records=records, itl=_summed("us", [p.itl for p in parts]), arrivals=_summed("ms", [p.arrivals for p in parts]),
        client=client_figures([p.client for p in parts], start_s),
    )  # fmt: skip


def _summed(name: str, parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    if len(parts) == 1:
        return parts[0]
    total: dict[int, Any] = {}
    for part in parts:
        for key, n in zip(part[name], part["n"], strict=True):
            total[key] = total.get(key, 0) + n
    keys = sorted(total)
    return {name: keys, "n": [total[k] for k in keys]}


def client_figures(parts: list[dict[str, Any]], start_s: float) -> dict[str, Any]:
    """What the load generator did itself, over all workers (see `core.load.Seen`)."""
    found = {
        "workers": len(parts),
        "stamps": parts[0]["stamps"],
        "priority": parts[0]["priority"],
        "start_s": round(start_s, 4),
        "cpu_s": round(sum(p["load_cpu_s"] + p["decode_s"] for p in parts), 4),
        "decode_s": round(sum(p["decode_s"] for p in parts), 4),
        "cores": round(max(p["load_cpu_s"] / max(p["load_s"], 1e-9) for p in parts), 3),
        "slot_idle_s": round(sum(sum(p["slot_gaps"]) for p in parts) / 1e9, 6),
        "clock_steps": sum(p["clock_steps"] for p in parts),
    }
    lags = [sum(n) for n in zip(*(p["read_lag"] for p in parts), strict=True)]  # of each step, known by its upper edge
    steps = [(step, n) for step, n in enumerate(lags, 1) if n]
    found["read_lag_ms"] = _quantiles([step << LAG_STEP for step, _ in steps], [n for _, n in steps])
    for name, key in (("send_lag_ms", "send_lag"), ("slot_gap_ms", "slot_gaps"), ("loop_lag_ms", "loop_lag")):
        found[name] = _quantiles(sorted(v for p in parts for v in p[key]))
    return found


def _quantiles(values: Sequence[float], counts: Sequence[int] | None = None) -> dict[str, float]:
    """`p50`, `p99` and `max` of ascending values in ns (each `counts` times), in ms; empty for none."""
    found = {name: quantile(values, counts, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {name: round(v / 1e6, 4) for name, v in found.items() if v is not None}

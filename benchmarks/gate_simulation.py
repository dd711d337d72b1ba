"""How often the gate is right, on made-up sessions whose truth is known, beside naive rules.

    python -m benchmarks.gate_simulation [--sessions N] [--seed N] [--processes N] [--table FILE]

A session is 300 gates, each with a baseline of 5 sessions of 2 runs and at most 12 new runs; `gate_noise` makes them, and
`core.gate.judge` judges them. Prints Markdown; exits 1 when a figure that must hold does not. Minutes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pytest_kvcache.harness.environment import cpu_identity

from .gate_rules import BLOCKS, CI, CVS, FULL, GATES, LOSSES, OTHER, RULES, Condition, Tally, condition, of_one_cv, session, tally
from .gate_table import Results, failed, sections

Map = Callable[..., Iterable[Any]]


def times(sessions: int) -> tuple[int, int]:
    """Sessions where nothing changed, since false alarms are rare; and under other noise and in blocks of one CV."""
    return 4 * sessions, max(2, sessions // 3)


def studies(sessions: int) -> Iterator[tuple[Condition, tuple[str, ...], int]]:
    """What is simulated: the truth, the rules, how many sessions."""
    unchanged, other_noise = times(sessions)
    for cv in CVS:
        for loss in LOSSES:
            yield condition(loss, cv), tuple(RULES), sessions if loss else unchanged
    for block in BLOCKS:
        yield of_one_cv(*block), (FULL, CI), other_noise
    for other in list(OTHER)[1:]:
        for cv in CVS:
            for loss in (0.0, 0.05, 0.10):
                yield condition(loss, cv, other), (FULL,), other_noise


def simulate(sessions: int, seed: int, parallel: Map) -> Results:
    """Every study. Session i has the same random numbers in each of them, whatever the number of processes."""
    results: dict[Condition, dict[str, Tally]] = {}
    planned = list(studies(sessions))
    for n, (truth, rules, count) in enumerate(planned, 1):
        found = list(parallel(partial(session, truth, rules), [(seed, i) for i in range(count)]))
        results[truth] = {rule: tally([one[rule] for one in found]) for rule in rules}
        print(f"{n} of {len(planned)}: {count} sessions of {truth}", file=sys.stderr, flush=True)
    return results


@contextmanager
def mapping(processes: int) -> Iterator[Map]:
    """`map` over so many processes, in order; over none but this for one."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield partial(pool.map, chunksize=4)


def page(results: Results, argv: Sequence[str], args: argparse.Namespace, took_s: float) -> str:
    """All tables, with what they were made by."""
    cpu = cpu_identity(Path("/proc/cpuinfo").read_text())["gpu"]
    unchanged, other_noise = times(args.sessions)
    made = (
        f"`{shlex.join(['python', '-m', 'benchmarks.gate_simulation', *argv])}`, seed {args.seed}; {datetime.date.today().isoformat()} on "
        f"{cpu}, Linux {platform.release()}, Python {platform.python_version()}, {args.processes} processes, {took_s:.0f} s.",
        f"Sessions of {GATES} gates: {unchanged} where nothing changed, {args.sessions} with a loss, {other_noise} in the last two tables "
        "(but `as above`). ± is two standard errors; bounds of false alarms are exact (Poisson), 95 %.",
    )
    return "\n\n".join([*made, *(f"### {title}\n\n{table}" for title, table in sections(results))]) + "\n"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="gate_simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sessions", type=int, default=300, metavar="N", help="sessions with a loss (default: 300); 4 times as many without")
    p.add_argument("--seed", type=int, default=1, metavar="N")
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: one a core")
    p.add_argument("--table", type=Path, metavar="FILE", help="write what is printed")
    return p


def main(argv: Sequence[str]) -> int:
    p = parser()
    a = p.parse_args(argv)
    for option, value, least in (("--sessions", a.sessions, 2), ("--seed", a.seed, 0), ("--processes", a.processes, 1)):
        if value < least:
            p.error(f"{option} {value}: at least {least}")
    try:
        if a.table:
            a.table.open("a").close()
    except OSError as e:
        p.error(f"--table {a.table}: {e.strerror}; name a file that can be written")
    began = time.perf_counter()
    with mapping(a.processes) as parallel:
        results = simulate(a.sessions, a.seed, parallel)
    text = page(results, argv, a, time.perf_counter() - began)
    print(text)
    if a.table:
        a.table.write_text(text)
    for name in failed(results):
        print(f"does not hold: {name}", file=sys.stderr)
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

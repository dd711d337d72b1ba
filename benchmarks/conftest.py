"""Load clients side by side: `pytest benchmarks [--rounds N] [--clients ours,vllm] [--table FILE]`.

A round runs each scenario with each client once; clients take turns, in the other order in every second round, on a fresh mock
server with the same seed. No time is asserted, the counts are. `--table` writes what is printed at the end.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from pathlib import Path

import pytest

from . import table
from .figures import figures
from .peers import Client, clients
from .scenarios import SCENARIOS, mockserver

ROWS: pytest.StashKey[dict[tuple[str, str], list[dict[str, float]]]] = pytest.StashKey()
CLIENTS: pytest.StashKey[list[Client]] = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("benchmarks of load clients")
    group.addoption("--rounds", type=int, default=3, help="how often each client runs each scenario (default: 3)")
    group.addoption("--clients", help="only these, by comma (default: ours and each peer that KV_PEER_* names)")
    group.addoption("--table", metavar="FILE", help="write the table as Markdown")


def pytest_configure(config):
    config.stash[ROWS] = {}
    known = clients()
    wanted = config.getoption("clients")
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",")]
        if unknown := set(names) - {c.name for c in known if c.drive}:
            reasons = {c.name: c.absent for c in known}
            raise pytest.UsageError("--clients: " + ", ".join(f"{n} ({reasons.get(n) or 'unknown'})" for n in sorted(unknown)))
        known = [c if c.name in names or not c.drive else Client(c.name, None, absent="left out by --clients") for c in known]
    config.stash[CLIENTS] = known


def pytest_generate_tests(metafunc):
    if "client" in metafunc.fixturenames:
        present = [c for c in metafunc.config.stash[CLIENTS] if c.drive]
        pairs = [(SCENARIOS[s], c) for s in metafunc.module.SCENARIOS for c in present if not c.only or s in c.only]
        ids = [f"{s.name}-{c.name}" for s, c in pairs]
        metafunc.parametrize(("scenario", "client"), pairs, ids=ids)
        metafunc.parametrize("turn", range(metafunc.config.getoption("rounds")))


def pytest_collection_modifyitems(items):
    """Round by round, and within one scenario by scenario, the clients forwards, then backwards."""
    scenarios = list(SCENARIOS)

    def place(numbered):
        number, item = numbered
        params = item.callspec.params
        return params["turn"], scenarios.index(params["scenario"].name), -number if params["turn"] % 2 else number

    here = [i for i in items if Path(__file__).parent in i.path.parents and "turn" in i.fixturenames]
    ordered = iter([item for _, item in sorted(enumerate(here), key=place)])
    members = set(here)
    items[:] = [next(ordered) if item in members else item for item in items]


@pytest.fixture
def server(scenario, turn):
    with mockserver.MockServer(nice=-10, tls=scenario.tls, seed=turn + 1, **scenario.server) as started:
        yield started


@pytest.fixture
def measured(request, benchmark, server, scenario, client, turn, tmp_path, pytestconfig):
    """The figures of one run of a client on a scenario, noted for the table. A peer that miscounts is no failure of ours."""
    benchmark.group = scenario.name
    report = benchmark.pedantic(client.drive, args=(scenario, server.url, turn + 1, tmp_path, server.ca_file), rounds=1, iterations=1)
    found = figures(server.stop(), report, concurrency=scenario.concurrency, rate=scenario.rate, chunk=scenario.tokens_per_chunk)
    benchmark.extra_info.update(found)
    benchmark.extra_info["notes"] = report.notes
    pytestconfig.stash[ROWS].setdefault((scenario.name, client.name), []).append(found)
    if client.peer and not found["exact"]:
        request.applymarker(pytest.mark.xfail(reason=f"{client.name} miscounts, see the table"))
    return found


def _machine() -> str:
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Linux {platform.release()}"


def _lines(path: str) -> list[str]:
    with open(path) as f:
        return f.readlines()


def _page(config: pytest.Config) -> str:
    known, rows = config.stash[CLIENTS], config.stash[ROWS]
    turns = max(len(found) for found in rows.values())
    spread = "one round" if turns == 1 else f"median [min .. max] of {turns} rounds, the clients taking turns"
    lines = [
        f"{datetime.date.today().isoformat()} on {_machine()}, Python {platform.python_version()}; {table.versions()}.",
        f"`pytest {shlex.join(config.invocation_params.args)}`: {spread}.",
        *(f"{c.name}: {c.version}." for c in known if c.version),
        *(f"{c.name}: not measured, {c.absent}." for c in known if not c.drive),
    ]
    return "\n\n".join(lines) + "\n\n" + table.markdown(rows, [c.name for c in known])


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[ROWS]:
        page = _page(config)
        terminalreporter.section("load clients")
        terminalreporter.write_line(page)
        if target := config.getoption("table"):
            Path(target).write_text(page)
            terminalreporter.write_line(f"written to {target}")

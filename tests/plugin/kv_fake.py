"""Made-up runs through the public hook: no engine, known truth, every start written to a log. Copied as a conftest."""

import contextlib
import json
import os
import pathlib
import random
import time

import pytest

from pytest_kvcache.core.record import RequestRecord, Trace
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.core.stitched import stitched
from pytest_kvcache.core.validity import Spoiled

LOG = pathlib.Path(os.environ["KV_FAKE_LOG"])


def told(name, default=None):
    return json.loads(os.environ.get(f"KV_FAKE_{name}", json.dumps(default)))


class Running:
    start_s = 0.01

    def __init__(self, arm, run, attempt):
        self.arm, self.run, self.attempt = arm, run, attempt

    def measure(self, scenario):
        with LOG.open("a") as f:
            f.write(f"measure {scenario} run{self.run} attempt{self.attempt} pid{os.getpid()} arm:{self.arm.name}\n")
        if str(scenario) in told("BROKEN", []):
            raise UserError(f"the warm-up of {scenario} failed: HTTP 400")
        if self.run == told("CRASHES"):
            raise {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[told("CRASH", "RuntimeError")]("a fault of ours")
        if told("SPOILED") in ("measure", "both") and self.attempt <= told("BUSY_ATTEMPTS", 2):
            raise Spoiled("other processes used 0.99 of 2 cores (allowed 0.3): pid 4711 python burn.py 0.99", {"foreign_cores": 0.99})
        time.sleep(told("SLEEP", 0.0))
        # Every start has its own noise, and every round the machine its own, which arms in turns meet alike.
        noise = random.Random(f"{scenario}|{self.run}|{told('SEED', 0)}").gauss(0, told("CV", 0.02))
        noise += random.Random(f"{scenario}|{self.run}|{self.arm.name}|{told('SEED', 0)}").gauss(0, told("ARM_CV", 0.002))
        factor = (
            (1 + noise) * (told("SLOW", {}).get(str(scenario), 1.0)) * told("ALL_SLOW", 1.0) * told("SLOW_RUNS", {}).get(str(self.run), 1.0)
        )
        factor *= told("ARM_SLOW", {}).get(self.arm.name, 1.0)
        ttft, tpot, osl = 0.1 * factor, 0.02 * factor, scenario.osl
        records, now = [], 0.0
        for i in range(8):
            first = now + ttft
            last = first + tpot * (osl - 1)
            bad = i < told("FAILED", 0)
            records.append(
                RequestRecord(
                    index=i,
                    sent_s=now,
                    first_s=first,
                    last_s=last,
                    end_s=last,
                    input_tokens=scenario.isl,
                    output_tokens=osl,
                    events=osl,
                    outcome="http_status" if bad else "ok",
                    error="HTTP 500" if bad else "",
                )
            )
            now = last
        load = {"cores": 2, "foreign_cores": 0.01, "steal_cores": 0.0, "client_cores": 0.05, "foreign": []}
        if (
            self.run in told("BUSY_RUNS", [])
            and told("BUSY_ARM", self.arm.name) == self.arm.name
            and self.attempt <= told("BUSY_ATTEMPTS", 2)
        ):
            load |= {"foreign_cores": 0.97, "foreign": [{"pid": 4711, "name": "python", "cmdline": "python burn.py", "cores": 0.97}]}
        return Trace(
            scenario=str(scenario),
            arm=self.arm.name,
            run=self.run,
            workload=str(scenario),
            isl=scenario.isl,
            osl=osl,
            records=tuple(records),
            load=load,
        )


class Runner:
    run = 0

    def environment(self, arms):
        version = told("OTHER_VERSION", "1.0") if arms[0].build else told("VERSION", "1.0")
        subject = {"dist:engine": version, "cpus_allowed": told("CPUS", 2)}
        return {"identity": {"gpu": told("CPU", "Test CPU, 2 cores"), "model": "m"}, "subject": subject, "context": {"host": "h"}}

    def workload(self, scenario):
        return str(scenario)

    def canary(self):
        return {"on": f"{told('CORES', 2)} cores", "ms": {"memory": told("CANARY", {}).get(str(self.run), 10.0)}}

    @contextlib.contextmanager
    def start(self, arm, run, attempt):
        self.run = run
        with LOG.open("a") as f:
            f.write(f"start run{run} attempt{attempt} arm:{arm.name} t{time.monotonic()}\n")
        if told("DIES"):
            raise UserError("engine died at start (exit code 1): out of memory\n  last line of its log")
        if (told("SPOILED") == "start" and attempt <= told("BUSY_ATTEMPTS", 2)) or (told("SPOILED") == "both" and attempt == 2):
            raise Spoiled("other processes used 0.99 of 2 cores (allowed 0.3): pid 4711 python burn.py 0.99", {"foreign_cores": 0.99})
        yield Running(arm, run, attempt)
        with LOG.open("a") as f:
            f.write(f"stop run{run} t{time.monotonic()}\n")


class SideBySide(Runner):
    def in_turns(self, servers, scenario):
        with LOG.open("a") as f:
            f.write(f"together {scenario} {' '.join(s.arm.name for s in servers)}\n")
        return [stitched([s.measure(scenario) for _ in range(2)]) for s in servers]


@pytest.hookimpl(optionalhook=True)
def pytest_kv_runner(config, framework, model):
    return (SideBySide if told("TOGETHER", False) else Runner)() if told("RUNNER", True) else None

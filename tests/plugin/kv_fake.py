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
        if str(scenario).startswith("capacity-"):
            return self.sized(scenario)
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

    def sized(self, scenario):
        """A pool of 1 GiB of which each precision takes exactly what arithmetic says; `SIZES` tells an arm's otherwise."""
        each = {"int8": 12240, "int4": 6480}.get(self.arm.name, 23040)
        sizes = {
            "kv_tokens": 2**30 // each,
            "kv_bytes": 2**30,
            "expected_bytes_per_token": each,
            "expected_by": "30 layers",
            "not_told": {},
        }
        sizes |= {"batch": {"requests": 1, "share": 0.9, "preempted": 0}} | told("SIZES", {}).get(self.arm.name, {})
        record = RequestRecord(
            index=0,
            sent_s=0.0,
            first_s=1.0,
            last_s=2.0,
            end_s=2.0,
            input_tokens=scenario.isl,
            output_tokens=scenario.osl,
            events=scenario.osl,
        )
        return Trace(
            scenario=str(scenario), arm=self.arm.name, run=self.run, workload=str(scenario), isl=scenario.isl, osl=scenario.osl,
            records=(record,), load={"asked": 1, "cores": 2, "foreign_cores": 1.9, "capacity": sizes},
        )  # fmt: skip


class Runner:
    run = 0

    def environment(self, arms):
        version = told("OTHER_VERSION", "1.0") if arms[0].build else told("VERSION", "1.0")
        subject = {"dist:engine": version, "cpus_allowed": told("CPUS", 2)}
        return {"identity": {"gpu": told("CPU", "Test CPU, 2 cores"), "model": "m"}, "subject": subject, "context": {"host": "h"}}

    def workload(self, scenario):
        return str(scenario)

    def score(self, scenario, arms):
        """Made-up scores: every arm's divergence is known. `controls` are the means of the floor and of the negative control."""
        with LOG.open("a") as f:
            f.write(f"score {scenario} {' '.join(a.name for a in arms)}\n")
        if told("PROBE_DIES"):
            raise UserError("transformers: ValueError: the engine's logits are not finite (log: /tmp/scores.log)")
        floor, negative = told("CONTROLS", [0.001, 1.0])
        for arm in arms:
            rng, kld = random.Random(arm.name), told("KLD", {}).get(arm.name, {"int8": 0.004, "int4": 0.05}.get(arm.name, 0.0))
            base = [rng.expovariate(0.4) for _ in range(256 * scenario.windows)]
            off = [rng.expovariate(1.0) for _ in base]
            tokens = {
                "nll": [b + told("NLL", {}).get(arm.name, 0.0) + (1e-6 if kld else 0.0) for b in base],
                "base_nll": base,
                "kld": [kld * v for v in off],
                "same": [int(kld * v < 0.4) for v in off],
                "chunk": [i // 256 for i in range(len(base))],
            }
            load = {
                "reads_back": scenario.scheme.reads_back,
                "scheme": str(scenario.scheme),
                "corpus": "made up",
                "seconds": 1.0,
                "cache_bytes": {"fp16": 1024, "int8": 544, "int4": 288}.get(arm.name),
            }
            if arm.name != scenario.reference:
                controls = {"floor": floor, "negative": negative}
                load["controls"] = {
                    name: {
                        "ppl_ratio": [1 + v, v / 9],
                        "kld.mean": [v, v / 9],
                        "kld.p99": [9 * v, None],
                        "kld.p999": [30 * v, None],
                        "top1": [1 - v / 2, v / 9],
                    }
                    for name, v in controls.items()
                }
                load |= {"precision": f"kv_dtype={arm.kv_dtype}", "garbage": told("GARBAGE", "")}
            yield Trace(
                scenario=str(scenario), arm=arm.name, run=1, workload=str(scenario), isl=512, osl=0, records=(), load=load, tokens=tokens
            )

    def canary(self):
        return {"on": f"{told('CORES', 2)} cores", "ms": {"memory": told("CANARY", {}).get(str(self.run), 10.0)}}

    @contextlib.contextmanager
    def start(self, arm, run, attempt):
        self.run = run
        with LOG.open("a") as f:
            f.write(f"start run{run} attempt{attempt} arm:{arm.name} t{time.monotonic()}\n")
        if arm.name == told("DIES_ARM"):
            raise UserError("engine died at start (exit code 1): this device has no such cache")
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

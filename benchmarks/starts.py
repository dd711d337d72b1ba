"""What a start costs beyond the engine's own, how long a stop takes, and what is left behind.

    python benchmarks/starts.py FRAMEWORK --python PYTHON [--model PATH] [--starts 20] [--serve-arg=ARG]

The engine alone is the same command line started by hand and asked for a token every 20 ms; the two take turns. Left behind is what
differs after all starts: processes, listening ports, open files and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from socket import create_server

import psutil

from pytest_kvcache import Arm, frameworks
from pytest_kvcache.core.gpus import find_gpu
from pytest_kvcache.core.models import find_model
from pytest_kvcache.harness.engine import EngineRunner, EngineSpec
from pytest_kvcache.harness.server import marked_processes

PROBE_S = 0.02


def alone(runner: EngineRunner) -> float:
    """Seconds until the engine, started by hand, gives a token."""
    launch = runner.launch(Arm())
    with create_server(("127.0.0.1", 0)) as probe:
        launch = replace(launch, port=probe.getsockname()[1])
    framework, began = runner.spec.framework, time.monotonic()
    body = json.dumps(framework.body(launch.model, "Hello", 1)).encode()
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    asked = urllib.request.Request(f"http://127.0.0.1:{launch.port}{framework.endpoint}", body, {"Content-Type": "application/json"})
    quiet = subprocess.DEVNULL
    with subprocess.Popen(framework.argv(launch), env=runner._env(launch), stdout=quiet, stderr=quiet, start_new_session=True) as engine:
        try:
            while True:
                try:
                    with ask(asked, timeout=60) as answer:
                        answer.read()
                    return time.monotonic() - began
                except OSError:
                    time.sleep(PROBE_S)
        finally:
            tree = [*psutil.Process(engine.pid).children(recursive=True), psutil.Process(engine.pid)]
            os.killpg(engine.pid, signal.SIGTERM)
            for each in psutil.wait_procs(tree, timeout=10)[1]:
                each.kill()


def ours(runner: EngineRunner) -> tuple[float, float]:
    """Seconds until our server is ready, and those that its stop takes."""
    with runner.start(Arm(), 1, 1) as server:
        ready = server.start_s
        began = time.monotonic()
    return ready, time.monotonic() - began


def left() -> dict[str, float]:
    me = psutil.Process()
    return {
        "processes below this one": len(me.children(recursive=True)), "processes with our marker": len(marked_processes()),
        "listening ports": sum(c.status == psutil.CONN_LISTEN for c in psutil.net_connections("tcp")), "open files": me.num_fds(),
        "threads": me.num_threads(), "memory MiB": round(me.memory_info().rss / 2**20, 1), "/dev/shm files": len(os.listdir("/dev/shm")),
        "machine memory in use MiB": round(psutil.virtual_memory().used / 2**20),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--serve-arg", action="append", default=[])
    asked = parser.parse_args()
    model = find_model(asked.model)
    assert model
    spec = EngineSpec(
        framework=frameworks.load(asked.framework), model=model, gpu=find_gpu("cpu"), python=asked.python, serve_args=tuple(asked.serve_arg)
    )
    with tempfile.TemporaryDirectory() as folder:
        runner = EngineRunner(spec, session_id="starts", logs=Path(folder) / "logs", say=print)
        ours(runner)  # what is done once: bytecode, caches
        before, by_hand, ready, stop = left(), [], [], []
        for _ in range(asked.starts):
            if len(by_hand) < 5:
                by_hand.append(alone(runner))
            one = ours(runner)
            ready.append(one[0])
            stop.append(one[1])
        after = left()
    print(f"engine alone, ready after: {', '.join(f'{s:.2f}' for s in by_hand)} s; median {statistics.median(by_hand):.2f} s")
    print(f"ours, ready after: median {statistics.median(ready):.2f} s of {len(ready)}, longest {max(ready):.2f} s")
    print(f"stop: median {statistics.median(stop):.2f} s, longest {max(stop):.2f} s")
    for name, value in after.items():
        print(f"{name}: {before[name]} before, {value} after")


if __name__ == "__main__":
    main()

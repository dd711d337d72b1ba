"""A divergence of a whole vocabulary takes the memory of a step, not of a text. KV_PROBES_FULL=1: at the size that is promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest_kvcache

PROBES = Path(pytest_kvcache.__file__).parent / "probes"
GIB, STEP, VOCABULARY = 2**30, 64, 50_000
TOKENS = 100_000 if os.environ.get("KV_PROBES_FULL") else 2_000
# Of a process of its own. Where the system tells it, the peak since it began: getrusage's is at least that of the process that made it.
SCRIPT = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from lockstep import walk

def peak():
    try:
        line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

class Noise:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
    def logits(self, tokens):
        return self.rng.standard_normal((len(tokens), VOCABULARY), dtype=np.float32)
    def cache_bytes(self):
        return 0

TOKENS, STEP, VOCABULARY = map(int, sys.argv[2:])
windows = [{"tokens": list(range(1000)), "first": 1} for _ in range(TOKENS // 1000)]
before = peak()
found = walk({"windows": windows, "step": STEP, "reference": "a"}, {"a": lambda _: Noise(1), "b": lambda _: Noise(2)})
told = {"bytes": peak() - before, "tokens": len(found["b/kld"]), "kld": float(found["b/kld"].mean()), "compare_s": found["told"]["compare_s"]}
print(json.dumps(told))
"""


def test_a_long_text_of_a_great_vocabulary_stays_below_a_gibibyte():
    given = [sys.executable, "-c", SCRIPT, str(PROBES), str(TOKENS), str(STEP), str(VOCABULARY)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tokens"] == TOKENS - TOKENS // 1000
    # Of normal logits with variance 1: log E[e^y] - log E[e^x] cancel, and E_p[x - y] is the mean of a tilted normal, 1.
    assert 0.98 < told["kld"] < 1.02
    assert STEP * VOCABULARY * 4 < told["bytes"] < (GIB if TOKENS > 2_000 else GIB // 4), told

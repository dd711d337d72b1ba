"""Made-up traces of any size. As a script, in a process of its own: `make N FOLDER` or `read FILE`; prints its memory as JSON."""

import json
import resource
import sys
from pathlib import Path

STREAMS, OSL = 64, 128


def synthetic(n):
    """A closed loop of `n` requests of 128 tokens, one in a thousand refused in words of its own; no value object is shared."""
    import numpy as np

    from pytest_kvcache.core.record import RequestRecord, Trace

    rng = np.random.default_rng(n)
    sent = np.arange(n) // STREAMS * 2_500_000_000 + rng.integers(0, 10**9, n)
    first = sent + rng.integers(20_000_000, 90_000_000, n)
    last = first + rng.integers(900_000_000, 1_300_000_000, n)
    refused = rng.random(n) < 0.001
    records = []
    for i in range(n):
        s, f, e = int(sent[i]) / 1e9, int(first[i]), int(last[i])
        if refused[i]:
            request = RequestRecord(i, s, end_s=s + 1e-3, status=500, outcome="http_status", error=f"HTTP 500: request {i} was refused")
        else:
            outcome = "".join(("o", "k"))  # as a decoder makes it: another object each time
            request = RequestRecord(i, s, None, 0.0, f / 1e9, f / 1e9, e / 1e9, (e + 100_000) / 1e9, 512, OSL, 1, OSL, 200, outcome, "", ())
        records.append(request)
    tokens, seconds = int(n - refused.sum()) * (OSL - 1), int(last[-1] // 10**9) + 1
    gaps = list(range(8000, 12000))
    share, rest = divmod(tokens, len(gaps))
    itl = {"us": gaps, "n": [share + (i < rest) for i in range(len(gaps))]}
    arrivals = {"ms": list(range(0, seconds * 1000, 10)), "n": [OSL] * (seconds * 100)}
    return Trace(
        scenario="synthetic", arm="base", run=1, workload="w", isl=512, osl=OSL, records=tuple(records), concurrency=STREAMS,
        load={"cores": 2}, itl=itl, arrivals=arrivals,
    )  # fmt: skip


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(what, *args):
    from pytest_kvcache.core.metrics import measure
    from pytest_kvcache.core.validity import trace_problem
    from pytest_kvcache.harness.traces import keep, read

    measure(synthetic(1000))  # what is loaded once
    before = peak()
    if what == "make":
        trace = synthetic(int(args[0]))
        said = {"metrics": measure(trace), "problem": trace_problem(trace), "row": keep(Path(args[1]), "b", trace)}
    else:
        (trace,) = read(Path(args[0]))
        said = {"metrics": measure(trace)}
    print(json.dumps(said | {"requests": len(trace.records), "before": before, "peak": peak()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

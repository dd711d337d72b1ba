"""Cases of log-probabilities on the product: perplexities, whether two may be compared, whether a cache was read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_kvcache.core.gate import PASS
from pytest_kvcache.core.perplexity import NotScored, comparable, perplexity, scored
from pytest_kvcache.core.quality import NOT_SEEN, not_seen, within
from pytest_kvcache.core.schemes import Scheme

REASONS = {"scheme": "scoring_scheme_differs", "bos": "bos_differs"}


def _numbers(logprobs: Sequence[Any]) -> list[float | None]:
    return [None if v is None else float(v) for v in logprobs]


def one_text(case: Mapping[str, Any]) -> dict[str, Any]:
    try:
        nll = scored(_numbers(case["logprobs"]))
    except NotScored as e:
        return {"outcome": "error", "error_class": e.kind, "position": e.position}
    return {"outcome": "ok", "scored_tokens": len(nll), "nll_sum": math.fsum(nll), "ppl": perplexity(nll)}


def _compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    if not (why := comparable(one, other)):
        return {"comparison": "comparable", "reason": None}
    return {"comparison": "not_comparable", "reason": REASONS[why.partition(":")[0]]}


def two_schemes(case: Mapping[str, Any]) -> dict[str, Any]:
    """One window of which all is scored as if it had a token before it, and halves of windows of four."""
    a, b = case["scheme_a"], case["scheme_b"]
    parts = [window[i] for window, at in zip(b["windows"], b["scored"], strict=True) for i in at]
    size, first = len(b["windows"][0]), b["scored"][0][0]
    one, other = Scheme(window=case["tokens"]), Scheme(window=size, first=first)
    return {"ppl_a": perplexity(a["nll"]), "ppl_b": perplexity(parts), **_compared({"scheme": str(one)}, {"scheme": str(other)})}


def two_servers(case: Mapping[str, Any]) -> dict[str, Any]:
    texts = [scored(_numbers(run["logprobs"])) for run in case["runs"]]
    one, other = ({"bos": run["bos"]} for run in case["runs"])
    return {"scored_tokens": [len(t) for t in texts], "ppl": [perplexity(t) for t in texts], **_compared(one, other)}


def two_precisions(case: Mapping[str, Any]) -> dict[str, Any]:
    step = {"single_prefill": 0}
    schemes = [Scheme(step=step.get(run["scored_in"], 16)) for run in case["runs"]]
    why = not_seen(None, all(s.reads_back for s in schemes))
    return {"verdict": "invalid" if why else PASS, "reason": "kv_cache_not_exercised" if NOT_SEEN in why else None}


def limited(case: Mapping[str, Any]) -> dict[str, Any]:
    rows = [within(r["baseline"], r["current"], case["policy"]["max_ppl_increase"]) for r in case["rows"]]
    words = ["suspicious" if why.startswith("suspicious") else word for word, why in rows]
    return {"rows": words, "increases": [r["current"] / r["baseline"] - 1 for r in case["rows"]]}


ASKED: tuple[tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
    ("logprobs", one_text), ("scheme_a", two_schemes), ("rows", limited),
)  # fmt: skip


def found(case: Mapping[str, Any]) -> dict[str, Any]:
    for field, answer in ASKED:
        if field in case:
            return answer(case)
    return two_servers(case) if "bos" in case["runs"][0] else two_precisions(case)


def wanted(case: Mapping[str, Any]) -> dict[str, Any]:
    if "rows" in case:
        return {"rows": [r["expected"] for r in case["rows"]], "increases": [r["increase"] for r in case["rows"]]}
    return dict(case["expected"])

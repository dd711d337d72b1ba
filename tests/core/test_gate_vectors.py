"""The gate against answers worked out beforehand. KV_VECTORS names another file of the same form.

A vector goes the way of the plugin: its baseline is a document, looked up for what was measured now, and judged.
"""

import json
import math
import os
from pathlib import Path

import pytest

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.gate import INCONCLUSIVE, NO_BASELINE, Limit, Rule, judge
from pytest_kvcache.core.metrics import Metric
from pytest_kvcache.core.perplexity import paired_log_ratio
from pytest_kvcache.core.samples import estimate_rank, least_queries, order_bound
from pytest_kvcache.core.stats import ALPHA, benjamini_hochberg, holm
from pytest_kvcache.core.units import factor

FILE = Path(os.environ.get("KV_VECTORS") or Path(__file__).with_name("gating_vectors.json"))
VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
KEY = "vectors/one/base/metric"
MANY = 10**6  # requests a run where a vector does not say how many


def numbers(side):
    return [SPECIAL.get(v, v) if isinstance(v, str) else v for v in side.get("runs") or []]


def environment(side):
    return {"identity": {"gpu": side.get("device")}, "subject": {}, "context": {}}


def requests(*sides):
    """Requests a run of the first side that says so."""
    return next((side["n_per_run"] for side in sides if side and "n_per_run" in side), MANY)


def document(side, other):
    """The baseline of a vector as the product keeps it; an empty one where there is none."""
    doc = stored.empty("gpu", "framework", "model")
    values = numbers(side or {})
    labels = [str(label) for label in (side or {}).get("sessions") or ["d1"] * len(values)]
    if not side:
        return doc
    doc["sessions"] = {label: {"started": label, "environment": environment(side)} for label in labels}
    n = requests(side, other)
    runs = [{"session": label, "value": value, "n": n, "failed": 0} for label, value in zip(labels, values, strict=True)]
    entry = {"unit": side.get("unit", ""), "definition": side.get("metric_definition", ""), "workload": side.get("workload_hash", "")}
    doc["entries"][KEY] = entry | {"better": "", "runs": runs}
    return doc


def physical_limit(config, base, new):
    """The bound of a vector, which is in the baseline's unit."""
    if config.get("physical_limit") is None:
        return None
    scale = factor(base.get("unit", ""), new.get("unit", "")) or 1.0
    tolerance = {"tolerance": config["physical_tolerance"]} if "physical_tolerance" in config else {}
    return Limit(value=config["physical_limit"] * scale, at_most=config["direction"] == "higher", reason="the vector", **tolerance)


def judged(case):
    config, base, new = case["config"], case["baseline"] or {}, case["new"] or {}
    metric = Metric("metric", new.get("unit", base.get("unit", "")), config["direction"], new.get("metric_definition", ""))
    now = stored.Current(environment=environment(new), workload=new.get("workload_hash", ""))
    prior = 0.0 if base.get("interleaved") else config.get("session_prior", Rule().session_prior)
    runs = numbers(new)
    return judge(
        stored.lookup(document(case["baseline"], new), KEY, metric, now), runs,
        better=metric.better, margin=config["margin"], rule=Rule(session_prior=prior, alpha=1 - config.get("confidence", 1 - ALPHA)),
        unit=metric.unit, definition=metric.definition, samples=[requests(new, base)] * len(runs), final=True,
        failed=max(0, new.get("failed_requests", 0) - config.get("max_failed", 0)), quantile=config.get("percentile"),
        limit=physical_limit(config, base, new),
    )  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in VECTORS["cases"]])
def test_vectors(case):
    found = judged(case)
    accepted = {case["expected"], *case.get("also_acceptable", [])}
    if case.get("reason") == "no_baseline":
        accepted = {NO_BASELINE}  # a verdict of its own here: it fails unless the session records
    assert found.verdict in accepted, found
    assert found.verdict != INCONCLUSIVE or found.more_runs or found.certifiable or "are the least" in found.reason


def of(name):
    return [pytest.param(c, id=f"{name}-{i}") for i, c in enumerate(VECTORS["functions"][name]["cases"])]


@pytest.mark.parametrize("case", of("loadgen_min_queries"))
def test_fewest_queries_of_an_early_stopping_estimate(case):
    assert least_queries(case["p"]) == case["n"]


@pytest.mark.parametrize("case", of("loadgen_t"))
def test_the_rank_of_an_early_stopping_estimate(case):
    assert estimate_rank(case["n"], case["p"]) == case["t"]


@pytest.mark.parametrize("case", of("order_bound_min_n"))
def test_fewest_samples_whose_largest_is_a_bound(case):
    assert order_bound(case["p"], case["confidence"]) == case["n"]


@pytest.mark.parametrize("case", of("holm"))
def test_holm(case):
    assert holm(case["p"], case["alpha"]) == case["reject"]


@pytest.mark.parametrize("case", of("benjamini_hochberg"))
def test_benjamini_and_hochberg(case):
    assert benjamini_hochberg(case["p"], case["q"]) == case["reject"]


@pytest.mark.parametrize("case", of("paired_log_ratio"))
def test_the_ratio_of_perplexities(case):
    ratio, error = paired_log_ratio(case["base_nll"], case["new_nll"], case["tokens"])
    assert ratio == pytest.approx(case["mean_log_ratio"], abs=case["tolerance"])
    assert error == pytest.approx(case["se_chunk"], abs=case["tolerance"])

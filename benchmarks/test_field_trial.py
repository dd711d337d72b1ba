"""The recorded field trial (docs/field_trial.md) under today's gate: what its runs and canaries said then, they must say now."""

import json
from pathlib import Path

import pytest

from pytest_kvcache.core.canary import side
from pytest_kvcache.core.gate import REGRESSION, Base, judge, rule_for
from pytest_kvcache.core.metrics import find_metric

METRICS = ("output_tok_s", "tpot_ms.p50", "ttft_ms.p50")
MARGIN = 0.10
FILES = [Path(__file__).parent / f"{name}.jsonl" for name in ("field_trial", "field_trial_2")]
ROWS = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]


def canary(row):
    """A reading as it is written now."""
    found = row.get("canary")
    return found and {"on": f"{found['cores']} cores", "ms": {"memory": found["ms"]}}


def sessions(kind):
    """The valid runs of every session of a kind, with those of the baseline before it."""
    base = []
    for one in ROWS:
        if one["kind"] == "baseline":
            base = one["rows"]
        elif one["kind"] == kind:
            yield base, [row for row in one["rows"] if row["valid"]]


def judged(base, new):
    for metric in METRICS:
        if not all(row.get(metric) for row in (*base, *new)):
            continue
        beside = side([canary(row) for row in base])
        stored = Base(sessions=(tuple(row[metric] for row in base),), canary_on=beside.on, canary_ms=beside.ms)
        values = [row[metric] for row in new]
        yield judge(
            stored, values, better=find_metric(metric).better, margin=MARGIN, rule=rule_for("cpu", "ci"), final=True,
            canary=[canary(row) for row in new],
        ).verdict  # fmt: skip


@pytest.mark.parametrize(("kind", "least", "most"), [("unchanged", 0, 0), ("slower", 19, 20)])
def test_what_it_said_it_says(kind, least, most):
    told = [REGRESSION in judged(base, new) for base, new in sessions(kind)]
    assert len(told) == 20
    assert least <= sum(told) <= most

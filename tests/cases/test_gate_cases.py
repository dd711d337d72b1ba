"""The cases of kind `gate`: rows of numbers, repeats, renamed and colliding ids, and two workers of xdist."""

import json
import re

import pytest

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.gate import INCONCLUSIVE, PASS, fails
from pytest_kvcache.core.lint import unclaimed
from pytest_kvcache.core.metrics import find_metric
from pytest_kvcache.harness.baselines import load_baseline, save_baseline

from ..plugin import conftest as plugin_project
from .catalogue import cases
from .gate_case import at_the_margin, classes, judged, row_problem

GATES = cases("gate")
ABOUT = {"started": "2026-01-01T00:00:00Z", "environment": {"identity": {}, "subject": {}, "context": {}}}
NOW = stored.Current(environment=ABOUT["environment"], workload="w")
METRIC = find_metric("ttft_ms.p50")


def rows(case, _):
    assert [p for row in case["rows"] if (p := row_problem(row, case.get("policy", {})))] == []


def repeats(case, _):
    """Several values of one side. One wild value of five is shown, whatever the verdict: what is left of `pass` is said with it."""
    verdict = judged(case, case["policy"])
    if "outlier" in case.get("warnings", ()):
        assert verdict.verdict in (PASS, INCONCLUSIVE), verdict
        said = " ".join([verdict.reason, *verdict.notes])
        levels = [float(level) for level in re.findall(r"near (\S+?)(?:,|;| |$)", said)]
        outlier = max(case["current_repeats"], key=lambda v: abs(v - case["expected_value"]))
        assert "unstable" in said or "outlier" in said
        assert any(level == pytest.approx(case["expected_value"], rel=0.02) for level in levels), said
        assert any(level == pytest.approx(outlier, rel=0.02) for level in levels), said
    else:
        assert case["expected"] in classes(verdict), verdict


def document(ids):
    """A baseline of these keys, each with numbers of its own."""
    recordings = [
        stored.Recording(key=key, metric=METRIC, workload="w", runs=({"value": 1.0 + i, "n": 8, "failed": 0},) * 5)
        for i, key in enumerate(ids)
    ]
    return stored.merge(stored.empty("cpu", "f", "m"), recordings, session="s", about=ABOUT, now_iso="2026-01-01T00:00:00Z", replace=False)


def renamed(case, _):
    doc, wanted = document(case["baseline_ids"]), case["expected"]
    assert unclaimed(doc["entries"], case["current_ids"]) == sorted(wanted.get("orphans", []))
    for key in set(case["current_ids"]) - set(case["baseline_ids"]):
        verdict = judged({"metric": "ttft_ms", "current": 100.0}, {})
        assert stored.lookup(doc, key, METRIC, NOW).missing
        assert wanted["outcome"] in classes(verdict)
        failed = fails(verdict.verdict, verdict.reason, profile="ci", strict=True, recording=False)
        assert failed == (wanted["strict"] == "fail")


def colliding(case, tmp_path):
    ids, wanted = case["ids"], case["expected"]
    path = save_baseline(tmp_path, document(ids))
    assert len(json.loads(path.read_text())["entries"]) == wanted["distinct_keys"]
    again = load_baseline(tmp_path, "cpu", "f", "m")
    found = [stored.lookup(again, key, METRIC, NOW).runs for key in ids]
    assert (found == [(1.0 + i,) * 5 for i in range(len(ids))]) == wanted["round_trip"]


def project(folder):
    """A throw-away project of two test files whose engine is made up (tests/plugin)."""
    for name, text in (("conftest.py", (plugin_project.HERE / "kv_fake.py").read_text()), ("pytest.ini", "[pytest]\n"),
                       ("test_fixed.py", plugin_project.SUITE), ("test_other.py", plugin_project.OTHER)):  # fmt: skip
        (folder / name).write_text(text)
    (folder / "tmp").mkdir()
    return plugin_project.Project(folder)


def workers(case, tmp_path):
    """Measured tests under xdist: the workers take turns, as the plan says, and their verdicts reach the controller."""
    pytest.importorskip("xdist")
    made, wanted = project(tmp_path), case["expected"]
    assert "serialised" in wanted["outcome_any_of"]
    assert made.run("--kv-record=missing", report=False).code == 0
    found = [made.run("-n", str(n), seed=1) for n in (0, 1, 2)]
    for result in found:
        times = [(line.split()[0], float(line.rsplit("t", 1)[1])) for line in result.log if line.startswith(("start", "stop"))]
        in_turn = [kind for kind, _ in sorted(times, key=lambda e: e[1])] == ["start", "stop"] * (len(times) // 2)
        assert in_turn != wanted["measured_in_parallel"]
        assert ("INTERNALERROR" in result.out) == wanted["internal_error"]
        assert (set(result.verdicts.values()) == {"pass"}) == wanted["results_reach_controller"]
        fewest, most = re.search(r"(\d+) to (\d+) server start\(s\)", result.out).groups()
        assert (int(fewest) <= len(result.starts) <= int(most)) == wanted["message_matches_behaviour"]
    assert found[0].verdicts == found[1].verdicts == found[2].verdicts


# What a case has that no other has, and how it is run.
FORMS = {"rows": rows, "current_repeats": repeats, "baseline_ids": renamed, "ids": colliding, "steps": workers}


@pytest.mark.parametrize("case", GATES)
def test_case_gate(case, tmp_path):
    form = next((run for key, run in FORMS.items() if key in case), None)
    assert form, f"this runner does not know the form of {case['case']}"
    form(case, tmp_path)


@pytest.mark.parametrize("case", [p for p in GATES if "rows" in p.values[0]])
def test_a_wrong_answer_to_a_row_is_told_from_a_right_one(case):
    other, policy = {"pass": "regression", "regression": "pass"}, case.get("policy", {})
    for row in (r for r in case["rows"] if not at_the_margin(r, policy)):
        assert row_problem(row | {"expected": other.get(row["expected"], "pass")}, policy), row

"""Stored numbers: found only for the same thing, never pruned, replaced with their history."""

import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import baseline as stored
from pytest_kvcache.core.gate import RULES
from pytest_kvcache.core.metrics import find_metric

METRIC = find_metric("output_tok_s")
GPU = RULES["gpu"]
KEY = "fixed_length/isl8-osl4-c1/base/output_tok_s"


def environment(gpu="A", version="1"):
    return {"identity": {"gpu": gpu}, "subject": {"dist:engine": version}, "context": {}}


def about(started="2026-01-01T00:00:00Z", **env):
    return {"started": started, "plugin": "0", "environment": environment(**env)}


def recording(*values, key=KEY, workload="w"):
    return stored.Recording(
        key=key,
        metric=METRIC,
        workload=workload,
        runs=tuple({"value": v, "n": 8, "failed": 0, "canary": {"on": "2 cores", "ms": {"memory": 10.0}}} for v in values),
    )


def current(workload="w", **env):
    return stored.Current(environment=environment(**env), workload=workload)


def merge(doc, *recordings, session="s1", replace=False, **env):
    return stored.merge(doc, recordings, session=session, about=about(**env), now_iso="2026-01-02T00:00:00Z", replace=replace)


@pytest.fixture
def doc():
    return merge(stored.empty("cpu", "f", "m"), recording(1.0, 2.0), recording(3.0, key=KEY + "2"))


def test_what_was_stored_is_found_by_session(doc):
    doc = merge(doc, recording(4.0, 5.0), session="s2")
    assert stored.lookup(doc, KEY, METRIC, current()).sessions == ((1.0, 2.0), (4.0, 5.0))


def test_the_canary_counts_only_when_it_is_known_of_all_runs_and_of_one_place(doc):
    now = stored.Current(environment=environment(), workload="w")
    found = stored.lookup(doc, KEY, METRIC, now)
    assert (found.canary_on, found.canary_ms) == ("2 cores", {"memory": (10.0, 10.0)})
    other = copy.deepcopy(doc)
    other["entries"][KEY]["runs"][0]["canary"]["on"] = "4 cores"
    assert stored.lookup(other, KEY, METRIC, now).canary_on == ""
    del doc["entries"][KEY]["runs"][0]["canary"]
    found = stored.lookup(doc, KEY, METRIC, now)
    assert (found.canary_on, found.canary_ms) == ("", {})


def test_merging_prunes_nothing_and_leaves_the_old_document_alone(doc):
    new = merge(doc, recording(9.0), session="s2")
    assert new["entries"][KEY + "2"] == doc["entries"][KEY + "2"]
    assert len(doc["entries"][KEY]["runs"]) == 2
    assert set(new["sessions"]) == {"s1", "s2"}


@pytest.mark.parametrize(("now", "words"), [
    (current(gpu="B"), "gpu: A -> B"), (current(workload="other"), "workload: 'w' -> 'other'"),
])  # fmt: skip
def test_a_number_of_something_else_is_not_compared(doc, now, words):
    found = stored.lookup(doc, KEY, METRIC, now)
    assert words in found.mismatch
    assert found.runs == ()


def test_another_definition_or_a_missing_session_is_not_compared(doc):
    doc["entries"][KEY]["definition"] = "output_tok_s.v0 = something"
    assert "definition" in stored.lookup(doc, KEY, METRIC, current()).mismatch
    doc["sessions"].clear()
    assert "not described" in stored.lookup(doc, KEY, METRIC, current()).mismatch


def test_an_upgrade_is_compared(doc):
    assert stored.lookup(doc, KEY, METRIC, current(version="2")).runs == (1.0, 2.0)


def test_replacing_keeps_the_history_in_order(doc):
    second = merge(doc, recording(10.0), session="s2", replace=True)
    third = merge(second, recording(20.0), session="s3", gpu="B")
    entry = third["entries"][KEY]
    assert [r["value"] for r in entry["runs"]] == [20.0]
    assert [[r["value"] for r in old["runs"]] for old in entry["supersedes"]] == [[1.0, 2.0], [10.0]]
    assert entry["supersedes"][1]["why"] == "gpu: A -> B"


def test_what_a_gate_needs():
    cpu, gpu = RULES["cpu"], RULES["gpu"]
    none, five = stored.Base(missing="none"), stored.Base(sessions=((1.0,) * 5,))
    two, ten = stored.Base(sessions=((1.0, 1.0),)), stored.Base(sessions=((1.0, 1.0),) * 5)
    six = stored.Base(sessions=((1.0, 1.0),) * 3)
    for base, rule, record, smoke, expected in [
        (none, cpu, None, False, "nothing"), (none, cpu, "missing", False, "record"), (five, cpu, "missing", False, "judge"),
        (five, cpu, "all", False, "record"), (five, cpu, None, False, "judge"), (two, gpu, None, False, "nothing"),
        (two, gpu, "missing", False, "record"), (ten, gpu, "missing", False, "judge"), (none, cpu, None, True, "report"),
        (five, cpu, None, True, "report"), (stored.Base(mismatch="x"), cpu, "missing", False, "nothing"), (stored.Base(mismatch="x"), cpu, "all", False, "record"),
        (six, gpu, "missing", False, "judge"), (six, gpu, "missing", True, "report"), (six, gpu, "all", False, "record"),
        (two, gpu, "missing", True, "record"), (stored.Base(mismatch="x"), gpu, None, False, "nothing"),
    ]:  # fmt: skip
        assert stored.need(base, rule, record=record, smoke=smoke) == expected, (base, record)


def test_differences_are_shown_against_the_newest_environment(doc):
    doc = merge(doc, recording(4.0), session="s2", started="2026-03-01T00:00:00Z", version="7")
    assert stored.newest_environment(doc, KEY, environment())["subject"] == {"dist:engine": "7"}
    assert stored.newest_environment(doc, "no/such/gate/x", environment()) is None


def test_a_baseline_gathers_runs_until_there_are_five_sessions_or_as_many_runs():
    sessions = [((1.0, 1.0),) * n for n in range(1, 7)]
    assert [stored.incomplete(stored.Base(sessions=s), GPU) for s in sessions] == [True] * 4 + [False] * 2
    assert not stored.incomplete(stored.Base(sessions=((1.0,) * 10,)), GPU)
    assert not stored.incomplete(stored.Base(sessions=((1.0,) * 5,)), RULES["cpu"])


def test_runs_that_passed_are_only_added_to_the_numbers_they_passed_against(doc):
    passed = dataclasses.replace(recording(1.5), judged=(1.0, 2.0))
    assert stored.still_wanted(doc, passed, environment())
    with_more = merge(doc, recording(4.0), session="s2")
    assert stored.still_wanted(with_more, passed, environment()), "a session that ended before only added to them"
    for other in (merge(doc, recording(10.0), session="s2", replace=True), merge(doc, recording(10.0), session="s2", gpu="B")):
        assert not stored.still_wanted(other, passed, environment())
        assert stored.still_wanted(other, recording(1.5), environment()), "what was not judged is stored whatever lies there"


ACTS = st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from(["w", "v"]), st.booleans(), st.integers(1, 3)), min_size=1, max_size=6)


@given(ACTS)
def test_history_only_grows(acts):
    """Whatever is recorded in whatever order: every run stays, once, with its session, and what was superseded never changes."""
    doc, kept, before = stored.empty("gpu", "f", "m"), [], []
    for number, (gpu, workload, replace, runs) in enumerate(acts):
        values = [100.0 * (number + 1) + i for i in range(runs)]
        doc = merge(doc, recording(*values, workload=workload), session=f"s{number}", replace=replace, gpu=gpu)
        kept += [(f"s{number}", v) for v in values]
        entry = doc["entries"][KEY]
        history = entry.get("supersedes", [])
        assert [(r["session"], r["value"]) for part in (*history, entry) for r in part["runs"]] == kept
        assert history[: len(before)] == before
        assert len({doc["sessions"][r["session"]]["environment"]["identity"]["gpu"] for r in entry["runs"]}) == 1
        assert stored.lookup(doc, KEY, METRIC, current(gpu=gpu, workload=workload)).runs[-1] == values[-1]
        before = history

"""A gate that is an improvement session after session has a stale baseline: how the sessions are counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.gate import IMPROVEMENT, INCONCLUSIVE, PASS, REGRESSION
from pytest_kvcache.core.stale import Compared, counted, mark

ROW = st.lists(st.sampled_from([IMPROVEMENT, PASS, REGRESSION, INCONCLUSIVE]), max_size=12)


def gate(verdict, name="g", stored="a"):
    return Compared(name=name, stored=stored, verdict=verdict)


@given(ROW)
def test_the_count_is_the_number_of_improvements_at_the_end(verdicts):
    counts = {}
    for verdict in verdicts:
        counts = json.loads(json.dumps(counted(counts, [gate(verdict)])))  # as the cache keeps it
    at_the_end = next((n for n, v in enumerate(reversed(verdicts)) if v != IMPROVEMENT), len(verdicts))
    assert counts.get("g", {}).get("sessions", 0) == at_the_end


def test_other_stored_runs_begin_anew():
    counts = counted(counted({}, [gate(IMPROVEMENT)]), [gate(IMPROVEMENT, stored="b")])
    assert counts == {"g": {"stored": "b", "sessions": 1}}


def test_a_gate_that_was_not_compared_keeps_its_count():
    counts = counted(counted({}, [gate(IMPROVEMENT)]), [gate(IMPROVEMENT, "other")])
    assert {name: c["sessions"] for name, c in counts.items()} == {"g": 1, "other": 1}


@pytest.mark.parametrize("before", [None, 3, [], "x", {"g": 3}, {"g": {"stored": "a"}}, {"g": {"stored": 1, "sessions": 2}},
                                    {"g": {"stored": "a", "sessions": "2"}}, {"g": {"stored": "a", "sessions": True}}])  # fmt: skip
def test_what_no_session_has_counted_counts_for_nothing(before):
    assert counted(before, [gate(IMPROVEMENT)]) == {"g": {"stored": "a", "sessions": 1}}


def test_a_mark_tells_runs_and_their_grouping_apart_and_survives_a_file():
    runs = ((1.0, 2.5), (3.1,))
    assert mark(runs) == mark(json.loads(json.dumps(runs)))
    assert len({mark(runs), mark(((1.0, 2.5, 3.1),)), mark(((1.0, 2.5), (3.2,))), mark(())}) == 4

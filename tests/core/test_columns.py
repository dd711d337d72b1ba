"""Columns hold requests exactly: every float bit for bit, every None, every text."""

import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.columns import TEXTS, Columns, records_of
from pytest_kvcache.core.record import REQUEST_COLUMNS, RequestRecord

TIME = st.floats(allow_nan=False)
COUNT = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(codec=None), max_size=8)
RECORDS = st.builds(
    RequestRecord, index=COUNT, sent_s=TIME, scheduled_s=st.none() | TIME, connect_s=TIME, first_s=st.none() | TIME, answer_s=st.none() | TIME,
    last_s=st.none() | TIME, end_s=st.none() | TIME, input_tokens=st.none() | COUNT, output_tokens=st.none() | COUNT, first_event_tokens=COUNT,
    events=COUNT, status=st.none() | COUNT, outcome=st.sampled_from(["ok", "bad_json"]) | TEXT, error=TEXT, notes=st.lists(TEXT, max_size=3).map(tuple),
)  # fmt: skip


def bits(record):
    """What tells two records apart, -0.0 from 0.0 too."""
    values = [getattr(record, name) for name in REQUEST_COLUMNS]
    return [(type(v).__name__, struct.pack("<d", v) if isinstance(v, float) else v) for v in values]


@given(st.lists(RECORDS, max_size=6))
def test_requests_come_back_exactly(records):
    columns = Columns(records)
    back = records_of(columns.__getitem__, {name: columns.texts(name) for name in TEXTS})
    assert [bits(r) for r in back] == [bits(r) for r in records]


def test_what_never_came_is_nan_or_minus_one_and_texts_are_places_in_a_table():
    columns = Columns(
        [RequestRecord(0, 1.0), RequestRecord(1, 2.0, scheduled_s=1.5, output_tokens=7, outcome="short_output", notes=("x", "y"))]
    )
    assert np.isnan(columns["first_s"]).all()
    assert columns["output_tokens"].tolist() == [-1, 7]
    assert (columns["outcome"].tolist(), columns.texts("outcome")) == ([0, 1], ["ok", "short_output"])
    assert columns.texts("notes") == [(), ("x", "y")]
    assert columns.ok.tolist() == [True, False]
    assert columns.start_s.tolist() == [1.0, 1.5]


def test_no_requests_are_no_rows():
    assert len(Columns([])) == 0
    assert Columns([]).ok.tolist() == []


def test_a_load_in_which_all_failed_has_none_that_is_ok():
    assert not Columns([RequestRecord(0, 0.0, outcome="stall")]).ok.any()

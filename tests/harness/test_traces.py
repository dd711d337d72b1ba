"""Raw traces on disk: exact, small in memory, and every fault of a file is one line that costs no other trace."""

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_kvcache.core.record import REQUEST_COLUMNS, RequestRecord, Trace
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.traces import COLUMNS, keep, merge, read

GOOD = RequestRecord(0, 0.1, None, 0.0, 0.30000000000000004, 0.3, 1 / 3, 0.5, 4, 2, 1, 2, 200, "ok", "", ("finish_missing", "many"))
BAD = RequestRecord(1, 0.1, 0.05, end_s=0.2, outcome="bad_json", error="ünïcode\0 \ud800\n\0")
COUNTED = Trace(
    scenario="s", arm="base", run=1, workload="w", isl=4, osl=2, records=(GOOD, BAD), concurrency=2, load={"cores": 2, "client": {"lag": [0.5]}},
    itl={"us": [-3, 10, 20_000_000], "n": [1, 2, 3]}, arrivals={"ms": [0, 7], "n": [1, 2.5]},
)  # fmt: skip
MIXED = Trace(scenario="m", arm="base", run=1, workload="w", isl=4, osl=2, records=(GOOD, BAD), lengths={"isl": [4, 9], "osl": [2, 1]})
EMPTY = Trace(scenario="e", arm="base", run=2, workload="", isl=4, osl=2, records=(), itl={"us": [], "n": []})
PLAIN = Trace(scenario="p", arm="kv-fp8", run=3, workload="v", isl=4, osl=2, records=(BAD, BAD, GOOD), concurrency=None)
MILLION = 1_000_000


def kept(folder, *traces):
    rows = [keep(folder, "b", t) for t in traces]
    assert [row["lost"] for row in rows] == [None] * len(traces)
    return [folder / row["file"] for row in rows]


def test_traces_come_back_exactly_alone_and_together(tmp_path):
    traces = [COUNTED, EMPTY, MIXED, PLAIN]
    files = kept(tmp_path, *traces)
    assert [read(f) for f in files] == [[t] for t in traces]
    assert len(set(files)) == 4
    digest, lost = merge(tmp_path / "run" / "records.npz", files)
    assert lost == {}
    assert read(tmp_path / "run" / "records.npz") == traces
    assert repr(read(tmp_path / "run" / "records.npz")) == repr(traces)
    assert len(digest) == 64


def test_a_file_of_a_day_before_lengths_were_kept_is_read_as_it_was(tmp_path):
    (new,) = kept(tmp_path, COUNTED)
    with np.load(new) as found:
        arrays = {name: found[name] for name in found.files if not name.startswith("lengths_")}
    about = json.loads(arrays["about"].tobytes())
    for row in about["traces"]:
        del row["lengths"]
    old = tmp_path / "old.npz"
    np.savez(old, **arrays | {"about": np.frombuffer(json.dumps(about).encode(), dtype="u1")})
    assert read(old) == [COUNTED]
    _, lost = merge(tmp_path / "both.npz", [old, new])
    assert not lost and read(tmp_path / "both.npz") == [COUNTED, COUNTED]


def test_a_session_without_a_trace_has_a_file_without_rows(tmp_path):
    merge(tmp_path / "records.npz", [])
    assert read(tmp_path / "records.npz") == []


def test_the_row_of_a_trace_says_where_it_is(tmp_path):
    row = keep(tmp_path, "b", PLAIN)
    assert row == {"scenario": "p", "arm": "kv-fp8", "run": 3, "workload": "v", "requests": 3, "file": "b-0.npz", "lost": None}


def test_the_file_is_arrays_that_numpy_reads_without_pickles(tmp_path):
    files = kept(tmp_path, COUNTED, PLAIN)
    merge(tmp_path / "records.npz", files)
    columns = np.load(tmp_path / "records.npz", allow_pickle=False)
    assert set(columns) == set(COLUMNS)
    assert set(REQUEST_COLUMNS) < set(COLUMNS)
    assert columns["trace"].tolist() == [0, 0, 1, 1, 1]
    assert columns["input_tokens"].tolist() == [4, -1, -1, -1, 4]
    assert np.isnan(columns["first_s"]).tolist() == [False, True, True, True, False]
    about = json.loads(columns["about"].tobytes())
    assert [about["texts"]["outcome"][code] for code in columns["outcome"]] == ["ok", "bad_json", "bad_json", "bad_json", "ok"]
    assert columns["arrivals_n"].tolist() == [1, 2.5]
    assert [t["scenario"] for t in about["traces"]] == ["s", "p"]


def test_a_full_disk_loses_the_requests_of_one_run_and_says_so(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        row = keep(tmp_path, "b", PLAIN)
        with pytest.raises(UserError, match=r"records\.npz: the requests could not be written \(No space left on device\)"):
            merge(tmp_path / "records.npz", [])
    assert row["file"] is None
    assert row["lost"] == f"{tmp_path}/b-0.npz: the requests of p could not be written (No space left on device)"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_file_costs_no_other_trace(tmp_path):
    files = kept(tmp_path, COUNTED, EMPTY, PLAIN, COUNTED)
    files[1].unlink()
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[: len(whole) // 2])
    _, lost = merge(tmp_path / "records.npz", [*files, None])
    assert lost[1] == f"{files[1]}: the requests of a run cannot be read (No such file or directory)"
    assert lost[2] == f"{files[2]}: the requests of a run are damaged (File is not a zip file) @ about"
    assert set(lost) == {1, 2}
    assert read(tmp_path / "records.npz") == [COUNTED, None, None, COUNTED, None]
    columns = np.load(tmp_path / "records.npz", allow_pickle=False)
    assert columns["trace"].tolist() == [0, 0, 3, 3]
    assert set(columns["arrivals_trace"].tolist()) == {0, 3}


def test_no_damage_raises_anything_but_one_line_or_changes_a_value(tmp_path):
    """Any byte changed, any length cut off."""
    (file,) = kept(tmp_path, COUNTED)
    whole, chance = file.read_bytes(), random.Random(1)
    bent = tmp_path / "bent.npz"
    for _ in range(600):
        content = bytearray(whole)
        at = chance.randrange(len(whole))
        if chance.random() < 0.2:
            del content[at:]
        else:
            content[at] ^= 1 << chance.randrange(8)
        bent.write_bytes(content)
        said, found = "", None
        try:
            found = read(bent)  # dates and the like are no value
        except UserError as e:
            said = str(e)
        assert found == [COUNTED] or said.startswith(f"{bent}: the requests of a run ")
        assert "\n" not in said
        _, lost = merge(tmp_path / "records.npz", [bent])
        assert lost or read(tmp_path / "records.npz") == [COUNTED]


def alone(*args):
    """The script in a process of its own."""
    script = Path(__file__).with_name("synthetic_records.py")
    done = subprocess.run([sys.executable, script, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_million_requests_fit_in_two_gib(tmp_path):
    """Made, summarised, judged and stored, then read again, each in a process whose largest size is looked at; at a fifth of the size."""
    made = alone("make", MILLION // 5, tmp_path)
    again = alone("read", tmp_path / made["row"]["file"])
    assert again["metrics"] == made["metrics"]
    for seen in (made, again):
        assert seen["requests"] == MILLION // 5
        each = (seen["peak"] - seen["before"]) / seen["requests"]
        assert seen["before"] + each * MILLION < 2 * 2**30, f"{each:.0f} bytes a request"

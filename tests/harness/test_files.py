"""Files are whole or untouched, read strictly, and every fault is named in one line."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.baseline import empty
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.baselines import baseline_path, load_baseline, save_baseline
from pytest_kvcache.harness.files import read_json, schema_problem, write_bytes, write_json


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "a.json"
    write_json(target, {"old": 1})

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(target, {"new": 2})
    assert json.loads(target.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_value_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_files_are_readable_by_others_and_end_in_a_newline(tmp_path):
    write_json(tmp_path / "d" / "a.json", {"b": 1, "a": 2})
    assert (tmp_path / "d" / "a.json").read_text() == '{\n "a": 2,\n "b": 1\n}\n'
    assert (tmp_path / "d" / "a.json").stat().st_mode & 0o777 == 0o644
    write_bytes(tmp_path / "d" / "b", b"x")


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_one_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("f") / "a.json"
    path.write_bytes(content)
    said = f"{path}: fine"
    try:
        read_json(path, "this file", "record anew")
    except UserError as e:
        said = str(e)
    assert said.startswith(f"{path}: ")
    assert "\n" not in said


@pytest.mark.parametrize("change", [
    lambda d: d.pop("entries"), lambda d: d.update(extra=1), lambda d: d.update(schema="pytest-kvcache/baseline/2"), lambda d: d.update(gpu=""),
    lambda d: d["entries"].update(x={}), lambda d: d["sessions"].update(s={"started": "now"}),
])  # fmt: skip
def test_documents_of_another_shape_are_refused(change):
    doc = empty("cpu", "f", "m")
    assert schema_problem(doc, "baseline") == ""
    change(doc)
    assert " @ $" in schema_problem(doc, "baseline")


def test_a_document_in_the_wrong_place_is_refused(tmp_path):
    save_baseline(tmp_path, empty("cpu", "f", "m"))
    os.makedirs(tmp_path / "cpu" / "g")
    os.rename(baseline_path(tmp_path, "cpu", "f", "m"), baseline_path(tmp_path, "cpu", "g", "m"))
    with pytest.raises(UserError, match="wrong place"):
        load_baseline(tmp_path, "cpu", "g", "m")


def test_an_invalid_document_is_never_written(tmp_path):
    with pytest.raises(UserError, match="not written"):
        save_baseline(tmp_path, empty("cpu", "f", "m") | {"entries": {"k": {}}})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_an_empty_document(tmp_path):
    assert load_baseline(tmp_path, "cpu", "f", "m") == empty("cpu", "f", "m")

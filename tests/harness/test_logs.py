"""Logs in a report: copies without secrets, whatever their size and bytes."""

import io
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import logs
from pytest_kvcache.harness.logs import copy_masked

SECRET = "Zq9-Secret"
FORMS = (SECRET, f"x{SECRET}y", f"'api_key': ['{SECRET}', 'x']", f"--api-key {SECRET}", f"token=Xx{SECRET}", "https://u:Other1@host/")
lines = st.lists(st.one_of(st.sampled_from(FORMS), st.text("ab \n\r=:", max_size=40)), max_size=30).map("".join)


def small(patch, piece, held):
    patch.setattr(logs, "PIECE", piece)
    patch.setattr(logs, "HELD_BACK", held)


@settings(max_examples=300)
@given(text=lines, piece=st.integers(1, 70), held=st.integers(60, 90))
def test_a_secret_across_the_border_of_two_pieces_is_hidden(text, piece, held):
    with pytest.MonkeyPatch.context() as patch:
        small(patch, piece, held)
        shown = "".join(logs._masked(io.StringIO(text, newline=""), [SECRET]))
    assert SECRET not in shown
    assert "Other1" not in shown


@given(st.lists(st.text("ab \n\r\t", max_size=40), max_size=30).map("".join), st.integers(1, 70), st.integers(1, 90))
def test_what_has_no_secret_is_copied_whole(text, piece, held):
    with pytest.MonkeyPatch.context() as patch:
        small(patch, piece, held)
        assert "".join(logs._masked(io.StringIO(text, newline=""), [SECRET])) == text


def test_bytes_and_folders_stay_as_they_are(tmp_path):
    source = tmp_path / "logs"
    (source / "deep").mkdir(parents=True)
    raw = b"a\r\nb\rc\xff\xfe\x00 \xc3\xa4 \x1b[31mred\n"
    (source / "one.log").write_bytes(raw + SECRET.encode() + raw)
    (source / "deep" / "two.log").write_bytes(raw)
    (source / "empty.log").write_bytes(b"")
    for _ in range(2):  # an earlier report is replaced
        copy_masked(source, tmp_path / "report" / "logs", [SECRET])
    copied = tmp_path / "report" / "logs"
    assert (copied / "one.log").read_bytes() == raw + b"***" + raw
    assert (copied / "deep" / "two.log").read_bytes() == raw
    assert (copied / "empty.log").read_bytes() == b""
    assert (source / "one.log").read_bytes() == raw + SECRET.encode() + raw


def test_a_long_log_without_a_line_end_is_copied_in_pieces(tmp_path, monkeypatch):
    small(monkeypatch, 4096, 1024)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").write_text(("word " * 1000 + SECRET) * 20 + json.dumps({"api_key": [SECRET, "Listed1"]}))
    copy_masked(tmp_path / "logs", tmp_path / "copy", [SECRET])
    shown = (tmp_path / "copy" / "x.log").read_text()
    assert shown == ("word " * 1000 + "***") * 20 + '{"api_key": ***}'


def test_a_copy_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").write_text("x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/logs/x\.log: the server's log could not be copied \(Not a directory\)"):
        copy_masked(tmp_path / "logs", tmp_path / "file" / "logs", [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_what_is_no_file_is_left_alone(tmp_path):
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "pipe")
    copy_masked(tmp_path / "logs", tmp_path / "copy", [])
    assert not (tmp_path / "copy").exists()

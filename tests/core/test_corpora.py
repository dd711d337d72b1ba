"""The text that is scored: what rows are, and WikiText-2 as llama.cpp and as GPTQ score it."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core import corpora
from pytest_kvcache.core.corpora import (
    Corpus,
    UnfitCorpus,
    as_rows,
    joined,
    row_text,
    rows_of_array,
    rows_of_lines,
    text_of,
    wikitext_raw,
    wikitext_rows,
)

TEXTS = st.text(st.characters(codec="utf-8"))
LINES = st.one_of(st.just(" "), st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1).filter(str.strip))


def test_the_digest_is_that_of_the_utf8():
    assert Corpus(name="a", text="").digest == "sha256:e3b0c44298fc1c14"
    assert Corpus(name="a", text="ü").digest == "sha256:" + hashlib.sha256(b"\xc3\xbc").hexdigest()[:16]
    assert Corpus(name="a", text="ü").digest == Corpus(name="b", text="ü").digest


def test_the_rows_of_wikitext_are_lines_with_their_ends_and_blank_lines_are_empty_rows():
    raw = " \n = Robert Boulter = \n \n An actor . \n"
    assert wikitext_rows(raw) == ["", " = Robert Boulter = \n", "", " An actor . \n"]
    assert as_rows(raw) == "\n\n = Robert Boulter = \n\n\n\n\n An actor . \n"
    assert wikitext_rows("") == []
    assert wikitext_rows(" a \n b") == [" a \n", " b"]
    assert wikitext_rows(" a\u2028b\x0bc\x85d \n") == [" a\u2028b\x0bc\x85d \n"], "a line ends at a newline only"


@given(st.lists(LINES))
def test_rows_give_the_file_back(lines):
    raw = "".join([line + "\n" for line in lines])
    assert wikitext_raw(wikitext_rows(raw)) == raw
    assert len(wikitext_rows(raw)) == len(lines)


@given(st.lists(TEXTS))
def test_json_lines_and_an_array_give_the_same_rows(texts):
    objects = [{"id": i, "body": text} for i, text in enumerate(texts)]
    for ascii_only in (True, False):
        lines = "\r\n".join([json.dumps(o, ensure_ascii=ascii_only) for o in objects]) + "\n\n"
        assert rows_of_lines(lines, "body") == texts
        assert rows_of_array(json.dumps(objects, ensure_ascii=ascii_only, indent=1), "body") == texts
        assert rows_of_lines("\n".join([json.dumps(t, ensure_ascii=ascii_only) for t in texts]), "") == texts
        assert rows_of_array(json.dumps([{"text": t} for t in texts], ensure_ascii=ascii_only), "") == texts
    assert joined(texts) == "\n\n".join(texts)


@pytest.mark.parametrize(("text", "field", "words"), [
    ('{"text": "a"}\n\n{"text": ', "", "line 3 is no JSON (Expecting value at column 10)"),
    ('{"text": "a"}\nplain words', "", "line 2 is no JSON (Expecting value at column 1)"),
    ('{"text": "a"}\n{"body": "b", "id": 1}', "", "line 2 has no text but body, id; name one by PATH#NAME"),
    ('{"text": "a"}', "body", "line 1 has no body but text; name one by PATH#NAME"),
    ("{}", "", "line 1 has no text"),
    (json.dumps(dict.fromkeys("abcdefg")), "", "line 1 has no text but a, b, c, d, e, ...; name one by PATH#NAME"),
    ('{"a\\nb\\u001b": 1}', "", r"line 1 has no text but a\nb\x1b; name one by PATH#NAME"),
    ('{"text": null}', "", "text of line 1 is no text, but null"),
    ('{"text": ["a"]}', "", "text of line 1 is no text, but an array"),
    ('"a"\n7', "", "line 2 is no text, but a number"),
    ("true", "body", "line 1 is no text, but true or false"),
    ('"a"', "body", "line 1 is a string, which has no fields; leave #body out"),
    ('{"text": "ab\\ud800"}', "", "text of line 1 has half of a surrogate pair at character 2, which is no text"),
    ('"a"\n' + "[" * 100_000, "", "the JSON from line 2 on is nested too deep"),
    ('{"n": ' + "9" * 5000 + "}", "", "the JSON from line 1 on cannot be read (Exceeds the limit"),
])  # fmt: skip
def test_a_line_that_is_no_row_is_named(text, field, words):
    with pytest.raises(UnfitCorpus) as told:
        rows_of_lines(text, field)
    assert str(told.value).startswith(words)
    assert str(told.value).isprintable()


@pytest.mark.parametrize(("text", "field", "words"), [
    ('[{"text": "a"},\n{"text": "b",}]', "", "line 2 is no JSON"),
    ("", "", "line 1 is no JSON (Expecting value at column 1)"),
    ('{"text": "a"}', "", "no JSON array, but an object"),
    ('[{"text": "a"}, {"body": "b"}]', "", "item 2 has no text but body; name one by PATH#NAME"),
    ('["a", {"text": 1.5}]', "", "text of item 2 is no text, but a number"),
])  # fmt: skip
def test_an_array_that_gives_no_rows_says_why(text, field, words):
    with pytest.raises(UnfitCorpus) as told:
        rows_of_array(text, field)
    assert str(told.value).startswith(words)


@given(TEXTS.filter(lambda t: not t.startswith("\ufeff")))
def test_a_text_is_its_utf8_as_it_stands(text):
    assert text_of(text.encode()) == text
    assert text_of(text.encode("utf-8-sig")) == text, "a mark of the encoding is none of the text"


@pytest.mark.parametrize(("content", "at"), [
    (b"\xff", 0), (b"ab\x80c", 2), (b"\xef\xbb\xbfab\xfe", 5), ("ü".encode() + "ü".encode("latin-1") + b"!", 2), (b"a\xed\xa0\x80", 1), (b"abc\xc3", 3),
])  # fmt: skip
def test_what_is_not_utf8_is_named_by_its_byte(content, at):
    with pytest.raises(UnfitCorpus, match=rf"not UTF-8 text \(.* at byte {at}\)"):
        text_of(content)


def test_rows_stop_at_the_largest_text_that_is_taken(monkeypatch):
    monkeypatch.setattr(corpora, "MAX_BYTES", 2**20)
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield "a" * 1000

    with pytest.raises(UnfitCorpus, match=r"^more than 1 MiB, "):
        joined(endless())
    assert len(drawn) < 1100


@pytest.mark.parametrize(("value", "kind"), [(None, "null"), (b"a", "bytes"), ({}, "an object")])
def test_what_a_table_may_hold_in_place_of_text(value, kind):
    with pytest.raises(UnfitCorpus, match=f"^text of row 3 is no text, but {kind}$"):
        row_text(value, "text of row 3")

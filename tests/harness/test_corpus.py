"""`--kv-corpus`: which text is read, and one line for each that cannot be."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_kvcache.core.corpora import WIKITEXT2_DIGEST, Corpus, as_rows, wikitext_rows
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.core.text import one_line
from pytest_kvcache.harness import corpus
from pytest_kvcache.harness.corpus import load_corpus

RAW = " \n = Title = \n \n Some words of prose . \n"
REAL = os.environ.get("KV_WIKITEXT2", "")
DATASET = "hub/datasets--Salesforce--wikitext/snapshots"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No text of the machine that runs the tests is found."""
    for name in ("KV_WIKITEXT2", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def little(monkeypatch):
    """WikiText-2 is RAW."""
    monkeypatch.setattr(corpus, "WIKITEXT2_DIGEST", Corpus(name="", text=RAW).digest)


@pytest.fixture
def packed(monkeypatch):
    """Writes a file that stands for a parquet file: pyarrow is large, so that only the tests below read real ones."""

    class ParquetFile:
        def __init__(self, content):
            self.columns = json.loads(content)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @property
        def schema_arrow(self):
            return type("Schema", (), {"names": list(self.columns)})

        def iter_batches(self, batch_size, columns):
            rows = self.columns[columns[0]]
            for at in range(0, len(rows), 2):
                yield type("Batch", (), {"column": lambda _, i, at=at: type("Column", (), {"to_pylist": lambda _: rows[at : at + 2]})()})()

    arrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    arrow.BufferReader, arrow.ArrowException, parquet.ParquetFile = bytes, ArithmeticError, ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)

    def write(path, **columns):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(columns))

    return write


def complaint(asked):
    with pytest.raises(UserError) as told:
        load_corpus(asked)
    begins = f"--kv-corpus={one_line(asked)}: "
    assert str(told.value).startswith(begins)
    assert str(told.value).isprintable()
    return str(told.value)[len(begins) :]


def test_nothing_asked_is_the_texts_of_pydoc():
    found = load_corpus("")
    assert found.name == "pydoc_topics"
    assert len(found.text) > 300_000
    assert 'The "assert" statement' in found.text
    assert found == load_corpus("")


def test_a_python_without_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"^--kv-corpus: this Python has no pydoc_data.*--kv-corpus=PATH"):
        load_corpus("")


@pytest.mark.parametrize("name", ["a.txt", "a.raw", "a.md", "a", "a.text.TXT", "a#b.txt", "#a", "a#"])
def test_a_plain_text_is_taken_as_it_stands(name):
    Path(name).write_bytes("\ufeffα\r\n\n b \n".encode())
    assert load_corpus(name) == Corpus(name=name, text="α\r\n\n b \n")


@pytest.mark.parametrize(("name", "content", "asked"), [
    ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', "a.jsonl"),
    ("a.NDJSON", '"one"\n"two"', "a.NDJSON"),
    ("a.jsonl", '{"body": "one"}\n{"body": "two"}\n', "a.jsonl#body"),
    ("a#b.jsonl", '{"c": "one"}\n{"c": "two"}\n', "a#b.jsonl#c"),
    ("a.json", '[{"text": "one"}, "two"]', "a.json"),
    ("a.json", '[{"body": "one"}, {"body": "two"}]', "a.json#body"),
])  # fmt: skip
def test_rows_are_joined_by_an_empty_line(name, content, asked):
    Path(name).write_text(content)
    assert load_corpus(asked) == Corpus(name=name, text="one\n\ntwo")


def test_a_column_of_a_table(packed):
    packed("a.parquet", text=["one", "", "two"], body=["x"])
    assert load_corpus("a.parquet") == Corpus(name="a.parquet", text="one\n\n\n\ntwo")
    assert load_corpus("a.parquet#body").text == "x"
    assert complaint("a.parquet#words") == "the table has no words but text, body; name one by PATH#NAME"
    packed("a.parquet", text=["one", "two", None])
    assert complaint("a.parquet") == "text of row 3 is no text, but null"
    Path("a.parquet").write_text("no table")
    assert complaint("a.parquet").startswith("not a readable parquet file (Expecting value")


def test_a_table_without_what_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("a.parquet").write_bytes(b"PAR1")
    assert complaint("a.parquet") == "a parquet file needs pyarrow: pip install 'pytest-kvcache[parquet]'"


def test_a_real_table():
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i} ü" for i in range(2500)]
    table = arrow.table({"text": texts, "a.b": texts[::-1], "number": list(range(2500)), "kind": arrow.array(texts).dictionary_encode()})
    parquet.write_table(table, "a.parquet")
    assert load_corpus("a.parquet").text == load_corpus("a.parquet#kind").text == "\n\n".join(texts)
    assert load_corpus("a.parquet#a.b").text == "\n\n".join(texts[::-1])
    assert complaint("a.parquet#number") == "number of row 1 is no text, but a number"
    assert complaint("a.parquet#words").startswith("the table has no words but text, a.b, number, kind; ")
    parquet.write_table(arrow.table({"text": arrow.array([b"\xff"]).view(arrow.string())}), "a.parquet")
    assert complaint("a.parquet").startswith("not a readable parquet file (")
    for content in (b"", b"PAR1", Path("a.parquet").read_bytes()[:-20], b"PAR1" + bytes(100) + b"PAR1"):
        Path("a.parquet").write_bytes(content)
        assert complaint("a.parquet").startswith("not a readable parquet file (")


@pytest.mark.parametrize(("name", "content", "asked", "words"), [
    ("a", "", "b.txt", "no such file"),
    ("a", "", "b.jsonl#x", "no such file"),
    ("a", "", "a/b", "it cannot be read: Not a directory"),
    ("a", "", "b" * 300, "it cannot be read: File name too long"),
    ("a", "", "a\0b", "it cannot be read: embedded null byte"),
    ("d/a", "", "d", "a folder; name a file in it"),
    ("a", "", "/dev/null", "no regular file; write the text into one"),
    ("a", "", "a", "it has no text"),
    ("a", " \n\t\n", "a", "it has no text"),
    ("a.jsonl", "\n", "a.jsonl", "it has no text"),
    ("a.json", "[]", "a.json", "it has no text"),
    ("a.txt", b"ab\xe9", "a.txt", "not UTF-8 text (unexpected end of data at byte 2)"),
    ("a.jsonl", b'"a"\n"\xff"', "a.jsonl", "not UTF-8 text (invalid start byte at byte 5)"),
    ("a.jsonl", '"a"\n"', "a.jsonl", "line 2 is no JSON (Unterminated string starting at at column 1)"),
    ("a.txt", "words", "a.txt#text", "a plain text has no fields; leave #text out"),
    ("a.jsonl", '"a"', "a.jsonl#", "no field is named after the #; name one or leave it out"),
    ("a.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a.txt", "a Git LFS pointer, not the text (run: git lfs pull)"),
    ("a.parquet", "version https://git-lfs.github.com/spec/v1\n", "a.parquet", "a Git LFS pointer, not the text (run: git lfs pull)"),
])  # fmt: skip
def test_what_gives_no_text_is_one_line(name, content, asked, words):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert complaint(asked) == words


def test_a_name_is_shown_on_one_line():
    with pytest.raises(UserError) as told:
        load_corpus("a\nb\x1b[31m")
    assert str(told.value) == r"--kv-corpus=a\nb\x1b[31m: no such file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_of_somebody_else():
    Path("a").write_text("words")
    Path("a").chmod(0)
    assert complaint("a") == "it cannot be read: Permission denied"


def test_a_file_beyond_the_largest_is_not_read():
    with Path("a.txt").open("wb") as f:
        f.truncate(256 * 2**20 + 1)  # sparse
    assert complaint("a.txt").startswith("more than 256 MiB, which would take days to score")


@pytest.mark.parametrize("form", ["file", "folder", "home"])
def test_wikitext_by_the_variable(little, tmp_path, monkeypatch, form):
    (tmp_path / "wiki.test.raw").write_text(RAW)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KV_WIKITEXT2", {"file": str(tmp_path / "wiki.test.raw"), "folder": str(tmp_path), "home": "~"}[form])
    assert load_corpus("wikitext2") == Corpus(name="wikitext2", text=RAW)


@pytest.mark.parametrize(("env", "folder"), [
    ({"HF_HUB_CACHE": "{}/x", "HF_HOME": "{}/y"}, "x"),
    ({"HUGGINGFACE_HUB_CACHE": "{}/x", "HF_HOME": "{}/y"}, "x"),
    ({"HF_HUB_CACHE": "", "HF_HOME": "{}/y", "XDG_CACHE_HOME": "{}/z"}, "y/hub"),
    ({"HF_HOME": "", "XDG_CACHE_HOME": "{}/z"}, "z/huggingface/hub"),
    ({"HF_HOME": "", "HOME": "{}/h"}, "h/.cache/huggingface/hub"),
    ({"HF_HUB_CACHE": "~/$PLACE", "PLACE": "p", "HOME": "{}/h"}, "h/p"),
])  # fmt: skip
@pytest.mark.parametrize("dataset", ["datasets--Salesforce--wikitext", "datasets--wikitext"])
def test_wikitext_in_the_cache_of_the_hub(little, packed, tmp_path, monkeypatch, env, folder, dataset):
    for name, value in env.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert f"{tmp_path / folder / dataset}" in complaint("wikitext2")
    packed(tmp_path / folder / dataset / "snapshots/abc/wikitext-2-raw-v1/test-00000-of-00001.parquet", text=wikitext_rows(RAW))
    packed(tmp_path / folder / dataset / "snapshots/abc/wikitext-2-raw-v1/train-00000-of-00001.parquet", text=["other"])
    packed(tmp_path / folder / dataset / "snapshots/abc/wikitext-2-v1/test-00000-of-00001.parquet", text=["other"])
    assert load_corpus("wikitext2") == Corpus(name="wikitext2", text=RAW)


def test_the_newest_snapshot_is_taken_and_all_parts_of_it(little, packed, tmp_path):
    rows = wikitext_rows(RAW)
    for revision, parts, age in (("b", ([rows[0]], rows[1:]), 1), ("a", (["stale"],), 2), ("c", (["stale"],), 3)):
        folder = tmp_path / "hf" / DATASET / revision / "wikitext-2-raw-v1"
        for i, part in enumerate(parts):
            packed(folder / f"test-{i:05}-of-{len(parts):05}.parquet", text=part)
        os.utime(folder, (10**9 - age, 10**9 - age))
    assert load_corpus("wikitext2").text == RAW


def test_wikitext_that_is_not_here_says_where_it_was_looked_for(tmp_path):
    assert complaint("wikitext2") == (
        f"not on this machine; looked in KV_WIKITEXT2 (not set) and {tmp_path}/hf/hub/datasets--Salesforce--wikitext and "
        f"{tmp_path}/hf/hub/datasets--wikitext; nothing is downloaded, so name it: --kv-corpus=PATH/wiki.test.raw"
    )


def test_a_variable_that_names_no_wikitext(tmp_path, monkeypatch):
    cure = "; or name the text: --kv-corpus=PATH/wiki.test.raw"
    monkeypatch.setenv("KV_WIKITEXT2", str(tmp_path))
    assert complaint("wikitext2") == f"KV_WIKITEXT2={tmp_path}/wiki.test.raw: no such file{cure}"
    (tmp_path / "wiki.test.raw").write_bytes(b"\xff")
    assert complaint("wikitext2") == f"KV_WIKITEXT2={tmp_path}/wiki.test.raw: not UTF-8 text (invalid start byte at byte 0){cure}"
    (tmp_path / "wiki.test.raw").write_text(RAW)
    digest = Corpus(name="", text=RAW).digest
    line = f"another text ({digest}, not {WIKITEXT2_DIGEST}); score it by its own name: --kv-corpus=PATH"
    assert complaint("wikitext2") == f"KV_WIKITEXT2={tmp_path}/wiki.test.raw: {line}"


@pytest.mark.skipif(not REAL, reason="KV_WIKITEXT2 names no WikiText-2")
def test_the_real_wikitext(monkeypatch):
    monkeypatch.setenv("KV_WIKITEXT2", REAL)
    found = load_corpus("wikitext2")
    rows = wikitext_rows(found.text)
    assert found.digest == WIKITEXT2_DIGEST
    assert len(found.text.encode()) == 1_290_590
    # What the card of Salesforce/wikitext says of wikitext-2-raw-v1, test: num_examples, num_bytes (an offset of 4 bytes for each row).
    assert (len(rows), len("".join(rows).encode()) + 4 * len(rows)) == (4358, 1_305_088)
    assert as_rows(found.text) == "\n\n".join(rows)


@pytest.mark.skipif(not REAL, reason="KV_WIKITEXT2 names no WikiText-2")
def test_the_real_wikitext_from_the_cache_is_the_file(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("KV_WIKITEXT2", REAL)
    file = load_corpus("wikitext2")
    monkeypatch.delenv("KV_WIKITEXT2")
    packed(tmp_path / "hf" / DATASET / "abc/wikitext-2-raw-v1/test-00000-of-00001.parquet", text=wikitext_rows(file.text))
    assert load_corpus("wikitext2") == file

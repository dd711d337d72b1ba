"""--kv-corpus: kept as it was asked for, a path from where it was written, and read by nobody before it is scored."""

import subprocess
import sys

import pytest

SHOW = """
from pytest_kvcache.options import read_settings

def pytest_report_header(config):
    return f"corpus: <{read_settings(config).corpus}>"
"""


@pytest.fixture
def told(kv_project):
    """What the settings have, of a session in a folder of the project."""
    with (kv_project.folder / "conftest.py").open("a") as f:
        f.write(SHOW)
    (kv_project.folder / "sub").mkdir()

    def one(*args, ini="", gpu="--kv-gpu=cpu"):
        (kv_project.folder / "pytest.ini").write_text("[pytest]\n" + ini)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *([gpu] if gpu else []), *args,
             "--rootdir=..", "--confcutdir=..", "--co", ".."],
            cwd=kv_project.folder / "sub", env=kv_project.environment({}), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return one


@pytest.mark.parametrize(("args", "ini", "corpus"), [
    ((), "", ""),
    (("--kv-corpus=wikitext2",), "", "wikitext2"),
    ((), "kv_corpus = wikitext2\n", "wikitext2"),
    (("--kv-corpus=no/such.jsonl#a//b",), "kv_corpus = wikitext2\n", "{folder}/sub/no/such.jsonl#a//b"),
    ((), "kv_corpus = no/such.txt\n", "{folder}/no/such.txt"),
    (("--kv-corpus=/no/such.txt",), "", "/no/such.txt"),
    (("--kv-corpus=~/such.txt",), "", "{home}/such.txt"),
])  # fmt: skip
def test_it_is_kept_and_not_read(told, kv_project, monkeypatch, args, ini, corpus):
    monkeypatch.setenv("HOME", str(kv_project.folder / "home"))
    code, out = told(*args, ini=ini)
    assert code == 0, out
    assert f"corpus: <{corpus.format(folder=kv_project.folder, home=kv_project.folder / 'home')}>" in out


@pytest.mark.parametrize(("args", "gpu", "words"), [
    (("--kv-corpus=",), "--kv-gpu=cpu", "--kv-corpus= names nothing"),
    (("--kv-corpus=wikitext2",), "", "--kv-corpus needs a device: add --kv-gpu=NAME"),
    (("--kv-corpus=wikitext2", "--kv-endpoint=http://127.0.0.1:1"), "--kv-gpu=cpu", "--kv-corpus: nothing is started with --kv-endpoint"),
])  # fmt: skip
def test_where_it_means_nothing(told, args, gpu, words):
    code, out = told(*args, gpu=gpu)
    assert code == 4 and words in out and "Traceback" not in out


def test_a_stored_run_has_its_text(kv_project):
    kv_project.run("-k", "fixed and c2")
    (kv_project.folder / "pytest.ini").write_text("[pytest]\nkv_corpus = no/such.txt\n")
    found = kv_project.run("--kv-replay=report1", "--kv-corpus=wikitext2")
    assert found.code == 4 and "--kv-corpus: nothing is measured with --kv-replay; leave one of the two out" in found.out
    assert "to the last digit" in kv_project.run("--kv-replay=report1", runner=False).out, (
        "what the ini file says of measuring is no matter"
    )

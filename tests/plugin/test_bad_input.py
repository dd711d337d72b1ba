"""Everything a user can get wrong gives one clear line, pytest's own exit code, and no traceback."""

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_kvcache.harness.traces import read

USAGE = 4


def one_error(result):
    """The single ERROR line of a usage error."""
    lines = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
    assert len(lines) == 1, result.out
    assert "Traceback" not in result.out
    assert "INTERNALERROR" not in result.out
    return lines[0]


@pytest.mark.parametrize(("args", "words"), [
    (["--kv-gpu=h1000"], ["--kv-gpu=h1000", "did you mean h100", "l40s"]),
    (["--kv-framework=vlm"], ["--kv-framework=vlm", "Known: ", "transformers"]),
    (["--kv-model=nosuch"], ["--kv-model=nosuch", "smollm2-135m", "hub id"]),
    (["--kv-profile=nightly"], ["--kv-profile=nightly", "smoke, ci, full, acceptance"]),
    (["--kv-record=some"], ["--kv-record=some", "missing, all"]),
    (["--kv-budget=soon"], ["--kv-budget=soon", "30m"]),
    (["--kv-budget=0"], ["--kv-budget=0", "30m"]),
    (["--kv-baselines=nowhere"], ["nowhere", "no such folder", "--kv-record=missing"]),
    (["--kv-gpu="], ["--kv-"]),
], ids=lambda v: v[0] if len(v) == 1 else None)  # fmt: skip
def test_wrong_option(kv_project, args, words):
    result = kv_project.run(*args)
    assert result.code == USAGE, result.out
    line = one_error(result)
    for word in words:
        assert word in line
    assert result.log == []
    assert list((kv_project.folder / "tmp").iterdir()) == [], "a session that measured nothing leaves nothing"


def test_options_need_a_device(kv_project):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--kv-record=missing"],
        cwd=kv_project.folder,
        env=kv_project.environment({}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == USAGE
    assert "--kv-record needs a device: add --kv-gpu=NAME" in done.stderr


def test_a_gpu_that_is_not_there(kv_project):
    result = kv_project.run("--kv-gpu=h100", "--kv-framework=transformers", runner=False)
    assert result.code == USAGE
    assert "h100" in one_error(result) or "NVIDIA" in one_error(result)


def test_an_engine_that_is_not_installed(kv_project):
    venv_python = kv_project.folder / "bare" / "bin" / "python"
    import venv

    venv.create(kv_project.folder / "bare", with_pip=False)
    result = kv_project.run("-o", f"kv_python_transformers={venv_python}", runner=False)
    assert result.code == USAGE
    line = one_error(result)
    assert "has no torch, transformers" in line
    assert "pip install 'pytest-kvcache[cpu]'" in line


def test_an_interpreter_that_does_not_exist(kv_project):
    result = kv_project.run("-o", "kv_python_transformers=/no/such/python", runner=False)
    assert result.code == USAGE
    assert "/no/such/python" in one_error(result)


@pytest.mark.parametrize(("content", "hint"), [
    (b"", "empty"),
    (b'{"schema": "pytest-kvcache/baseline/1", "gpu"', "not valid JSON"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    (b'<<<<<<< HEAD\n{}\n=======\n{}\n>>>>>>> b\n', "merge conflict"),
    (b"<!doctype html><p>sign in", "web page"),
    (b"[]", "$"),
    (b'{"schema": "pytest-kvcache/baseline/9999"}', "9999"),
    (b"\xff\xfe\x00", "not UTF-8"),
], ids=lambda v: v if isinstance(v, str) else None)  # fmt: skip
def test_a_corrupt_baseline_is_named_and_left_alone(kv_project, content, hint):
    kv_project.baseline.parent.mkdir(parents=True)
    kv_project.baseline.write_bytes(content)
    for extra in ((), ("--kv-record=all",)):
        result = kv_project.run(*extra)
        assert result.code == USAGE, result.out
        line = one_error(result)
        assert str(kv_project.baseline) in line
        assert hint in line
        assert kv_project.baseline.read_bytes() == content
        assert result.log == []


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1e999", "0", "-1", '"12"', "null", "true"])
def test_a_baseline_value_that_is_no_positive_number_is_refused(recorded, literal):
    text = recorded.baseline.read_text()
    doc = json.loads(text)
    key = "fixed_length/isl64-osl16-c1/base/output_tok_s"
    doc["entries"][key]["runs"][0]["value"] = "@@"
    recorded.baseline.write_text(json.dumps(doc).replace('"@@"', literal))
    result = recorded.run()
    assert result.code == USAGE, result.out
    assert str(recorded.baseline) in one_error(result)


def test_a_byte_order_mark_is_harmless(recorded):
    recorded.baseline.write_bytes(b"\xef\xbb\xbf" + recorded.baseline.read_bytes())
    assert recorded.run("-k", "fixed and c1", seed=1).code == 0


def test_a_test_without_gates_or_with_an_unknown_metric(kv_project):
    suite = kv_project.folder / "test_fixed.py"
    good = suite.read_text()
    suite.write_text(good.replace('@pytest.mark.kv_gates("output_tok_s", "tpot_ms.p50")', ""))
    assert "no kv_gates marker" in one_error(kv_project.run())
    suite.write_text(good.replace("output_tok_s", "tokens_per_second"))
    line = one_error(kv_project.run())
    assert "no metric 'tokens_per_second'; known:" in line
    suite.write_text(good.replace('"output_tok_s"', 'Gate("output_tok_s", margin=5)'))
    result = kv_project.run()
    assert result.code in (2, 4)
    assert "margin=5 must lie between 0 and 1" in result.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to play a full disk")
def test_a_full_disk_while_recording_leaves_the_old_baseline_and_fails(recorded, monkeypatch):
    before = recorded.baseline.read_bytes()
    conftest = recorded.folder / "conftest.py"
    # The write itself fails as on a full disk: the temporary file's descriptor is /dev/full.
    conftest.write_text(
        conftest.read_text()
        + f"""
import os, tempfile
real = tempfile.mkstemp
def full(*a, **k):
    fd, name = real(*a, **k)
    if {str(recorded.baseline.parent)!r} in str(k.get("dir")):
        os.close(fd); fd = os.open("/dev/full", os.O_WRONLY)
    return fd, name
tempfile.mkstemp = full
"""
    )
    result = recorded.run("--kv-record=all", seed=3)
    assert result.code == 1, result.out
    assert "No space left on device" in result.out
    assert "the old one is unchanged" in result.out
    assert recorded.baseline.read_bytes() == before
    assert os.listdir(recorded.baseline.parent) == [recorded.baseline.name]


def test_a_report_folder_that_cannot_be_written(recorded):
    (recorded.folder / "file").write_text("")
    result = recorded.run("-k", "fixed and c1", "--kv-report=file/below", report=False, seed=1)
    assert result.code == 1
    assert "the report could not be written" in result.out
    assert "Traceback" not in result.out


def test_an_unusable_ini_value(kv_project):
    (kv_project.folder / "pytest.ini").write_text("[pytest]\nkv_profile = often\n")
    assert "often" in one_error(kv_project.run())


DAMAGE = """
import pathlib, tempfile
import pytest

from pytest_kvcache.harness.traces import read

@pytest.hookimpl(wrapper=True)  # before the plugin's own
def pytest_sessionfinish(session):
    first, second, *_ = sorted(pathlib.Path(tempfile.gettempdir()).glob("pytest-kvcache-*/traces/*.npz"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    return (yield)
"""


def test_raw_records_that_are_gone_cost_only_themselves(recorded):
    """Verdicts, page and the other requests are there; the run's row says why its own are not; what is left is kept."""
    with (recorded.folder / "conftest.py").open("a") as f:
        f.write(DAMAGE)
    result = recorded.run("-k", "fixed", seed=1)
    assert result.code == 1, result.out
    assert set(result.verdicts.values()) <= {"pass", "inconclusive"}, result.out
    assert "the requests of a run cannot be read (No such file or directory) (and of 1 more runs)" in result.out
    lost = [t["lost"] for t in result.run["traces"] if "lost" in t]
    assert len(lost) == 2
    assert "are damaged (" in lost[1]
    traces = read(recorded.folder / f"report{recorded.calls}" / "records.npz")
    assert [t is None for t in traces] == ["lost" in t for t in result.run["traces"]]
    assert all(len(t.records) == 8 for t in traces if t)
    (scratch,) = (recorded.folder / "tmp").glob("pytest-kvcache-*")
    assert f"kept in {scratch}" in result.out
    (block,) = (json.loads(p.read_text()) for p in (scratch / "blocks").glob("*.json"))
    assert set(block["traces"][0]) == {"scenario", "arm", "run", "workload", "requests", "file", "lost"}
    assert result.run["exit_code"] == 1


FULL = """
import errno
import pytest_kvcache.harness.traces as traces

def full(path, parts):
    raise OSError(errno.ENOSPC, "No space left on device")

traces.write = full
"""


@pytest.mark.parametrize("report", [True, False])
def test_a_disk_too_full_for_raw_records_costs_no_verdict(recorded, report):
    with (recorded.folder / "conftest.py").open("a") as f:
        f.write(FULL)
    result = recorded.run("-k", "fixed and c1", report=report, seed=1)
    assert "the requests of isl64-osl16-c1 could not be written (No space left on device)" in result.out
    assert result.code == report, result.out
    if report:
        assert set(result.verdicts.values()) <= {"pass", "inconclusive"}, result.out
        assert all("No space left" in t["lost"] for t in result.run["traces"])
        assert result.run["files"] == {}

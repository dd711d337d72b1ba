"""The fingerprint: stable between two sessions of one setup, nothing secret, unknown values absent."""

from __future__ import annotations

import importlib.resources
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_kvcache.core.fingerprint import differences, identity_differences
from pytest_kvcache.harness import environment
from pytest_kvcache.harness.environment import cpu_identity, fingerprint

from ..recorded_nvml import H200, SYSTEM, RecordedNvml, card, mig_slice, sliced

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def take(**changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"python": sys.executable, "distributions": ("pytest",), "argv": (), "gpu_key": "cpu"}
    return fingerprint(**{**asked, **changes})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes a fingerprint on cards of a recording."""

    def on(*cards: Any, env: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(*cards, **more))
        return take(gpu_key="h200-sxm", env=env or {})

    return on


def check_form(found: dict[str, Any]) -> None:
    """JSON-plain, as the schema of a run has it, and nothing that is None."""
    schema = json.loads((importlib.resources.files("pytest_kvcache.schemas") / "run.schema.json").read_text())
    jsonschema.validate(found, {"$ref": "#/$defs/environment", "$defs": schema["$defs"]})
    assert json.loads(json.dumps(found)) == found
    assert None not in [v for section in found.values() for v in section.values()]


@on_linux
def test_fingerprint_of_this_machine() -> None:
    found = take(argv=(sys.executable, "-m", "x", "--port", "8123"), env={})
    check_form(found)
    assert set(found) == {"identity", "subject", "context"}
    assert found["identity"]["gpu"].endswith(" cores")
    subject = found["subject"]
    assert subject["python"] == platform.python_version()
    assert (subject["framework"], subject["dist:pytest"]) == (["pytest"], pytest.__version__)
    assert subject["server_argv"] == ["{python}", "-m", "x", "--port", "{port}"]
    assert subject["cpus_allowed"] >= 1
    assert {"host", "kernel", "memory_gib", "date", "boot_time", "load_average", "cpu_list"} <= set(found["context"])
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


@on_linux
def test_no_secret_reaches_the_fingerprint() -> None:
    env = {"VLLM_API_KEY": "s3cr3t-1", "HF_TOKEN": "s3cr3t-2", "VLLM_PROXY": "http://me:s3cr3t-3@proxy:1"}
    env |= {"PYTORCH_X": "token=s3cr3t-4", "TRANSFORMERS_AUTH": "s3cr3t-5", "SGLANG_X": '{"password": "s3cr3t-6"}'}
    argv = ("docker", "run", "-e", "HF_TOKEN=s3cr3t-7", "image", "--api-key", "s3cr3t-8", "s3cr3t-9", "--hf-token=s3cr3t-10")
    found = json.dumps(take(env=env, argv=argv))
    assert "s3cr3t" not in found
    assert "--api-key" in found
    assert "env:VLLM_PROXY" in found


def test_environment_variables_that_change_speed() -> None:
    env = {
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "TRANSFORMERS_ATTN": "y",
        "VLLM_MAX_TOKENS_PER_EXPERT": "9",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_P2P_DISABLE": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
    }
    never = {
        *("VLLM_API_KEY", "VLLM_HUB_TOKEN", "VLLM_PORT", "VLLM_HOST_IP", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PATH", "CUDA_HOME"),
        *("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "MASTER_ADDR", "NVIDIA_REQUIRE_CUDA"),
    }
    assert environment.speed_env({**env, **dict.fromkeys(never, "x")}) == {f"env:{k}": v for k, v in env.items()}


# --- the machine ---------------------------------------------------------------------------------------------------


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


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files that are there, in place of the machine's own."""
    here: dict[str, str] = {}
    monkeypatch.setattr(environment, "_read", here.get)
    return here


def subject_with(files: dict[str, str], env: dict[str, str] | None = None) -> dict[str, Any]:
    return take(env=env or {})["subject"]


def test_settings_of_the_machine_are_read_and_unknown_ones_are_absent(files: dict[str, str]) -> None:
    names = {"cpu_smt", "cpu_turbo", "cpu_boost", "numa_nodes", "numa_balancing", "transparent_hugepages", "cpu_governor", "container"}
    assert not names & set(subject_with(files))
    files |= {
        "/sys/devices/system/cpu/smt/active": "1\n",
        "/sys/devices/system/cpu/intel_pstate/no_turbo": "1\n",
        "/sys/devices/system/node/online": "0-1\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/sys/devices/system/cpu/cpufreq/boost": "odd",
    }
    files |= {f"/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": ("powersave\n", "performance\n")[n % 2] for n in range(4096)}
    found = subject_with(files)
    told = {"cpu_smt": "on", "cpu_turbo": "off", "numa_nodes": "0-1", "numa_balancing": "off", "transparent_hugepages": "madvise"}
    assert told.items() <= found.items()
    assert "cpu_boost" not in found
    assert found["cpu_governor"] in ("performance, powersave", "performance", "powersave")


@pytest.mark.parametrize(
    ("here", "env", "container"),
    [
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/run/.containerenv": 'engine="podman-5"\nimage="x:latest"\nimageid="0123456789abcdef"\n'}, {}, "podman 0123456789ab"),
        ({}, {"container": "lxc"}, "lxc"),
        ({}, {}, None),
    ],
)
def test_what_contains_us(files: dict[str, str], here: dict[str, str], env: dict[str, str], container: str | None) -> None:
    files |= here
    assert subject_with(files, env).get("container") == container


@on_linux
def test_limits_of_a_container_are_subjects(files: dict[str, str]) -> None:
    files |= {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
        "/sys/fs/cgroup/memory.max": f"{8 << 30}\n",
    }
    found = subject_with(files)
    assert (found["cpu_quota_cores"], found["memory_limit_gib"]) == (1.5, 8.0)


# --- cards ---------------------------------------------------------------------------------------------------------


def test_a_gpu_fingerprint_has_the_card_and_its_host(play: Any) -> None:
    found = play(H200, env={"CUDA_VISIBLE_DEVICES": "GPU-0a"})
    check_form(found)
    assert found["identity"] == {"gpu": "NVIDIA H200", "gpu_power_limit_w": 700}
    told = {"driver": "580.159.04", "cuda_driver": "13.0", "gpu_count": 1, "gpu_ecc": "on", "env:CUDA_VISIBLE_DEVICES": "GPU-0a"}
    assert told.items() <= found["subject"].items()
    assert found["subject"]["cpu"].endswith("cores")
    assert found["context"]["gpu_uuids"] == ["GPU-0a000000-0000-4000-8000-000000000000"]


def test_a_driver_upgrade_is_told_first_and_the_moment_is_not_told(play: Any) -> None:
    old = play(H200)
    later = card(VbiosVersion="96.00.B0", ClockInfo={"by": {1: 1980, 2: 3201}}, Temperature=70, CurrPcieLinkGeneration=1)
    new = play(later, system={**SYSTEM, "nvmlSystemGetDriverVersion": "590.10"})
    assert differences(old, new) == ["driver: 580.159.04 -> 590.10", "gpu_vbios: 96.00.A5.00.01 -> 96.00.B0"]
    assert identity_differences(old, new) == []


UPGRADES = {
    "ecc": ({"EccMode": [0, 0]}, "gpu_ecc: on -> off"),
    "clocks": ({"ApplicationsClock": {"by": {0: 1200, 2: 3201}}}, "gpu_clock_application_mhz: 1980 -> 1200"),
    "persistence": ({"PersistenceMode": 0}, "gpu_persistence: on -> off"),
    "compute mode": ({"ComputeMode": 3}, "gpu_compute_mode: default -> exclusive process"),
    "pcie": ({"MaxPcieLinkGeneration": 4}, "gpu_pcie_generation_max: 5 -> 4"),
    "numa": ({"MemoryAffinity": [1]}, "gpu_numa_nodes: 1 -> 0"),
    "inforom": ({"InforomImageVersion": "G600"}, "gpu_inforom: G525.0225.00.05 -> G600"),
    "nvlink": ({"NvLinkState": {"by": {0: 1, 1: 0}}}, "gpu_nvlinks: 18 -> 1"),
    "a link that shrank": ({"CurrPcieLinkWidth": 8}, "gpu_pcie_width: 16 -> 8"),
    "another card": ({"UUID": "GPU-b"}, "gpu_uuids: added GPU-b; removed GPU-0a000000-0000-4000-8000-000000000000"),
    "a reading that is gone": ({"EccMode": {"error": "NotSupported"}}, "gpu_ecc: on -> absent"),
}


@pytest.mark.parametrize("what", UPGRADES)
def test_what_may_vary_on_a_card_is_one_line_and_comparable(play: Any, what: str) -> None:
    changes, line = UPGRADES[what]
    old, new = play(H200), play(card(**changes))
    assert differences(old, new) == [line]
    assert identity_differences(old, new) == []


OTHERS = {
    "another model": ((card(Name="NVIDIA H100 80GB HBM3"),), "gpu: NVIDIA H200 -> NVIDIA H100 80GB HBM3"),
    "a near name": ((card(Name="NVIDIA H200 NVL"),), "gpu: NVIDIA H200 -> NVIDIA H200 NVL"),
    "a slice": ((sliced(H200, mig_slice(1, "1g.18gb")),), "mig: absent -> 1g.18gb"),
    "another power limit": ((card(EnforcedPowerLimit=400000),), "gpu_power_limit_w: 700 -> 400"),
    "a virtual GPU": ((card(Name="NVIDIA H200-141C"),), "gpu: NVIDIA H200 -> NVIDIA H200-141C"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_longer_the_same_thing_is_refused(play: Any, what: str) -> None:
    cards, line = OTHERS[what]
    old, new = play(H200), play(*cards)
    assert identity_differences(old, new) == [line]
    assert identity_differences(old, old) == []


def test_nothing_is_read_when_the_module_is_loaded() -> None:
    """No library for cards, no process, no file outside the package."""
    code = (
        "import sys, subprocess, os\n"
        "def no(*a, **k): raise SystemExit('touched the world')\n"
        "subprocess.Popen = os.statvfs = os.sched_getaffinity = no\n"
        "import pytest_kvcache.harness.environment\n"
        "assert 'pynvml' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

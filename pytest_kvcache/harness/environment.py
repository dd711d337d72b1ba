"""The fingerprint of where a number was measured. Reads only; what cannot be known is absent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core import cards, cgroup
from ..core.commandline import stable_argv, stable_word
from ..core.fingerprint import FRAMEWORK
from ..core.masking import is_secret_name, masked
from .interpreter import cuda_runtime, frameworks, installed, speed_distributions
from .nvml import Parts, gpu_parts
from .nvml import nvidia_gpus as nvidia_gpus

GIB = 1 << 30

# What decides speed below a framework: its own variables, those of CUDA and the kernels, of threads and of memory.
SPEED_ENV = frozenset(
    {"LD_PRELOAD", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"}
    | {"NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION"}
    | {"N_THREADS", "N_THREADS_BATCH", "N_BATCH", "N_UBATCH", "USE_MMAP", "DRAFT_MODEL"}  # of llama-cpp-python's server
)
SPEED_ENV_PREFIXES = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "NCCL_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "FLASHINFER_", "FLASH_ATTENTION_", "XFORMERS_", "GGML_", "LLAMA_"),
    *("VLLM_", "SGLANG_", "SGL_", "TLLM_", "TRTLLM_", "TRANSFORMERS_"),
)
# A fingerprint is stored and published, so nothing secret; and nothing that differs between sessions of one setup.
NEVER_ENV = re.compile(r"OFFLINE|_PORT$|_IP$|_ADDR$|^CUDA_(HOME|PATH)|_(CACHE_DIR|CACHE_ROOT|HOME)$")


def fingerprint(
    *,
    python: str,
    distributions: tuple[str, ...],
    argv: tuple[str, ...],
    gpu_key: str,
    env: Mapping[str, str] | None = None,
    tp: int = 1,
) -> dict[str, Any]:
    """Where and with what a server is measured: `identity` must match, `subject` may vary, `context` is only shown.

    `python` is the framework's own interpreter, `argv` its command line, `env` its environment (default: ours).
    `distributions` are the framework and what it depends on, itself first. Of the GPUs that it is given, it uses the first `tp`.
    """
    asked = installed(python)
    env = os.environ if env is None else env
    home, tmp = os.path.expanduser("~"), tempfile.gettempdir()
    identity, gpu_subject, gpu_context = _cpu_parts() if gpu_key == "cpu" else _gpu_parts(env, tp)
    subject = {
        **_cpu_limits(),
        **_settings(),
        **_container(env),
        **gpu_subject,
        "python": asked["python"],
        FRAMEWORK: frameworks(asked["distributions"], distributions) or None,
        "cuda_runtime": cuda_runtime(asked["distributions"]),
        **speed_distributions(asked["distributions"], distributions),
        **{name: stable_word(value, home, tmp) for name, value in speed_env(env).items()},
        "server_argv": stable_argv(argv, python=python, home=home, tmp=tmp),
    }
    return {"identity": _known(identity), "subject": _known(subject), "context": _known({**_context(), **gpu_context})}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def speed_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env:<NAME>` of the variables that change speed, none of them secret."""
    names = (n for n in env if n in SPEED_ENV or n.startswith(SPEED_ENV_PREFIXES))
    return {f"env:{n}": masked(env[n]) for n in sorted(names) if not NEVER_ENV.search(n) and not is_secret_name(n)}


# --- the machine ---------------------------------------------------------------------------------------------------


def cpu_identity(cpuinfo: str) -> dict[str, str]:
    """`gpu` ("AMD EPYC, 2 cores") and `cpu_id`: virtual machines show one name for several generations of a CPU."""
    blocks = [dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", b, re.M)) for b in re.split(r"\n\s*\n", cpuinfo.strip())]
    cpus = [b for b in blocks if "processor" in b] or [{}]
    sockets = {c.get("physical id", "0") for c in cpus}
    cores = {(c.get("physical id", "0"), c.get("core id", c.get("processor"))) for c in cpus}
    count = f"{len(cores)} cores" if len(sockets) == 1 else f"{len(sockets)} x {len(cores) // len(sockets)} cores"
    cpu = cpus[0]
    arm = [cpu[k] for k in ("CPU implementer", "CPU part") if k in cpu]
    name = cpu.get("model name") or (f"ARM {' '.join(arm)}" if arm else platform.processor() or platform.machine())
    found = {"gpu": f"{' '.join(name.split())}, {count}"}
    if "cpu family" in cpu and "model" in cpu:
        found["cpu_id"] = f"{cpu.get('vendor_id', 'unknown')} family {cpu['cpu family']} model {cpu['model']}"
    return found


def _cpu_parts() -> Parts:
    return cpu_identity(_read("/proc/cpuinfo") or ""), {}, {}


def _gpu_parts(env: Mapping[str, str], count: int) -> Parts:
    """On a GPU the processors are no identity, but what a move to another host varies."""
    identity, subject, context = gpu_parts(env, count)
    cpu = cpu_identity(_read("/proc/cpuinfo") or "")
    return identity, {**subject, "cpu": cpu["gpu"], "cpu_id": cpu.get("cpu_id")}, context


def _cpu_limits() -> dict[str, Any]:
    """What a deployment may take from the machine."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    governors = (_read(f"/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor") for n in allowed)
    quota, limit, total = cgroup.cpu_quota_cores(_read), cgroup.memory_limit_bytes(_read), _memory_bytes()
    return {
        "cpus_allowed": len(allowed) or os.cpu_count(),
        "cpu_quota_cores": None if quota is None else round(quota, 3),
        "cpu_governor": ", ".join(sorted({g.strip() for g in governors if g})) or None,
        "memory_limit_gib": None if limit is None or (total and limit >= total) else round(limit / GIB, 2),
    }


# name: file, what of it is the value (the pattern's group), what that is called
_SETTINGS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "cpu_smt": ("/sys/devices/system/cpu/smt/active", r"^([01])$", {"0": "off", "1": "on"}),
    "cpu_turbo": ("/sys/devices/system/cpu/intel_pstate/no_turbo", r"^([01])$", {"0": "on", "1": "off"}),
    "cpu_boost": ("/sys/devices/system/cpu/cpufreq/boost", r"^([01])$", {"0": "off", "1": "on"}),
    "numa_nodes": ("/sys/devices/system/node/online", r"^([\d,-]+)$", {}),
    "numa_balancing": ("/proc/sys/kernel/numa_balancing", r"^(\d)$", {"0": "off", "1": "on"}),
    "transparent_hugepages": ("/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]", {}),
}


def _settings() -> dict[str, str]:
    """What an administrator sets once for the machine."""
    told = {}
    for name, (path, pattern, words) in _SETTINGS.items():
        if found := re.search(pattern, (_read(path) or "").strip()):
            told[name] = words.get(found[1], found[1])
    return told


def _container(env: Mapping[str, str]) -> dict[str, Any]:
    """`container`: what runs us, and with podman which image (docker does not tell); `shm_gib`: the size of its /dev/shm."""
    podman = _read("/run/.containerenv")
    image = re.search(r'^imageid="([0-9a-f]{12})', podman or "", re.M)
    kinds = {
        "kubernetes": "KUBERNETES_SERVICE_HOST" in env,
        f"podman {image[1]}" if image else "podman": podman is not None,
        "docker": _read("/.dockerenv") is not None,
        str(env.get("container")): bool(env.get("container")),  # systemd's word for others: lxc, systemd-nspawn
    }
    try:
        shm = os.statvfs("/dev/shm")
        shm_gib = round(shm.f_blocks * shm.f_frsize / GIB, 2)
    except OSError:
        shm_gib = None
    return {"container": next((kind for kind, here in kinds.items() if here), None), "shm_gib": shm_gib}


def _memory_bytes() -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo") or "", re.M)
    return int(found[1]) * 1024 if found else None


def _context() -> dict[str, Any]:
    total = _memory_bytes()
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo") or "", re.M)
    booted = re.search(r"^btime (\d+)$", _read("/proc/stat") or "", re.M)
    return {
        "host": platform.node() or None,
        "cpu_list": cards.ranges(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "kernel": platform.release() or None,
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "os": _quiet(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "memory_gib": round(total / GIB, 1) if total else None,
        "load_average": _quiet(lambda: " ".join(f"{x:.2f}" for x in os.getloadavg())),
        "boot_time": _iso(int(booted[1])) if booted else None,
        "plugin": _quiet(lambda: importlib.metadata.version("pytest-kvcache")),
        "date": _iso(datetime.now(UTC).timestamp()),
        "virtualisation": ("hypervisor" if "hypervisor" in flags[1].split() else "none") if flags else None,
    }


def _quiet(ask: Callable[[], str]) -> str | None:
    try:
        return ask()
    except (OSError, KeyError, importlib.metadata.PackageNotFoundError):
        return None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

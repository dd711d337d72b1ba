"""The fingerprint of where a number was measured. Reads only; what cannot be known is absent."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pytest_kvcache.core import cgroup
from pytest_kvcache.core.spec import UserError

GIB = 1 << 30
ASK_TIMEOUT_S = 20

# What decides speed below a framework, when it is installed: optional accelerators are used without being required.
SPEED_DISTRIBUTIONS = (
    *("torch", "numpy", "tokenizers", "safetensors", "accelerate", "uvicorn", "fastapi", "triton", "pytorch-triton*"),
    *("nvidia-*", "flash-attn*", "flashinfer*", "vllm*", "gguf", "transformers", "xformers", "uvloop"),
)
SPEED_ENV = ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "TOKENIZERS_PARALLELISM")
SPEED_ENV_PREFIXES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "PYTORCH_", "VLLM_", "TRANSFORMERS_")
# A fingerprint is stored and published, so nothing secret; and nothing that differs between sessions of one setup.
NEVER_ENV = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASSWORD|OFFLINE|_PORT$|_IP$")

# Runs in the framework's interpreter, of any Python 3.8 or later. The working directory is not its site.
ASK = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json, platform
from importlib import metadata
found = {}
for d in metadata.distributions():
    try:
        name, version = d.metadata["Name"], d.version
        source = json.loads(d.read_text("direct_url.json") or "{}")
        commit = source.get("vcs_info", {}).get("commit_id", "")[:12]
        if name and version:
            found.setdefault(name, version + ("@" + commit if commit else ""))
    except Exception:
        pass
print()
print(json.dumps({"python": platform.python_version(), "distributions": found}))
"""


def fingerprint(
    *,
    python: str,
    distributions: tuple[str, ...],
    argv: tuple[str, ...],
    gpu_key: str,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Where and with what a server is measured: `identity` must match, `subject` may vary, `context` is only shown.

    `python` is the framework's own interpreter, `argv` its command line, `env` its environment (default: ours).
    """
    asked = installed(python)
    env = os.environ if env is None else env
    home, tmp = os.path.expanduser("~"), tempfile.gettempdir()
    identity, gpu_subject, gpu_context = _cpu_parts() if gpu_key == "cpu" else _gpu_parts(env)
    subject = {
        **_cpu_limits(),
        **gpu_subject,
        "python": asked["python"],
        **speed_distributions(asked["distributions"], distributions),
        **{name: _stable_word(value, home, tmp) for name, value in speed_env(env).items()},
        "server_argv": stable_argv(argv, python=python, home=home, tmp=tmp),
    }
    return {"identity": identity, "subject": _known(subject), "context": _known({**_context(), **gpu_context})}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


# --- the framework's interpreter ---------------------------------------------------------------------------------


@cache
def installed(python: str) -> dict[str, Any]:
    """`python` (its version) and `distributions` ({normal name: version}) of an interpreter, asked once."""
    try:
        done = subprocess.run(
            [python, "-c", ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        why = f"no answer in {ASK_TIMEOUT_S} s" if isinstance(e, subprocess.TimeoutExpired) else e.strerror
        raise UserError(f"{python}: cannot be asked for its packages ({why}); check kv_python_<framework>") from e
    try:
        found = json.loads((done.stdout.strip().splitlines() or [""])[-1])
        versions = {normal_name(k): str(v) for k, v in found["distributions"].items()}
        return {"python": str(found["python"]), "distributions": versions}
    except (ValueError, TypeError, KeyError) as e:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{python}: cannot be asked for its packages ({last}); check kv_python_<framework>") from e


def normal_name(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def speed_distributions(found: Mapping[str, str], asked: tuple[str, ...]) -> dict[str, str]:
    """`dist:<name>` of the distributions asked for and of all installed ones that decide speed."""
    names = {normal_name(n) for n in asked}
    chosen = (n for n in found if n in names or any(fnmatch.fnmatchcase(n, p) for p in SPEED_DISTRIBUTIONS))
    return {f"dist:{n}": found[n] for n in sorted(chosen)}


def speed_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env:<NAME>` of the variables that change speed."""
    names = (n for n in env if (n in SPEED_ENV or n.startswith(SPEED_ENV_PREFIXES)) and not NEVER_ENV.search(n))
    return {f"env:{n}": env[n] for n in sorted(names)}


def stable_argv(argv: tuple[str, ...], *, python: str, home: str, tmp: str) -> list[str]:
    """A command line without what differs between sessions: port, temporary paths, interpreter, home directory."""
    scripts = os.path.dirname(python) + "/"
    words = []
    for before, word in zip(("", *argv), argv, strict=False):
        if word == python:
            words.append("{python}")
        elif len(scripts) > 1 and word.startswith(scripts):
            words.append("{bin}/" + word[len(scripts) :])
        elif word.isdigit() and re.fullmatch(r"--?([a-z-]+-)?port|-p", before):
            words.append("{port}")
        else:
            words.append(_stable_word(word, home, tmp))
    return words


def _stable_word(word: str, home: str, tmp: str) -> str:
    word = re.sub(r"^(--?(?:[a-z-]+-)?port=)\d+$", r"\1{port}", word)
    word = re.sub(r"(127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\]):\d+", r"\1:{port}", word)
    word = re.sub(rf"(?<![\w/.]){re.escape(tmp)}(/[^\s\"',:=]*)?(?![\w.-])", _short_temporary, word)
    return re.sub(rf"(?<![\w/.]){re.escape(home)}(?=/|$)", "~", word) if len(home) > 1 else word


def _short_temporary(path: re.Match[str]) -> str:
    """Only the last name of a temporary path says anything, unless `tempfile` made that up, too."""
    name = (path[1] or "").rstrip("/").rpartition("/")[2]
    return "{tmp}" if not name or re.fullmatch(r"tmp[a-z0-9_]{8}", name) else "{tmp}/" + name


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


def _cpu_parts() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return cpu_identity(_read("/proc/cpuinfo") or ""), {}, {}


def _gpu_parts(env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    cards = _visible(nvidia_gpus(), env.get("CUDA_VISIBLE_DEVICES"))
    names = list(dict.fromkeys(c["name"] for c in cards if "name" in c))
    memory = max((c["memory_mib"] for c in cards if "memory_mib" in c), default=None)
    subject = {"driver": next((c["driver"] for c in cards if "driver" in c), None), "gpu_memory_mib": memory}
    context = {"gpu_uuids": [c["uuid"] for c in cards if "uuid" in c]}
    return ({"gpu": " + ".join(names)} if names else {}), subject, context


def _visible(cards: list[dict[str, Any]], chosen: str | None) -> list[dict[str, Any]]:
    """The cards that CUDA_VISIBLE_DEVICES leaves; all when it is unset or names none of them."""
    words = [w.strip() for w in (chosen or "").split(",") if w.strip()]
    found = [c for w in words for c in cards if w == str(c["index"]) or str(c.get("uuid", "")).startswith(w)]
    return found or cards


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


def _memory_bytes() -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo") or "", re.M)
    return int(found[1]) * 1024 if found else None


def _context() -> dict[str, Any]:
    total = _memory_bytes()
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo") or "", re.M)
    booted = re.search(r"^btime (\d+)$", _read("/proc/stat") or "", re.M)
    return {
        "host": platform.node() or None,
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


def nvidia_gpus() -> list[dict[str, Any]]:
    """The NVIDIA cards of this machine: `index`, `uuid`, `name`, `memory_mib`, `driver`; unreadable ones absent."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as e:
        raise UserError("NVIDIA cards cannot be read without nvidia-ml-py: pip install nvidia-ml-py") from e
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        cure = "check that nvidia-smi works here, or measure on the CPU with --kv-gpu=cpu"
        raise UserError(f"no NVIDIA driver answers here ({type(e).__name__}): {cure}") from e
    try:
        return [_card(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> dict[str, Any]:
    def reading(ask: Callable[[], Any]) -> Any:
        try:
            value = ask()
        except nvml.NVMLError:
            return None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    handle = reading(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    known = {"index": index, "driver": reading(nvml.nvmlSystemGetDriverVersion)}
    if handle is not None:
        known["uuid"] = reading(lambda: nvml.nvmlDeviceGetUUID(handle))
        known["name"] = reading(lambda: nvml.nvmlDeviceGetName(handle))
        known["memory_mib"] = reading(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20)
    return _known(known)

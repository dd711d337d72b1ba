"""The NVIDIA cards of this machine and which of them a server gets. Reads only; what cannot be read is absent, never 0.

Function names and units as in the NVML API reference ("Device Queries", "Multi Instance GPU Management", "CPU and Memory
Affinity") and in nvidia-ml-py. NVML has no query for locked clocks (`nvidia-smi -lgc`); application clocks are deprecated
since CUDA 13 and read while they last.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from ..core import cards
from ..core.spec import UserError

MASK_WORDS = 64  # room for 4096 processors or NUMA nodes
NVLINKS = 32  # more than any card has
CUDA_TIMEOUT_S = 30

Ask = Callable[[Any, Any], Any]
Parts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

_ON = {0: "off", 1: "on"}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_TOPOLOGY = {0: "same board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "host bridge", 40: "NUMA node", 50: "system"}

_INIT_CURES = {
    "NVMLError_LibraryNotFound": "its library libnvidia-ml.so.1 is not here (in a container: start it with --gpus)",
    "NVMLError_DriverNotLoaded": "its kernel module is not loaded",
    "NVMLError_LibRmVersionMismatch": "library and kernel module are of different versions after an update: reboot, or reload the driver",
    "NVMLError_NoPermission": "no permission: look at who may open /dev/nvidia*",
    "NVMLError_GpuIsLost": "a GPU has fallen off the bus: reset it, or reboot",
}


def _watts(milliwatts: int) -> float | int | None:
    watts = round(milliwatts / 1000, 1)
    return int(watts) if watts == int(watts) else watts


def _version(number: int) -> str:
    """13.0 of 13000, as CUDA counts."""
    return f"{number // 1000}.{number % 1000 // 10}"


# What is read of a card, under the name it is stored by. A 0 is no clock, width, memory or limit, but an unknown one.
_IDENTITY: Mapping[str, Ask] = {
    "uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "name": lambda n, h: n.nvmlDeviceGetName(h),
    "pci": lambda n, h: n.nvmlDeviceGetPciInfo(h).busId,
    "mig_mode": lambda n, h: _ON.get(n.nvmlDeviceGetMigMode(h)[0]),
    "power_limit_w": lambda n, h: _watts(n.nvmlDeviceGetEnforcedPowerLimit(h)) or None,
}
_SUBJECT: Mapping[str, Ask] = {
    "driver": lambda n, h: n.nvmlSystemGetDriverVersion(),
    "cuda_driver": lambda n, h: _version(n.nvmlSystemGetCudaDriverVersion_v2()),
    "memory_mib": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total >> 20 or None,
    "vbios": lambda n, h: n.nvmlDeviceGetVbiosVersion(h),
    "inforom": lambda n, h: n.nvmlDeviceGetInforomImageVersion(h),
    "ecc": lambda n, h: _ON.get(n.nvmlDeviceGetEccMode(h)[0]),
    "power_limit_default_w": lambda n, h: _watts(n.nvmlDeviceGetPowerManagementDefaultLimit(h)) or None,
    "clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM) or None,
    "memory_clock_max_mhz": lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_MEM) or None,
    "clock_application_mhz": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, n.NVML_CLOCK_GRAPHICS) or None,
    "memory_clock_application_mhz": lambda n, h: n.nvmlDeviceGetApplicationsClock(h, n.NVML_CLOCK_MEM) or None,
    "persistence": lambda n, h: _ON.get(n.nvmlDeviceGetPersistenceMode(h)),
    "compute_mode": lambda n, h: _COMPUTE_MODES.get(n.nvmlDeviceGetComputeMode(h)),
    "pcie_generation_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkGeneration(h) or None,
    "pcie_width_max": lambda n, h: n.nvmlDeviceGetMaxPcieLinkWidth(h) or None,
    "nvlinks": lambda n, h: _nvlinks(n, h),
    "numa_nodes": lambda n, h: _bits(n.nvmlDeviceGetMemoryAffinity(h, MASK_WORDS, n.NVML_AFFINITY_SCOPE_NODE)),
    "cpus": lambda n, h: _bits(n.nvmlDeviceGetCpuAffinity(h, MASK_WORDS)),
}
_CONTEXT: Mapping[str, Ask] = {
    "clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) or None,
    "memory_clock_mhz": lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) or None,
    "temperature_c": lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "pcie_generation": lambda n, h: n.nvmlDeviceGetCurrPcieLinkGeneration(h) or None,
    "pcie_width": lambda n, h: n.nvmlDeviceGetCurrPcieLinkWidth(h) or None,
}
_SLICE: Mapping[str, Ask] = {
    "mig_uuid": lambda n, h: n.nvmlDeviceGetUUID(h),
    "mig": lambda n, h: cards.split_mig(_text(n.nvmlDeviceGetName(h)))[1],
    "mig_instance": lambda n, h: f"{n.nvmlDeviceGetGpuInstanceId(h)}/{n.nvmlDeviceGetComputeInstanceId(h)}",
    "memory_mib": lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total >> 20 or None,
}
_PLAIN_NAMES = ("driver", "cuda_driver")  # all others are stored as gpu_<name>


def _bits(words: Sequence[int]) -> str | None:
    return cards.ranges(cards.set_bits(words)) or None


def _nvlinks(nvml: Any, handle: Any) -> int | None:
    """How many NVLinks are up; None for a card that has none."""
    states = [_reading(nvml, lambda n, h, link=link: n.nvmlDeviceGetNvLinkState(h, link), handle) for link in range(NVLINKS)]
    return sum(1 for s in states if s) if any(s is not None for s in states) else None


def _text(value: Any) -> Any:
    """Older bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _reading(nvml: Any, ask: Callable[..., Any], handle: Any = None) -> Any:
    """None when the card, the driver or the binding does not know; a reading that fails takes no other one down."""
    try:
        return _text(ask(nvml, handle))
    except (nvml.NVMLError, AttributeError, ValueError):
        return None


def _readings(nvml: Any, asked: Mapping[str, Ask], handle: Any) -> dict[str, Any]:
    found = {name: _reading(nvml, ask, handle) for name, ask in asked.items()}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def opened() -> Iterator[Any]:
    """The binding, initialised; UserError in one line with the cure when there is none or no driver answers."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as e:
        raise UserError("NVIDIA cards cannot be read without nvidia-ml-py: pip install nvidia-ml-py") from e
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        raise _no_driver(e) from e
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _no_driver(error: Exception) -> UserError:
    kind = type(error).__name__
    why = f"{_INIT_CURES[kind]}; " if kind in _INIT_CURES else ""
    return UserError(f"no NVIDIA driver answers here ({kind}): {why}check that nvidia-smi works, or measure on the CPU with --kv-gpu=cpu")


def nvidia_gpus() -> list[dict[str, Any]]:
    """The cards of this machine, whatever CUDA_VISIBLE_DEVICES says: `index`, and what can be read of `uuid`, `name`, `pci`,
    `mig_mode`, `mig_devices`, `topology`, `memory_mib`, `driver` and the other readings of this module's tables."""
    with opened() as nvml:
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as e:
            raise _no_driver(e) from e
        handles = [_reading(nvml, lambda n, h, i=i: n.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
        return [_card(nvml, i, handles) for i in range(count)]


def _card(nvml: Any, index: int, handles: Sequence[Any]) -> dict[str, Any]:
    handle = handles[index]
    if handle is None:
        return {"index": index}
    found = {"index": index, **_readings(nvml, {**_IDENTITY, **_SUBJECT, **_CONTEXT}, handle)}
    if found.get("mig_mode") == "on":
        found["mig_devices"] = _slices(nvml, handle)
    near = {i: _reading(nvml, lambda n, h, o=o: n.nvmlDeviceGetTopologyCommonAncestor(h, o), handle) for i, o in enumerate(handles)}
    if topology := {i: _TOPOLOGY[level] for i, level in near.items() if i != index and level in _TOPOLOGY}:
        found["topology"] = topology
    return found


def _slices(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """The MIG slices of a card that this process may see."""
    found = []
    for i in range(_reading(nvml, lambda n, h: n.nvmlDeviceGetMaxMigDeviceCount(h), handle) or 0):
        piece = _reading(nvml, lambda n, h, i=i: n.nvmlDeviceGetMigDeviceHandleByIndex(h, i), handle)
        if piece is not None:
            found.append({"mig": cards.UNKNOWN_PROFILE, **_readings(nvml, _SLICE, piece)})
    return found


# Initialises the driver's library, makes no context, takes no memory. cuDeviceGetUuid_v2 gives the slice's UUID under MIG.
_CUDA_ORDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code: sys.exit(name + " gives error " + str(code))
count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(count))
for i in range(count.value):
    call("cuDeviceGet", ctypes.byref(device), i)
    call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
    x = bytes(uuid).hex()
    print("CUDA-" + "-".join((x[:8], x[8:12], x[12:16], x[16:20], x[20:])))
"""


def cuda_order(env: Mapping[str, str]) -> list[str]:
    """UUIDs (`CUDA-...`) of the devices in CUDA's order, as if nothing hid any; UserError when CUDA cannot be asked.

    A process of its own: the library reads its environment once.
    """
    return list(_cuda_order(tuple(sorted((k, v) for k, v in env.items() if k != "CUDA_VISIBLE_DEVICES"))))


@cache
def _cuda_order(env: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CUDA_ORDER], env=dict(env), stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", errors="replace", timeout=CUDA_TIMEOUT_S, check=False,
        )  # fmt: skip
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as e:
        why = f"no answer in {CUDA_TIMEOUT_S} s" if isinstance(e, subprocess.TimeoutExpired) else str(e)
    if why:
        cure = "name the card by its UUID in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)"
        raise UserError(f"this machine has GPUs of several kinds, and CUDA does not say which it takes first ({why}): {cure}")
    return tuple(done.stdout.split())


def _in_cudas_order(found: list[cards.Device], env: Mapping[str, str]) -> list[cards.Device]:
    if not cards.needs_cudas_order(found, env):
        return found
    try:
        return cards.in_order(found, cuda_order(env))
    except UserError:
        if cards.of_one_kind(found):
            return found  # which of them it is only changes the UUIDs that are shown
        raise


def gpus_in_use(env: Mapping[str, str]) -> list[cards.Device]:
    """The cards or the MIG slice that a server with this environment is given; UserError when it is given none."""
    found = cards.devices(nvidia_gpus())
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if taken := cards.visible(found, _in_cudas_order(found, env), chosen):
        return taken
    if not found:
        raise UserError("this machine has no NVIDIA GPU; measure on the CPU with --kv-gpu=cpu")
    here = ", ".join(dict.fromkeys(f"{cards.device_id(d) or d['index']} ({d.get('name', 'unknown')})" for d in found))
    why = "CUDA by itself" if chosen is None else f"CUDA_VISIBLE_DEVICES={chosen!r}"
    raise UserError(f"{why} leaves no GPU visible; {'set CUDA_VISIBLE_DEVICES to' if chosen is None else 'unset it or name'} one of {here}")


def gpu_parts(env: Mapping[str, str], count: int | None = None) -> Parts:
    """Identity, subject and context of the first `count` cards in use; a value once when all cards agree."""
    used = gpus_in_use(env)[:count]
    models = dict.fromkeys(cards.split_mig(str(d["name"]))[0] for d in used if "name" in d)
    limits = cards.joined(d.get("power_limit_w") for d in used)  # another one is another card, as far as speed goes
    identity = {"gpu": " + ".join(models) or None, "mig": cards.joined(d.get("mig") for d in used), "gpu_power_limit_w": limits}
    subject = {_stored(name): cards.joined(d.get(name) for d in used) for name in ("mig_mode", *_SUBJECT)}
    context: dict[str, Any] = {_stored(name): cards.joined(d.get(name) for d in used) for name in _CONTEXT}
    context["gpu_uuids"] = [d["uuid"] for d in used if "uuid" in d] or None
    context["gpu_mig_uuids"] = [d["mig_uuid"] for d in used if "mig_uuid" in d] or None
    context["gpu_pci"] = [d["pci"] for d in used if "pci" in d] or None
    context["gpu_topology"] = _between(used) or None
    return identity, {"gpu_count": len(used), **subject}, context


def _stored(name: str) -> str:
    return name if name in _PLAIN_NAMES else "gpu_" + name


def _between(used: Sequence[cards.Device]) -> list[str]:
    """`0-1 host bridge`: what lies between each two of the cards, by their NVML numbers."""
    pairs = [(a, b) for i, a in enumerate(used) for b in used[i + 1 :] if b.get("index") in a.get("topology", {})]
    return [f"{a['index']}-{b['index']} {a['topology'][b['index']]}" for a, b in pairs]

"""The canary of a GPU: a fixed copy and a fixed piece of arithmetic on each card, without any framework, in a process of its own.

Only the driver is asked (CUDA Driver API reference: "Execution Control", "Event Management", "Memory Management"), with a kernel in PTX
that the driver itself compiles: no upgrade of a framework or of its libraries changes the work. One of the driver, of the card's firmware
or of its settings may, and is what is to be judged then: readings under another are not compared.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

LIMIT_S = 60.0
UNDER = ("driver", "cuda_driver", "vbios", "ecc", "clock_application_mhz", "memory_clock_application_mhz")  # as `harness.nvml` names them
WARM_S, ROUNDS = 0.6, 15  # an idle card's clocks need some tenths of a second to rise
BUFFER_BYTES, COPIES = 2**29, 8  # beyond any cache
BLOCKS_PER_SM, THREADS, TURNS = 8, 256, 40_000
SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
# Eight independent chains of fused multiply-adds; the sum is written where it can never be, so that nothing is left out.
PTX = (
    b""".version 6.4
.target sm_70
.address_size 64
.visible .entry work(.param .u64 out, .param .u32 turns)
{
  .reg .pred %p<3>; .reg .f32 %f<12>; .reg .u32 %r<4>; .reg .u64 %d<2>;
  ld.param.u64 %d1, [out];
  ld.param.u32 %r1, [turns];
  mov.u32 %r2, %tid.x;
  cvt.rn.f32.u32 %f1, %r2;
"""
    + b"".join(b"  add.f32 %%f%d, %%f1, 0f%08X;\n" % (i, 0x3F800000 + (i << 16)) for i in range(2, 10))
    + b"AGAIN:\n"
    + b"".join(b"  fma.rn.f32 %%f%d, %%f%d, 0f3F7FBE77, 0f3A83126F;\n" % (i, i) for i in range(2, 10)) * 8
    + b"  sub.u32 %r1, %r1, 8;\n  setp.gt.s32 %p1, %r1, 0;\n  @%p1 bra AGAIN;\n"
    + b"".join(b"  add.f32 %%f2, %%f2, %%f%d;\n" % i for i in range(3, 10))
    + b"  setp.lt.f32 %p2, %f2, 0fC2C80000;\n  @%p2 st.global.f32 [%d1], %f2;\n  ret;\n}\n\0"
)


class NoCanary(Exception):
    """Why there is none, in some words."""


def gpu_canary(env: Mapping[str, str], under: Mapping[str, Any], count: int = 1) -> dict[str, Any]:
    """See `core.canary`, of the first `count` cards of a server with this environment, of which the slowest counts; NoCanary, with the
    reason."""
    said, failed = _asked([sys.executable, "-I", __file__, str(count)], env)
    if failed:
        raise NoCanary(failed)
    try:
        return slowest(json.loads(said), under)
    except (ValueError, KeyError, TypeError) as e:
        raise NoCanary(f"no readings but {said[:60]!r}") from e


def _asked(argv: list[str], env: Mapping[str, str]) -> tuple[str, str]:
    """What the child says, or why it says nothing. One that a driver holds cannot be waited for, not even once it is killed."""
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as e:
        return "", str(e)
    try:
        said, error = child.communicate(timeout=LIMIT_S)
    except BaseException as e:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
        if isinstance(e, subprocess.TimeoutExpired):
            return "", f"timed out after {LIMIT_S:g} s"
        raise
    return said, next(iter(error.strip().splitlines()[-1:]), f"exit code {child.returncode}") if child.returncode else ""


def slowest(cards: Sequence[Mapping[str, Any]], under: Mapping[str, Any]) -> dict[str, Any]:
    """One reading of `uuid` and the rounds (ms) of each part, by card, made `under` a driver, a firmware and settings; ValueError
    where a time is none."""
    parts = {name: max(median(card[name]) for card in cards) for name in ("copy", "arithmetic")}
    if not all(0.001 < ms < 1e6 for ms in parts.values()):
        raise ValueError(parts)
    words = sorted(card["uuid"] for card in cards) + [f"{name} {under[name]}" for name in UNDER if under.get(name)]
    return {"on": ", ".join(words), "ms": {name: round(ms, 4) for name, ms in parts.items()}}


class Driver:
    """The driver's library; a call that fails is NoCanary with the call's and the error's name."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as e:
            raise NoCanary(f"the driver has no {name}") from e
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise NoCanary(f"{name}: {(text.value or b'').decode() or code}")

    def integer(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        self(name, ctypes.byref(found), *arguments)
        return found.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self(name, ctypes.byref(found), *arguments)
        return found


def card(cuda: Driver, index: int) -> dict[str, Any]:
    """`uuid` of a card that CUDA shows, and the `copy` and `arithmetic` rounds in ms."""
    device = cuda.integer("cuDeviceGet", index)
    name = (ctypes.c_ubyte * 16)()
    cuda("cuDeviceGetUuid_v2", name, device)  # of a slice its own, where the older call names the card
    cuda("cuCtxSetCurrent", cuda.handle("cuDevicePrimaryCtxRetain", device))
    source, target = (cuda.handle("cuMemAlloc_v2", ctypes.c_size_t(BUFFER_BYTES)) for _ in range(2))
    cuda("cuMemsetD8_v2", source, ctypes.c_ubyte(0xA5), ctypes.c_size_t(BUFFER_BYTES))
    kernel = cuda.handle("cuModuleGetFunction", cuda.handle("cuModuleLoadData", PTX), b"work")
    blocks = BLOCKS_PER_SM * cuda.integer("cuDeviceGetAttribute", SM_COUNT, device)
    turns = ctypes.c_uint(TURNS)
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(target), ctypes.addressof(turns))

    def arithmetic() -> None:
        cuda("cuLaunchKernel", kernel, blocks, 1, 1, THREADS, 1, 1, 0, None, parameters, None)

    def copy() -> None:
        for _ in range(COPIES):
            cuda("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(BUFFER_BYTES), None)

    return {"uuid": f"GPU-{uuid.UUID(bytes=bytes(name))}", **timed(cuda, {"copy": copy, "arithmetic": arithmetic})}


def timed(cuda: Driver, parts: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
    """The card's own time (ms) of each round of each part, in turns, after `WARM_S` of them."""
    began, ended = (cuda.handle("cuEventCreate", 0) for _ in range(2))

    def once(work: Callable[[], None]) -> float:
        cuda("cuEventRecord", began, None)
        work()
        cuda("cuEventRecord", ended, None)
        cuda("cuEventSynchronize", ended)
        took = ctypes.c_float()
        cuda("cuEventElapsedTime", ctypes.byref(took), began, ended)
        return took.value

    until = time.monotonic() + WARM_S
    while time.monotonic() < until:
        for work in parts.values():
            once(work)
    rounds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        for name, work in parts.items():
            rounds[name].append(once(work))
    return rounds


def main(count: int) -> list[dict[str, Any]]:
    """The rounds of the first `count` cards that CUDA shows."""
    try:
        cuda = Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as e:
        raise NoCanary(f"no CUDA driver: {e}") from e
    cuda("cuInit", 0)
    shown = cuda.integer("cuDeviceGetCount")
    if shown < count:
        raise NoCanary(f"CUDA shows {shown} of {count} cards")
    return [card(cuda, index) for index in range(count)]


if __name__ == "__main__":
    try:
        print(json.dumps(main(int(sys.argv[1]))))
    except NoCanary as e:
        sys.exit(str(e))

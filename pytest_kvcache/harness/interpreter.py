"""The framework's own interpreter: its version and what is installed there, asked once."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..core.spec import UserError

ASK_TIMEOUT_S = 20

# What decides speed below a framework, when it is installed: optional accelerators are used without being required.
SPEED_DISTRIBUTIONS = (
    *("torch", "numpy", "tokenizers", "safetensors", "accelerate", "uvicorn", "fastapi", "triton", "pytorch-triton*"),
    *("nvidia-*", "cuda-*", "flash-attn*", "flashinfer*", "vllm*", "gguf", "transformers", "xformers", "uvloop", "intel-openmp"),
    *("xgrammar", "outlines-core", "llguidance", "compressed-tensors", "bitsandbytes", "deep-gemm", "deep-ep", "lmcache", "kernels"),
)
# What comes with them and decides nothing.
NOT_SPEED = ("nvidia-ml-py*", "nvidia-modelopt*", "cuda-pathfinder")

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
        build = source.get("vcs_info", {}).get("commit_id") or source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if name and version:
            found.setdefault(name, version + ("@" + build[:12] if build else ""))
    except Exception:
        pass
print()
print(json.dumps({"python": platform.python_version(), "distributions": found}))
"""


@cache
def installed(python: str) -> dict[str, Any]:
    """`python` (its version) and `distributions` ({normal name: version}) of an interpreter, asked once.

    A build that came from no index is told apart by its commit or its archive's hash: `0.32.0@9f3c2a71b0de`.
    """
    try:
        done = subprocess.run(
            [python, "-c", ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
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
    chosen = (n for n in found if n in names or (_fits(n, SPEED_DISTRIBUTIONS) and not _fits(n, NOT_SPEED)))
    return {f"dist:{n}": found[n] for n in sorted(chosen)}


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)


def frameworks(found: Mapping[str, str], asked: tuple[str, ...]) -> list[str]:
    """Those of the distributions asked for that are installed, in their order: the framework before what it depends on."""
    return [n for n in dict.fromkeys(map(normal_name, asked)) if n in found]


def cuda_runtime(found: Mapping[str, str]) -> str | None:
    """The CUDA version that torch was built for (`13.0` of `2.11.0+cu130`), else that of the one runtime installed."""
    if build := re.search(r"\+cu(\d+)(\d)\b", found.get("torch", "")):
        return f"{build[1]}.{build[2]}"
    versions = {v for n, v in found.items() if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", n)}
    return versions.pop() if len(versions) == 1 else None

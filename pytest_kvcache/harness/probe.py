"""Run one of the package's probes in an engine's interpreter: a request in, arrays out, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.spec import UserError
from . import child
from .server import STOP_S, SUPERVISOR

PROBES = Path(__file__).parent.parent / "probes"
GRACE_S = 1.0  # of the probe, to end by itself
SAID = 300  # characters of what an engine said last


def ask(python: str, script: str, name: str, request: Mapping[str, Any], folder: Path, *, env: Mapping[str, str], timeout_s: float) -> Any:
    """The arrays of the script's answer by their names, and `told`, parsed. `folder` keeps request, answer and log as `name`.

    UserError with what the engine said last where it fails; all that it has started is gone afterwards, also when we are killed.
    """
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    asked, answer, log = (folder / f"{name}.{end}" for end in ("json", "npz", "log"))
    answer.unlink(missing_ok=True)
    asked.write_text(json.dumps(request), encoding="utf-8")
    argv = [
        sys.executable,
        "-I",
        "-S",
        str(SUPERVISOR),
        str(os.getpid()),
        str(GRACE_S),
        python,
        str(PROBES / script),
        str(asked),
        str(answer),
    ]
    pipe = subprocess.PIPE
    with log.open("wb") as out:
        process = child.start("the scoring of a text", argv, stdin=pipe, stdout=pipe, stderr=out, env=dict(env), start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(f"{python}: scoring a text took longer than {timeout_s:.0f} s (log: {log})") from None
        finally:
            unsaid = _ended(process)
    if code or not answer.exists():
        raise UserError(f"{python}: {_said_last(log, code, unsaid)} (log: {log})")
    with np.load(answer) as arrays:
        found = {key: arrays[key] for key in arrays.files}
    return found | {"told": json.loads(str(found["told"]))}


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Lets go of the pipe, upon which the supervisor ends what is left; what it said where it could start nothing."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait(STOP_S)
    with process.stdout as out:
        said = out.readline().decode(errors="replace").strip()
    return "" if said.isdigit() else said


def _said_last(log: Path, code: int, unsaid: str) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines() or [unsaid] * bool(unsaid)
    by_signal = 128 - code if code > 128 else code  # as the supervisor tells it
    return lines[-1][:SAID] if lines else f"its probe ended without a word (exit code {by_signal})"

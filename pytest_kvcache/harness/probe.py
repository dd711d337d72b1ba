"""Run one of the package's probes in an engine's interpreter: a request in, arrays out, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.spec import UserError

PROBES = Path(__file__).parent.parent / "probes"
SAID = 300  # characters of what an engine said last


def ask(python: str, script: str, name: str, request: Mapping[str, Any], folder: Path, *, env: Mapping[str, str], timeout_s: float) -> Any:
    """The arrays of the script's answer by their names, and `told`, parsed. `folder` keeps request, answer and log as `name`.

    UserError with what the engine said last where it fails; its whole process group is gone afterwards.
    """
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    asked, answer, log = (folder / f"{name}.{end}" for end in ("json", "npz", "log"))
    answer.unlink(missing_ok=True)
    asked.write_text(json.dumps(request), encoding="utf-8")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, str(PROBES / script), str(asked), str(answer)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env),
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(f"{python}: scoring a text took longer than {timeout_s:.0f} s (log: {log})") from None
        finally:
            _end(process)
    if process.returncode or not answer.exists():
        raise UserError(f"{python}: {_said_last(log, process.returncode)} (log: {log})")
    with np.load(answer) as arrays:
        found = {key: arrays[key] for key in arrays.files}
    return found | {"told": json.loads(str(found["told"]))}


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _said_last(log: Path, code: int | None) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1][:SAID] if lines else f"its probe ended without a word (exit code {code})"

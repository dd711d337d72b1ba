"""The command of `--kv-restart`, and whether it has restarted anything."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ..core.spec import UserError
from . import child

LOOK_S, GONE_LOOK_S = 0.02, 0.5  # between two looks; at a server that is gone
LAST_LOOK_S = 5.0


def run(command: str, limit_s: float) -> tuple[int, str]:
    """Exit code of a shell command and the last line that it says. UserError when it does not end in time: all that it started is ended
    then, as it is when we are interrupted. What it leaves behind when it ends by itself is the server."""
    with tempfile.TemporaryFile() as output:  # not a pipe, which a server that the command leaves behind would keep open
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = child.start("the command of --kv-restart", ["/bin/sh", "-c", command], **how)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as e:
            raise UserError(
                f"--kv-restart: the command did not end within {limit_s:g} s and was stopped; let it leave the server in the background, "
                "or give it longer by kv_start_timeout"
            ) from e
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
        return code, output.read().decode(errors="replace").strip().rpartition("\n")[2]


class Watch(threading.Thread):
    """Looks at a server from before it is restarted until after. `there` says whether it answers well: True, False when it is gone, None
    when that is not known, since it is slow or has some other fault."""

    def __init__(self, there: Callable[[], bool | None]) -> None:
        super().__init__(daemon=True)
        self._there, self._stop_it = there, threading.Event()
        self.seen: list[bool] = []  # what changed, in order

    @property
    def came_back(self) -> bool:
        """Whether it was there, then gone, then there again."""
        return len(self.seen) - (self.seen[:1] == [False]) >= 3

    def __enter__(self) -> Watch:
        self._look()
        if self.seen == [False] and not self._stop_it.wait(GONE_LOOK_S):
            self._look()
            if self.seen == [False]:  # not for a moment only: it has ended before it is restarted
                self.seen.insert(0, True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop_it.set()
        if kind is None:
            self.join(LAST_LOOK_S)
            self._look()

    def run(self) -> None:
        while not self.came_back and not self._stop_it.wait(GONE_LOOK_S if self.seen[-1:] == [False] else LOOK_S):
            self._look()

    def _look(self) -> None:
        now = self._there()
        if now is not None and self.seen[-1:] != [now]:
            self.seen.append(now)

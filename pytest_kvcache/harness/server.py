"""Starts a serving engine and takes its whole process tree down again, however pytest ends."""

from __future__ import annotations

import errno
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.commandline import masked_words, secret_values
from ..core.flags import versions_of
from ..core.framework import Framework, Launch
from ..core.masking import is_secret_name, masked
from ..core.spec import UserError
from . import child
from .ready import listeners, names, wait_ready

if TYPE_CHECKING:
    import psutil

MARKER = "PYTEST_KVCACHE_SESSION"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
GRACE_S = 5.0  # between SIGTERM and SIGKILL
SESSION = re.compile(r"\d{8}-\d{6}-([0-9a-f]{1,7})")  # of our ids; no pid has more digits than that (2**22)
SUPERVISOR_S = 30.0  # until the supervisor, a small Python process, says that it has started the engine
STOP_S = GRACE_S + 13.0  # the supervisor itself gives up before this
TAIL_LINES = 15
LOG_BYTES = 2**18  # the end of a log in which reasons are looked for
ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|couldn't bind", re.IGNORECASE)
ERROR_LINE = re.compile(r"^.*(?:\w*(?:Error|Exception)\b|\berror:|\bfatal\b).*$", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ServerError(UserError):
    """The server could not be started; the message has the reason, the end of the log and the command."""


class PortTaken(ServerError):
    """Somebody else has the port."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running engine that has answered. `pid` is the engine's own, `start_s` the seconds from launch to ready."""

    base_url: str
    port: int
    pid: int
    supervisor_pid: int
    argv: tuple[str, ...]
    log: Path
    start_s: float
    engine: EngineProcess | None = field(default=None, repr=False, compare=False)

    def pids(self) -> set[int]:
        """The supervisor and everything that was ever seen below it."""
        return {self.pid, self.supervisor_pid} | (self.engine.pids() if self.engine else set())

    def broken(self, what: str) -> ServerError:
        """An error that says `what` is wrong with a server that runs, with the end of its log."""
        assert self.engine is not None
        return self.engine.failure(what)

    def failure(self) -> ServerError | None:
        """Why the engine is gone, when it ended by itself; None while it runs."""
        ended = self.engine.ended() if self.engine else None
        return self.engine.failure(ended) if self.engine and ended else None


@contextmanager
def serve(
    framework: Framework,
    launch: Launch,
    *,
    log: Path,
    env: Mapping[str, str],
    timeout_s: float,
    session_id: str,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    """A server of one's own, ready; gone with everything it started when the block is left.

    `env` is laid over the framework's own, and both over ours. A port of 0 means any free one.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    deadline = time.monotonic() + timeout_s
    attempts = 1 if launch.port else 2
    for attempt in range(attempts):
        engine = EngineProcess(framework, replace(launch, port=_claim(framework, launch)), log)
        try:
            engine.start({**framework.env, **env, **framework.environ(engine.launch)}, session_id)  # which may name the port
            wait_ready(engine, timeout_s, deadline, say)
        except BaseException as e:
            engine.stop()
            if not isinstance(e, PortTaken) or attempt + 1 == attempts:
                raise
            say(f"{str(e).splitlines()[0]}; trying once more on another port")
            continue
        try:
            yield engine.server()
        finally:
            engine.stop()
        return


def marked_processes(session_id: str | None = None) -> list[int]:
    """Processes other than this one that carry our marker, of one session or of any; only looks, never kills."""
    wanted = f"{MARKER}=".encode() + (session_id.encode() + b"\0" if session_id is not None else b"")
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if b"\0" + wanted in b"\0" + entry.read_bytes():
                found.append(int(entry.parent.name))
    return sorted(set(found) - {os.getpid()})


def orphans() -> list[int]:
    """Processes of sessions that are over, however they ended: each carries the id of its session, which ends in pytest's own pid."""
    import psutil

    found = []
    for pid in marked_processes():
        with suppress(OSError, ValueError, psutil.Error):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            marks = [e.partition(b"=")[2].decode() for e in environ if e.startswith(f"{MARKER}=".encode())]
            session = SESSION.fullmatch(marks[0])
            if session is None:  # set by hand, or by other software
                continue
            owner = int(session[1], 16)
            # A pid may be another's by now: its process would be younger than what it is said to have started.
            if not psutil.pid_exists(owner) or psutil.Process(owner).create_time() > psutil.Process(pid).create_time():
                found.append(pid)
    return found


def _claim(framework: Framework, launch: Launch) -> int:
    """The user's port when nobody has it, else a free one."""
    with closing(socket.socket()) as probe:
        # Closed connections of an earlier server on this port are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((launch.host, launch.port))
        except OSError as e:
            why = e.strerror
            if e.errno == errno.EADDRINUSE:
                why = f"held by {names(listeners(launch.host, launch.port))}"
            raise ServerError(f"{framework.name}: cannot use port {launch.port} of {launch.host}: {why}") from e
        return int(probe.getsockname()[1])


class EngineProcess:
    """One start of an engine: its supervisor, its part of the log, every process seen below it."""

    def __init__(self, framework: Framework, launch: Launch, log: Path) -> None:
        self.framework, self.launch, self.log = framework, launch, log
        self.argv = tuple(framework.argv(launch))
        self.host = "127.0.0.1" if launch.host in ("", "0.0.0.0", "::", "localhost") else launch.host
        self.pid = 0
        self.started = time.monotonic()
        self.refused_at: float | None = None
        self._proc: subprocess.Popen[bytes] | None = None
        self._top: psutil.Process | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._lock = threading.Lock()
        self._env: dict[str, str] = {}
        self._secrets: list[str] = []
        self._log_start = 0

    def start(self, env: dict[str, str], session_id: str) -> None:
        import psutil

        self._env = env
        # SPT_NOENV keeps setproctitle (vLLM) from overwriting the environment that carries the marker.
        full = {**os.environ, **env, MARKER: session_id, "SPT_NOENV": "1"}
        self._secrets = secret_values(self.argv, os.environ, env)
        argv = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(GRACE_S), *self.argv]
        pipe = subprocess.PIPE
        with self.log.open("ab") as out:
            out.write(f"$ {shlex.join(masked_words(self.argv))}\n".encode())
            out.flush()
            self._log_start = out.tell()
            proc = child.start(self.framework.name, argv, stdin=pipe, stdout=pipe, stderr=out, env=full, start_new_session=True)
        self._proc = proc
        assert proc.stdout is not None
        word = ""
        if select.select([proc.stdout], [], [], SUPERVISOR_S)[0]:
            word = proc.stdout.readline().decode(errors="replace").strip()
        if not word.isdigit():
            raise ServerError(f"{self.framework.name}: {self.told(word or 'no supervisor: ' + self.text().strip())}")
        self.pid = int(word)
        with suppress(psutil.Error):
            self._top = psutil.Process(proc.pid)
        self.pids()

    def server(self) -> Server:
        assert self._proc is not None
        return Server(
            base_url=f"http://{self.host}:{self.launch.port}",
            port=self.launch.port,
            pid=self.pid,
            supervisor_pid=self._proc.pid,
            argv=self.argv,
            log=self.log,
            start_s=time.monotonic() - self.started,
            engine=self,
        )

    def stop(self) -> None:
        """Lets go of the pipe; the supervisor does the rest, also when this wait is interrupted."""
        import psutil

        proc = self._proc
        if proc is None:
            return
        assert proc.stdin is not None and proc.stdout is not None
        proc.stdin.close()
        try:
            proc.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.pids()
        killed = []  # only when the supervisor could not do its work
        for process in list(self._seen.values()):  # psutil compares start times: a pid that was given anew is safe
            with suppress(psutil.Error):
                process.kill()
                killed.append(process)
        psutil.wait_procs(killed, timeout=2)
        with suppress(subprocess.TimeoutExpired):
            proc.wait(2)
        proc.stdout.close()

    def pids(self) -> set[int]:
        """Supervisor and descendants, those of earlier looks included: an orphan's parent does not tell whose it is."""
        import psutil

        with self._lock:
            if self._top is not None:
                self._seen[self._top.pid] = self._top
                with suppress(psutil.Error):
                    self._seen.update((p.pid, p) for p in self._top.children(recursive=True))
            return set(self._seen)

    def ended(self) -> str | None:
        """How the engine ended, None while it runs."""
        code = self._proc.poll() if self._proc else None
        if code is None:
            return None
        if code < 0:
            return f"the engine's supervisor was killed by signal {-code}"
        with suppress(ValueError):
            return f"the engine was killed by {signal.Signals(code - 128).name}"
        return f"the engine exited with code {code}"

    def text(self) -> str:
        """The end of this start's log, without colours and overwritten lines."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_BYTES))
            return ANSI.sub("", log.read().decode(errors="replace")).replace("\r", "\n")

    def told(self, text: str) -> str:
        """What the engine said, as it may be quoted: without the secrets that we gave it and without any that can be recognised."""
        return masked(text, self._secrets)

    def port_clash(self) -> bool:
        """Whether the log of a running engine says that this very port is taken."""
        port = re.compile(rf"(?<!\d){self.launch.port}(?!\d)")
        return any(port.search(line) and ADDRESS_IN_USE.search(line) for line in self.text().splitlines())

    def failure(self, what: str, taken: bool = False) -> ServerError:
        text = self.told(self.text())
        tail = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
        shown = {k: v for k, v in self._env.items() if os.environ.get(k) != v and not is_secret_name(k)}
        by_hand = [*(["env"] if shown else []), *(f"{k}={v}" for k, v in shown.items()), *self.argv]
        reason = self._reason(text)
        parts = [f"{self.framework.name}: {self.told(what)}" + (f"; reason: {reason}" if reason else "")]
        parts.append("\n  ".join([f"end of {self.log}:", *(tail or ["(nothing was logged)"])]))
        if self.launch.device == "gpu" and "memory" in reason:
            from .gpu_memory import users

            parts.append(f"on the GPU now: {', '.join(users(self._env, self.launch.tp)) or 'no process that can be seen'}")
        parts.append(f"by hand: {shlex.join(masked_words(by_hand))}")
        taken = taken or (self.ended() is not None and ADDRESS_IN_USE.search("\n".join(tail)) is not None)
        return (PortTaken if taken else ServerError)("\n".join(parts))

    def _reason(self, text: str) -> str:
        for pattern, meaning in self.framework.known_failures:
            if match := re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
                history = {**versions_of(self.framework.flags), **self.framework.history}
                return explained(meaning.format(*match.groups("")) if match.groups() else meaning, history)
        errors = ERROR_LINE.findall(text)
        return errors[-1].strip()[:300] if errors else ""


def explained(reason: str, history: Mapping[str, str]) -> str:
    """A reason that names an argument of a history, with what that says of it: which version has it."""
    if "does not know" not in reason:
        return reason
    told = next((f"{name} {said}" for name, said in history.items() if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", reason)), "")
    return f"{reason}; {told}" if told else reason

"""A streaming server whose truth is known: mockserver.c, compiled on first use, and what it logs of each request.

    with MockServer(mode="schedule", ttft=50, tpot=10, seed=1) as server:
        ...  # talk to server.url
        truths = server.stop()

With `tls=True` it speaks TLS 1.3 by OpenSSL, and `server.ca_file` is what to trust. A truth is taken before its bytes are encrypted.

All times are nanoseconds of CLOCK_MONOTONIC, the clock of time.perf_counter_ns() on Linux.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SOURCE = Path(__file__).with_name("mockserver.c")
COMPILE = ("cc", "-O2", "-Wall", "-Wextra")
WITH_TLS, LIBRARIES = "-DKV_TLS", ("-lssl", "-lcrypto")


class NoOpenSSL(RuntimeError):
    """TLS was asked for, and this machine has no OpenSSL to compile with."""


def build(*, tls: bool = False) -> Path:
    """The compiled server, from the user's cache or made now; two processes may build at once."""
    compiler = (*COMPILE, WITH_TLS) if tls else COMPILE
    name = ("tls-" if tls else "") + hashlib.sha256(SOURCE.read_bytes() + repr(compiler).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-kvcache" / "mockserver"
    target = folder / f"mockserver-{name}"
    if target.exists():
        return target
    if not shutil.which(COMPILE[0]):
        raise RuntimeError("the mock server needs a C compiler (cc), on Debian: apt-get install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        made = Path(scratch) / "mockserver"
        argv = [*compiler, "-o", str(made), str(SOURCE), *(LIBRARIES if tls else ())]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode and any(missing in done.stderr for missing in ("openssl/", *LIBRARIES)):
            raise NoOpenSSL("the mock server needs OpenSSL's headers for TLS, on Debian: apt-get install libssl-dev")
        if done.returncode:
            raise RuntimeError(f"the mock server needs a C compiler (cc) for Linux; this one said: {done.stderr.strip()[-500:]}")
        os.replace(made, target)
    return target


@dataclass(frozen=True, slots=True)
class Truth:
    """One generation request as the server saw it. In flood mode `t` is empty: only its ends are stamped."""

    t_req: int  # the request was read to its end
    t_hdr: int  # the answer's header was about to be written; 0 in flood mode
    t_role: int  # the same of a chat's role-only chunk; 0 where there is none
    t: tuple[int, ...]  # the same of each chunk that carries tokens
    sched_ttft: int  # the delay that the schedule asked of the first chunk
    t_end: int  # all was handed to the socket
    n_tok: int
    k: int  # tokens per chunk
    xid: str  # the request's X-Request-Id, "" without one
    chat: bool
    stream: bool
    conn: int  # number of its connection
    open: int  # requests running, this one included, when it came
    aborted: bool

    @property
    def ttft_ms(self) -> float:
        return (self.t[0] - self.t_req) / 1e6

    @property
    def e2e_ms(self) -> float:
        return (self.t[-1] - self.t_req) / 1e6

    @property
    def tpot_ms(self) -> float:
        """(last - first) / (tokens - tokens of the first chunk): the first chunk's tokens took no time between the two."""
        return (self.t[-1] - self.t[0]) / (self.n_tok - self.k) / 1e6

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        return tuple((b - a) / 1e6 for a, b in itertools.pairwise(self.t))


def read_log(path: Path) -> list[Truth]:
    """The requests in the order in which they came."""
    with path.open() as f:
        return [_truth(json.loads(line)) for line in f]


def _truth(row: dict[str, Any]) -> Truth:
    kept = {name: row[name] for name in ("t_req", "t_hdr", "t_role", "t_end", "sched_ttft", "n_tok", "k", "xid", "conn", "open")}
    return Truth(t=tuple(row["t"]), chat=bool(row["chat"]), stream=bool(row["stream"]), aborted=bool(row["aborted"]), **kept)


class MockServer:
    """The server on a free port of 127.0.0.1, for the length of a `with`.

    Flags are those of mockserver.c: `jitter_ttft=20` is `--jitter-ttft 20`, `role_first=True` is `--role-first`. `nice` below
    zero gives it priority over the client that is measured, where that is allowed. With `tls` its certificate is in `ca_file`.
    """

    def __init__(self, *, nice: int = 0, tls: bool = False, **flags: str | float | bool) -> None:
        self._nice, self._tls = nice, tls
        self.ca_file: str | None = None
        self._flags = [part for name, value in flags.items() for part in _flag(name, value)]
        self._truths: list[Truth] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> MockServer:
        if not shutil.which(COMPILE[0]):
            _lacking("needs a C compiler (cc)")
        if self._tls and not shutil.which("openssl"):
            _lacking("needs the openssl command")
        try:
            program = build(tls=self._tls)
        except NoOpenSSL as e:
            _lacking(str(e))
            raise
        self._folder = tempfile.TemporaryDirectory(prefix="kv-mockserver-")
        self._log = Path(self._folder.name) / "truth.jsonl"
        argv = [str(program), "--port", "0", "--until-eof", "--log", str(self._log), *self._flags]
        if self._tls:
            self.ca_file, key = _certificate(Path(self._folder.name))
            argv += ["--tls-cert", self.ca_file, "--tls-key", key]
        with (Path(self._folder.name) / "stderr").open("w+") as errors:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                errors.seek(0)
                said = errors.read().strip()
                self._close()
                raise RuntimeError(f"the mock server stopped at once (exit code {code}): {said}")
        self.port = json.loads(line)["port"]
        if self._nice:
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, self._nice)
        return self

    def stop(self) -> list[Truth]:
        """Ends the server and returns what it saw; again later, the same."""
        if self._truths is None:
            self._process.send_signal(signal.SIGTERM)
            code = self._process.wait(30)
            try:
                if code:
                    raise RuntimeError(f"the mock server died (exit code {code})")
                self._truths = read_log(self._log)
            finally:
                self._close()
        return self._truths

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._folder.cleanup()


def _lacking(what: str) -> None:
    """Skips the test that needs it; in CI everything is there, so there it fails."""
    if "CI" not in os.environ:
        import pytest

        pytest.skip(what)


def _certificate(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", cert,
         "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-addext", "keyUsage=critical,digitalSignature,keyCertSign"], capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"openssl makes no certificate: {made.stderr.strip()[-500:]}")
    return cert, key


def _flag(name: str, value: str | float | bool) -> tuple[str, ...]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return (flag,) if value else ()
    return (flag, str(value))

"""Runs on a server that is there already (`--kv-endpoint`): nothing is started, but for the command that gives it fresh starts."""

from __future__ import annotations

import json
import platform
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.address import Endpoint
from ..core.framework import Framework
from ..core.load import Target
from ..core.masking import masked
from ..core.spec import Arm, Gpu, Model, Scenario, UserError
from ..core.workload import make_requests, single_token_words, workload_hash
from . import weights
from .page import opener
from .running import RunningEngine

ANSWER_S = 30.0
POLL_S = 0.5
START_TIMEOUT_S = 900.0
SAY_EVERY_S = 15.0
REFUSED = (400, 401, 403, 404, 405, 413, 415, 422)
CURES = {401: "; is its key in KV_API_KEY?", 403: "; is its key in KV_API_KEY?", 404: "; is the path of the address right?"}
TLS_CURE = "name the certificate of its authority in the ini option kv_ca_file, or set kv_insecure to check nothing"


class Unreachable(UserError):
    """The server does not answer; it may later."""


@dataclass(frozen=True, kw_only=True)
class AttachedServer:
    """What a running engine is asked of its server; there is no process to look at."""

    base_url: str
    start_s: float = 0.0

    def pids(self) -> set[int]:
        return set()

    def failure(self) -> UserError | None:
        return None


class Client:
    """Asks a server a few things outside of any load."""

    def __init__(self, endpoint: Endpoint, env: Mapping[str, str]) -> None:
        self.target: Target = endpoint.target("", env)
        try:
            self._open = opener(self.target).open
        except OSError as e:
            raise UserError(f"--kv-endpoint: kv_ca_file, kv_cert_file or kv_key_file cannot be read: {e}") from e

    def ask(self, path: str, body: Any = None, timeout_s: float = ANSWER_S) -> tuple[int, str]:
        """Status and text; Unreachable when nothing answers, UserError when that cannot be cured by waiting."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.target.headers, **({"Content-Type": "application/json"} if data else {})}
        try:
            with self._open(urllib.request.Request(self.target.base_url + path, data, headers), timeout=timeout_s) as answer:
                return int(answer.status), answer.read().decode(errors="replace")
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode(errors="replace")
        except (OSError, ValueError) as e:
            reason: Any = getattr(e, "reason", e)
            if type(reason).__name__ == "SSLCertVerificationError":
                raise UserError(f"{self.target.base_url}: its certificate is not trusted ({reason.verify_message}); {TLS_CURE}") from e
            raise Unreachable(f"{self.target.base_url} does not answer: {reason}") from e


class AttachedRunner:
    """Measures on a server of somebody else's. With a restart command every run begins with it."""

    def __init__(
        self, endpoint: Endpoint, framework: Framework, model: Model, gpu: Gpu, python: str, *, env: Mapping[str, str],
        say: Callable[[str], None], start_timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.endpoint, self.framework, self.model, self.gpu, self.env, self.say = endpoint, framework, model, gpu, env, say
        self.timeout_s = start_timeout_s or START_TIMEOUT_S
        self.client = Client(endpoint, env)
        self.api = "chat" if framework.endpoint.endswith("/chat/completions") else "completions"
        tokenizer, self.identity = weights.tokenizer_of(model, framework, python, say)
        self.words = single_token_words(tokenizer)
        self._served: str | None = None
        if self.client.target.proxy:
            say(f"measured through the proxy {masked(self.client.target.proxy)}, which may hold back parts of a stream")
        if endpoint.insecure:
            say("no certificate is checked (kv_insecure)")

    def served(self) -> str:
        """The name by which the server knows the model; UserError when it has several and none is the one asked for."""
        if self._served is None:
            status, text = self.client.ask(self.endpoint.address.models())
            try:
                ids = [str(row["id"]) for row in json.loads(text)["data"]] if status == 200 else []
            except (ValueError, LookupError, TypeError):
                ids = []
            wanted = {self.model.key, self.model.hub_id, self.model.path}
            found = [i for i in ids if i in wanted] or ids
            if len(found) > 1:
                raise UserError(f"--kv-endpoint: the server has {', '.join(found)}; say which by --kv-model")
            self._served = found[0] if found else str(self.model.hub_id or self.model.key)
        return self._served

    def environment(self, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
        """What can be known of a server from outside: its address, its own word on its version, the model's tokenizer."""
        path = self.endpoint.address.at_root("/version")
        try:
            status, version = self.client.ask(path)
        except Unreachable:
            if not self.endpoint.restart:
                raise
            self._fresh()
            status, version = self.client.ask(path)
        try:
            told = str(json.loads(version)["version"]) if status == 200 else None
        except (ValueError, LookupError, TypeError):
            told = None
        subject = {
            "endpoint": self.endpoint.address.shown(), "server_version": told, "model_served": self.served(),
            "through_proxy": masked(self.client.target.proxy) if self.client.target.proxy else None,
            "tls_verification": "off" if self.endpoint.insecure else None,
        }  # fmt: skip
        return {
            "identity": {"gpu": f"{self.gpu.key}, as it was named", "endpoint": "attached", **self.identity},
            "subject": {k: v for k, v in subject.items() if v is not None},
            "context": {"client_host": platform.node()},
        }

    def workload(self, scenario: Scenario) -> str:
        return workload_hash(make_requests(scenario, self.words), scenario)

    def canary(self) -> None:
        return None

    @contextmanager
    def start(self, arm: Arm, run: int, attempt: int) -> Iterator[RunningEngine]:
        """The server, answering; restarted before that where a command does so."""
        began = time.monotonic()
        self._fresh()
        address = self.endpoint.address
        yield RunningEngine(
            server=AttachedServer(base_url=address.origin + address.root, start_s=time.monotonic() - began),
            framework=self.framework,
            model=self.served(), words=self.words, arm=arm, run=run, workload=self.workload, device="attached",
            target=self.endpoint.target(address.endpoint(self.api), self.env),
        )  # fmt: skip

    def _fresh(self) -> None:
        """A fresh start where there is a command for it; either way the server answers then."""
        began = time.monotonic()
        if self.endpoint.restart:
            self._restart()
        self._wait(began, patient=bool(self.endpoint.restart))

    def _restart(self) -> None:
        self.say(f"  restarting the server: {masked(self.endpoint.restart)}")
        try:
            done = subprocess.run(
                self.endpoint.restart, shell=True, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
                timeout=self.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise UserError(f"--kv-restart: the command did not end within {self.timeout_s:g} s") from e
        if done.returncode:
            last = masked((done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2])
            raise UserError(f"--kv-restart: the command ended with exit code {done.returncode}" + (f": {last}" if last else ""))

    def _wait(self, began: float, *, patient: bool) -> None:
        """Until a token comes; without a restart a server that does not answer at once is an error."""
        due = began + SAY_EVERY_S
        while True:
            problem, final = self._one_token()
            if not problem:
                return
            if final or not patient:
                raise UserError(f"--kv-endpoint: {problem}")
            waited = time.monotonic() - began
            if waited > self.timeout_s:
                raise UserError(f"--kv-endpoint: not ready within {self.timeout_s:g} s after --kv-restart: {problem}")
            if time.monotonic() > due:
                self.say(f"  not ready after {waited:.0f} s of {self.timeout_s:g} s: {problem}")
                due += SAY_EVERY_S
            time.sleep(POLL_S)

    def _one_token(self) -> tuple[str, bool]:
        """What stands in the way of a token, empty when nothing does, and whether waiting is of no use."""
        path = self.endpoint.address.endpoint(self.api)
        try:
            status, text = self.client.ask(path, self.framework.body(self.served(), "Hello", 1))
        except Unreachable as e:
            return str(e), False
        if status == 200 and "data:" in text and '"error"' not in text[:200]:
            return "", False
        said = " ".join(text.split())[:200]
        return masked(f"POST {path} answered {status}: {said}{CURES.get(status, '')}"), status in REFUSED

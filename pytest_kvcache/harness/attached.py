"""Runs on a server that is there already (`--kv-endpoint`): nothing is started, but for the command that gives it fresh starts."""

from __future__ import annotations

import http.client
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..core.address import APIS, Endpoint, as_chat
from ..core.framework import Framework
from ..core.load import Target
from ..core.masking import masked
from ..core.readings import parsed
from ..core.spec import Arm, Gpu, Model, Scenario, UserError
from ..core.workload import end_tokens, make_requests, single_token_words, workload_hash
from . import weights
from .page import opener
from .ready import REFUSED, REFUSED_S, SAY_EVERY_S, gave_a_token
from .running import RunningEngine

ANSWER_S = 30.0
POLL_S = 0.5
WATCH_S, LOOK_S = 2.0, 0.02
START_TIMEOUT_S = 900.0
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

    def __init__(self, endpoint: Endpoint) -> None:
        self.target: Target = endpoint.server
        self.root = endpoint.address.root
        self.secrets = endpoint.secrets()
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
            with suppress(OSError, http.client.HTTPException):
                return e.code, e.read().decode(errors="replace")
            return e.code, ""
        except (OSError, ValueError, http.client.HTTPException) as e:
            reason: Any = getattr(e, "reason", e)
            if type(reason).__name__ == "SSLCertVerificationError":
                raise UserError(f"{self.target.base_url}: its certificate is not trusted ({reason.verify_message}); {TLS_CURE}") from e
            raise Unreachable(f"{self.target.base_url} does not answer: {self.told(str(reason) or type(reason).__name__)}") from e

    def told(self, text: str) -> str:
        """A text of the server's, as it may be quoted: without anything that we sent to prove who we are."""
        return masked(" ".join(text.split()), self.secrets)[:300]

    def started_at(self) -> float | None:
        """When the process behind the metrics page began, by its own word."""
        try:
            status, page = self.ask(self.root + "/metrics", timeout_s=5.0)
            found = [s.value for s in parsed(page) if s.name == "process_start_time_seconds"] if status == 200 else []
        except (UserError, ValueError):
            return None
        return max(found, default=None)


class AttachedRunner:
    """Measures on a server of somebody else's. With a restart command every run begins with it."""

    def __init__(
        self, endpoint: Endpoint, framework: Framework, model: Model, gpu: Gpu, python: str, *,
        say: Callable[[str], None], session_id: str, start_timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        self.endpoint, self.framework, self.model, self.gpu, self.say = endpoint, framework, model, gpu, say
        self.session_id, self.timeout_s = session_id, start_timeout_s or START_TIMEOUT_S
        self.client = Client(endpoint)
        self.api = api_of(framework, endpoint)
        tokenizer, self.identity = weights.tokenizer_of(model, framework, python, say)
        self.words, self.ends = single_token_words(tokenizer), end_tokens(tokenizer)
        self._served: str | None = None
        if self.client.target.proxy:
            say(f"measured through the proxy {masked(self.client.target.proxy)}, which may hold back parts of a stream")
        if endpoint.server.insecure:
            say("no certificate is checked (kv_insecure)")

    def served(self) -> str:
        """The name by which the server knows the model; UserError when it has several and none is the one asked for."""
        if self._served is not None:
            return self._served
        status, text = self.client.ask(self.endpoint.address.models())
        try:
            ids = [str(row["id"]) for row in json.loads(text)["data"]] if status == 200 else []
        except (ValueError, LookupError, TypeError):
            ids = []
        wanted = {name for name in (self.model.key, self.model.hub_id, self.model.path) if name}
        found = [i for i in ids if i in wanted] or ([] if self.model.hub_id else ids)
        if len(found) > 1 or (ids and not found):
            raise UserError(
                f"--kv-endpoint: the server has {self.client.told(', '.join(ids))}, not {self.model.key}; say which by --kv-model"
            )
        if not found:
            return str(self.model.hub_id or self.model.key)  # it has no such list, or not yet
        self._served = found[0]
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
            "endpoint": self.endpoint.address.shown(), "server_version": told,
            "through_proxy": masked(self.client.target.proxy) if self.client.target.proxy else None,
            "tls_verification": "off" if self.endpoint.server.insecure else None,
        }  # fmt: skip
        way = "attached, through a proxy" if self.client.target.proxy else "attached"  # whose stamps are others
        identity = {"gpu": f"{self.gpu.key}, as it was named", "endpoint": way, "model_served": self.served()}
        return {
            "identity": {**identity, **self.identity},
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
            server=AttachedServer(base_url=address.origin + address.root, start_s=time.monotonic() - began), framework=self.framework,
            model=self.served(), words=self.words, ends=self.ends, arm=arm, run=run, workload=self.workload, device="attached",
            target=self.endpoint.target(address.endpoint(self.api)), secrets=self.client.secrets, chat=self.chat,
            salt="" if self.endpoint.restart else f" {self.session_id} {run} {attempt}",
        )  # fmt: skip

    @property
    def chat(self) -> bool:
        """Whether the body of a completion is to be said as a chat: the address names that endpoint."""
        return self.api == "chat" and not self.framework.endpoint.endswith(APIS["chat"])

    def _fresh(self) -> None:
        """A fresh start where there is a command for it; either way the server answers then."""
        began = time.monotonic()
        if not self.endpoint.restart:
            return self._wait(began, patient=False)
        before = self.client.started_at()
        with _Watch(self.client, self.endpoint.address.models()) as watch:
            self._restart()
            self._wait(began, patient=True)
        after = self.client.started_at()
        if not watch.down and (before is None or after is None or after == before):
            raise UserError(
                "--kv-restart: nothing shows that the server was restarted: it never stopped answering, and its metrics page "
                + ("tells no start of its process" if before is None or after is None else "tells the same start of its process")
            )

    def _restart(self) -> None:
        self.say(f"  restarting the server by the command of --kv-restart, at most {self.timeout_s:g} s")
        with tempfile.TemporaryFile() as output:  # not a pipe, which a server that the command leaves behind would keep open
            try:
                done = subprocess.run(
                    self.endpoint.restart, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    timeout=self.timeout_s, check=False, start_new_session=True,
                )  # fmt: skip
            except subprocess.TimeoutExpired as e:
                raise UserError(f"--kv-restart: the command did not end within {self.timeout_s:g} s") from e
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
            said = output.read().decode(errors="replace").strip().rpartition("\n")[2]
        if done.returncode:
            last = f": {self.client.told(said)}" if said else ""
            raise UserError(f"--kv-restart: the command ended with exit code {done.returncode}{last}")

    def _wait(self, began: float, *, patient: bool) -> None:
        """Until a token comes; without a restart a server that does not answer at once is an error. A refusal is waited for a little:
        a gateway says 404 until what is behind it has come."""
        due, refused = began + SAY_EVERY_S, 0.0
        while problem := self._one_token():
            words, final = problem
            waited = time.monotonic() - began
            refused = (refused or time.monotonic()) if final else 0.0
            if not patient or (refused and time.monotonic() - refused > REFUSED_S):
                raise UserError(f"--kv-endpoint: {words}")
            if waited > self.timeout_s:
                raise UserError(f"--kv-endpoint: not ready within {self.timeout_s:g} s after --kv-restart: {words}")
            if time.monotonic() > due:
                self.say(f"  not ready after {waited:.0f} s of {self.timeout_s:g} s: {words}")
                due += SAY_EVERY_S
            time.sleep(POLL_S)

    def _one_token(self) -> tuple[str, bool] | None:
        """What stands in the way of a token, and whether waiting is of little use; None when nothing does."""
        address = self.endpoint.address
        try:
            body = self.framework.body(self.served(), "Hello", 1)
            status, text = self.client.ask(address.endpoint(self.api), as_chat(body) if self.chat else body)
        except Unreachable as e:
            return str(e), False
        if gave_a_token(status, text.encode().splitlines()):
            return None
        path = (address.full or address.api + APIS[self.api]).partition("?")[0]
        return f"POST {path} answered {status}: {self.client.told(text) or 'nothing'}{CURES.get(status, '')}", status in REFUSED


def api_of(framework: Framework, endpoint: Endpoint) -> str:
    """`chat` or `completions`: as a full address says, else the framework's own."""
    own, full = ("chat" if framework.endpoint.endswith(APIS["chat"]) else "completions"), endpoint.address.full
    named = own if not full else "chat" if full.endswith(APIS["chat"]) else "completions"
    if named == "completions" and own == "chat":
        raise UserError(
            f"--kv-endpoint: {framework.name} tells token counts on its chat endpoint only; name {APIS['chat']}, or no full path"
        )
    return named


class _Watch(threading.Thread):
    """Whether a server was gone for a moment: `down` once it did not answer, or only with a fault of the gateway before it."""

    def __init__(self, client: Client, path: str) -> None:
        super().__init__(daemon=True)
        self.client, self.path, self.down, self._stop_it = client, path, False, threading.Event()

    def __enter__(self) -> _Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_it.set()
        self.join(2 * WATCH_S)

    def run(self) -> None:
        while not self.down and not self._stop_it.wait(LOOK_S):
            try:
                self.down = self.client.ask(self.path, timeout_s=WATCH_S)[0] >= 500
            except Unreachable:
                self.down = True
            except UserError:
                return

"""Runs on a server that is there already (`--kv-endpoint`): nothing is started, but for the command that gives it fresh starts."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..core.address import APIS, Endpoint, as_chat
from ..core.framework import Framework
from ..core.load import Target
from ..core.masking import masked
from ..core.readings import parsed
from ..core.scenarios import Scenario, Traffic
from ..core.spec import Arm, Gpu, Model, UserError
from ..core.workload import end_tokens, make_requests, single_token_words, workload_hash
from . import restart, weights
from .asking import ask, opener
from .page import TIMEOUT_S as PAGE_S
from .ready import REFUSED, REFUSED_S, SAY_EVERY_S, gave_a_token
from .restart import Watch
from .running import RunningEngine

ANSWER_S = 30.0
POLL_S = 0.5
WATCH_S, GONE = 2.0, (502, 503, 504)  # a look at a server that is restarted; what a gateway says of one that is gone
NO_TUNNEL = tuple(f"Tunnel connection failed: {status}" for status in GONE)  # ... and urllib, where a proxy says it
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
            self._way = opener(self.target)
        except OSError as e:
            raise UserError(f"--kv-endpoint: kv_ca_file, kv_cert_file or kv_key_file cannot be read: {e}") from e

    def ask(self, path: str, body: Any = None, limit_s: float | None = None) -> tuple[int, str]:
        """Status and text; Unreachable when no whole answer comes, UserError when that cannot be cured by waiting."""
        data, limit_s = None if body is None else json.dumps(body).encode(), limit_s or ANSWER_S
        headers = {**self.target.headers, **({"Content-Type": "application/json"} if data else {})}
        try:
            return ask(self._way, self.target.base_url + path, limit_s=limit_s, headers=headers, body=data)
        except TimeoutError as e:
            where = self.target.base_url + path.partition("?")[0]
            raise Unreachable(f"{where} gave no whole answer within {limit_s:g} s; is the server busy, or still starting?") from e
        except (OSError, ValueError) as e:
            if type(e).__name__ == "SSLCertVerificationError":
                why = getattr(e, "verify_message", e)
                raise UserError(f"{self.target.base_url}: its certificate is not trusted ({why}); {TLS_CURE}") from e
            raise Unreachable(f"{self.target.base_url} does not answer: {self.told(str(e) or type(e).__name__)}") from e

    def there(self, path: str) -> bool | None:
        """Whether it answers this well, False when nobody is there to, None when it is slow or has another fault."""
        try:
            status = self.ask(path, limit_s=WATCH_S)[0]
        except Unreachable as e:
            return False if isinstance(e.__cause__, ConnectionError) or str(e.__cause__).startswith(NO_TUNNEL) else None
        except UserError:
            return None
        return True if status < 500 else False if status in GONE else None

    def told(self, text: str) -> str:
        """A text of the server's, as it may be quoted: without anything that we sent to prove who we are."""
        return masked(" ".join(text.split()), self.secrets)[:300]

    def started_at(self) -> float | None:
        """When the process behind the metrics page began, by its own word."""
        try:
            status, page = self.ask(self.root + "/metrics", limit_s=PAGE_S)
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
            self._restart(time.monotonic())
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
        assert isinstance(scenario, Traffic)  # a text needs an interpreter: the plan sees to it
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
        with Watch(lambda: self.client.there(self.endpoint.address.models())) as watch:
            self._restart(began)
        after = self.client.started_at()
        if not watch.came_back and (before is None or after is None or after == before):
            told = "no" if before is None or after is None else "the same"
            raise UserError(
                "--kv-restart: nothing shows that the server was restarted: it was not seen to be gone and to come back, and its metrics "
                f"page tells {told} start of its process; name a command that ends the server and starts it"
            )

    def _restart(self, began: float) -> None:
        self.say(f"  restarting the server by the command of --kv-restart, at most {self.timeout_s:g} s")
        code, said = restart.run(self.endpoint.restart, self.timeout_s)
        if code:
            last = f": {self.client.told(said)}" if said else ""
            raise UserError(f"--kv-restart: the command ended with exit code {code}{last}")
        self._wait(began, patient=True)

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

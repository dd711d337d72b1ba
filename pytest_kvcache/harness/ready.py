"""When a server is ready: the right process, with the right model, has generated a token. /health alone is no proof."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .asking import ask, opener

if TYPE_CHECKING:
    from .server import EngineProcess

POLL_S = 0.15
SAY_EVERY_S = 15.0
REFUSED = (400, 401, 403, 404, 405, 413, 415, 422)  # answers that waiting does not change ...
REFUSED_S = 10.0  # ... once they have lasted this long

Answer = tuple[int, list[bytes]]


def wait_ready(engine: EngineProcess, timeout_s: float, deadline: float, say: Callable[[str], None]) -> None:
    """Returns when the engine is ready; raises when it has ended, refuses, is not ours or the time is over."""
    name, due = engine.framework.name, engine.started + SAY_EVERY_S
    probe = _Probe(engine, deadline)
    while True:
        probe.join(POLL_S)
        waited = time.monotonic() - engine.started
        if ended := engine.ended():
            raise engine.failure(f"{ended} after {waited:.1f} s, before it was ready")
        if time.monotonic() > deadline and probe.answer:
            raise engine.failure(f"not ready within {timeout_s:g} s; last probe: {probe.answer}")
        if time.monotonic() > due:
            say(f"{name}: not ready after {waited:.0f} s of {timeout_s:g} s; last probe: {engine.told(probe.answer)}")
            due += SAY_EVERY_S
        if not probe.is_alive():
            if probe.error:
                raise probe.error
            if not probe.answer:
                return
            if engine.port_clash():
                raise engine.failure(f"port {engine.launch.port} is taken", taken=True)
            time.sleep(POLL_S)
            probe = _Probe(engine, deadline)


class _Probe(threading.Thread):
    """One round of questions, off the main thread so that a hanging answer hides neither a death nor the time-out.

    `answer` is empty when the engine is ready, else why it is not yet; `error` is what waiting cannot cure.
    """

    def __init__(self, engine: EngineProcess, deadline: float) -> None:
        super().__init__(daemon=True)
        self.engine, self.left_s = engine, max(0.1, deadline - time.monotonic())
        self.answer = f"no answer yet to GET {engine.framework.health}"
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        framework = self.engine.framework
        try:
            status, _ = _request(self.engine, framework.health, min(5.0, self.left_s))
            if status != 200:
                self.answer = f"GET {framework.health} answered {status}"
                return
            _check_owner(self.engine)
            _check_model(self.engine)
            self.answer = f"no answer yet to POST {framework.endpoint}"
            self.answer = _one_token(self.engine, self.left_s)
        except TimeoutError:
            pass  # the answer says what was waited for
        except OSError as e:
            self.answer = str(e) or type(e).__name__
        except Exception as e:
            self.error = e


def _request(engine: EngineProcess, path: str, timeout_s: float, body: Any = None) -> Answer:
    """Status of the answer and its lines up to `[DONE]`."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"} if data else {}
    url = f"http://{engine.host}:{engine.launch.port}{path}"
    status, text = ask(opener(None), url, limit_s=timeout_s, headers=headers, body=data)
    return status, [line.strip() for line in text.encode().splitlines()]


def _check_owner(engine: EngineProcess) -> None:
    """The socket must be ours: a leftover server on the same port answers every probe just as well."""
    port = engine.launch.port
    others = listeners(engine.host, port) - engine.pids()
    if others and not engine.launch.command:  # a command of the user's own may start it elsewhere, as docker does
        raise engine.failure(f"port {port} is answered by {names(others)}, not by the engine started here", taken=True)


def _check_model(engine: EngineProcess) -> None:
    model = engine.launch.model
    try:
        status, lines = _request(engine, "/v1/models", 5.0)
        listed = json.loads(b"\n".join(lines))["data"] if status == 200 else []
        ids = {str(row[key]) for row in listed for key in ("id", "root") if row.get(key)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # it has no such list
    if ids and not {model, Path(model).name} & ids:  # some servers call a folder by its last part
        what = f"another server answers on port {engine.launch.port}: it has {', '.join(sorted(ids))}, not {model}"
        raise engine.failure(what)


def _one_token(engine: EngineProcess, timeout_s: float) -> str:
    """Empty when one streamed token came, else what came instead."""
    framework = engine.framework
    body = framework.body(engine.launch.model, "Hello", 1)
    status, lines = _request(engine, framework.endpoint, timeout_s, body)
    if gave_a_token(status, lines):
        return ""
    words = b" ".join(lines).decode(errors="replace")[:300] or "nothing"
    answer = f"POST {framework.endpoint} answered {status}: {words}"
    if status in REFUSED:
        engine.refused_at = engine.refused_at or time.monotonic()
        if time.monotonic() - engine.refused_at > REFUSED_S:
            raise engine.failure(f"the engine refuses a one-token request; {answer}")
    return answer


def gave_a_token(status: int, lines: Iterable[bytes]) -> bool:
    """Whether an answer to a request for one streamed token has it: events, and no error among them."""
    events = [_event(line[5:]) for line in lines if line.startswith(b"data:")]
    told = [e for e in events if e]
    return status == 200 and bool(told) and not any(e.get("error") or e.get("object") == "error" for e in told)


def _event(data: bytes) -> dict[str, Any]:
    """What an event says; nothing where that is no JSON object: a ping, the end mark."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def listeners(host: str, port: int) -> set[int | None]:
    """Who listens there: pids, None for a process that may not be looked at; empty when nothing may be."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return set()
    here = {host, "127.0.0.1", "0.0.0.0", "::"}
    at = [(c.laddr, c.pid) for c in connections if c.status == psutil.CONN_LISTEN]
    return {pid for addr, pid in at if addr and addr.port == port and addr.ip.removeprefix("::ffff:") in here}


def names(pids: Iterable[int | None]) -> str:
    """`pid 12 (python3), …` for people."""
    import psutil

    words = []
    for pid in pids:
        name = "a process that may not be looked at"
        if pid is not None:
            name = f"pid {pid}"
            with suppress(psutil.Error):
                name += f" ({psutil.Process(pid).name()})"
        words.append(name)
    return ", ".join(words) or "an unknown process"

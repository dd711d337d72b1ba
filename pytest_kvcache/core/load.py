"""What a load generator is told and what it tells: targets, loads, what was seen. Frozen values that cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from .record import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go.

    `base_url` is `http://host:port` or `https://…`, `endpoint` the path below it. For TLS: `ca_file` to trust instead of the
    system's, `cert_file` and `key_file` of a client certificate, `insecure` to check nothing. `proxy` is the URL of an HTTP
    proxy; with one, requests go by aiohttp and are stamped when its reader hands them over.
    """

    base_url: str
    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False
    proxy: str | None = None

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{self.base_url!r} is no http:// or https:// address")
        try:
            url.hostname.encode("idna")
        except UnicodeError as e:
            raise ValueError(f"{self.base_url!r}: {url.hostname!r} is no host name") from e
        if url.username or url.password:
            raise ValueError("a user or password in the address is not sent; use an Authorization header")
        for name, value in self.headers.items():
            if not (name.isascii() and name.isprintable() and value.isprintable() and value.isascii()):
                raise ValueError(f"header {name!r}: only printable ASCII can be sent, and no line end")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to send, in order: JSON bodies and the output tokens each asks for.

    Closed loop: `concurrency` streams, each sending the next request when its last is answered. Open loop: request i is sent `due_s[i]`
    seconds after the start (ascending), whatever is still open. Nothing is retried. A request stalls when nothing at all comes for
    `first_timeout_s`, or for `idle_timeout_s` once two events have come, or no event for `progress_timeout_s` though comments keep the
    connection alive; what the load process has not sent by then is not sent: every one of those requests would be waited for. `textless`
    and `by_length`: see `core.answer.Asked`. `secrets` are kept out of what is told of failures.
    """

    bodies: tuple[bytes, ...]
    osl: tuple[int, ...]
    concurrency: int | None = None
    due_s: tuple[float, ...] | None = None
    ignore_eos: bool = True
    textless: bool = False
    by_length: bool = False
    secrets: tuple[str, ...] = ()
    first_timeout_s: float = 900.0  # a long prefill behind a full queue sends nothing
    idle_timeout_s: float = 120.0
    progress_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.due_s is None):
            raise ValueError("a load is either a closed loop (concurrency) or an open one (due_s)")
        if len(self.osl) != len(self.bodies) or (self.due_s is not None and len(self.due_s) != len(self.bodies)):
            raise ValueError("bodies, osl and due_s differ in length")
        if self.due_s is not None and list(self.due_s) != sorted(self.due_s):
            raise ValueError("due_s must ascend")

    def share(self, part: int, parts: int) -> tuple[tuple[int, ...], Load]:
        """The requests of worker `part` of `parts`, by their index, as a load of its own: each stream keeps its share."""
        streams = self.concurrency or parts
        index = tuple(i for i in range(len(self.bodies)) if i % streams % parts == part)
        return index, replace(
            self, bodies=tuple(self.bodies[i] for i in index), osl=tuple(self.osl[i] for i in index),
            concurrency=None if self.concurrency is None else len(range(part, self.concurrency, parts)),
            due_s=None if self.due_s is None else tuple(self.due_s[i] for i in index),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a load met. Record times are seconds after `zero_ns` of CLOCK_MONOTONIC; `itl` and `arrivals` as in `Trace`.

    `client` says what the load generator itself did (see `core.validity.client_problem` for what is too much): `workers`
    and their `priority` (`realtime`, or `nice N` where that is not allowed), `cpu_s` in all and `decode_s` of it after the
    window, `cores` of the busiest worker in the window, `stamps` (`kernel` or `read`), `read_lag_ms` from a byte's arrival to
    its reading, `send_lag_ms` from the schedule to the send, `slot_gap_ms` from an answer's end to the next send on its
    stream, `loop_lag_ms` of a heartbeat inside the load's own loop; each with `p50`, `p99`, `max`. `slot_idle_s` is the sum of
    the slot gaps, `clock_steps` how often the clock that the kernel stamps by was set.
    """

    zero_ns: int
    records: tuple[RequestRecord, ...]
    itl: dict[str, list[Any]]
    arrivals: dict[str, list[Any]]
    client: dict[str, Any]


MAX_PLANNED_CORES = 0.35  # of one core, planned for each worker by a mean rate: at twice that a run is invalid


def plan_workers(tokens_s: float, requests_s: float, needs: Mapping[str, float], cores: int) -> tuple[int, float]:
    """Worker processes for a load of that rate, and the cores each will use, by what the client `needs`
    (`harness.calibrate.replay`); at most half the machine's cores."""
    wanted = (tokens_s * needs["event_us"] + requests_s * needs["request_us"]) / 1e6
    workers = max(1, min(cores // 2, -int(-wanted // MAX_PLANNED_CORES)))
    return workers, wanted / workers

"""Where a running server is, in any form in which people write it, and whether a proxy stands between. Pure.

A path that ends in a version (`/v1`) is the API's, one without gets `/v1`; a full API path is taken as it is. `/metrics` and `/health` are
at the server's root. A loopback server is never reached through a proxy, whatever the variables say.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from .load import Target
from .spec import UserError

APIS = {"chat": "/chat/completions", "completions": "/completions"}
UNSPECIFIED = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses to bind, not to call
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+", re.IGNORECASE)
_VERSION = re.compile(r"/v\d+[a-z0-9]*$", re.IGNORECASE)
_API = re.compile(rf"({'|'.join(map(re.escape, sorted(APIS.values(), reverse=True)))})$")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A server. `origin` is `scheme://host:port`; `root` the path before the version, `api` the path of the API with it, and `query` what
    follows every path. `headers` carry what stood as user and password in the address."""

    origin: str
    root: str = ""
    api: str = "/v1"
    full: str = ""
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def endpoint(self, api: str) -> str:
        """Path of `completions` or `chat`, with the query."""
        return (self.full or self.api + APIS[api]) + self.query

    def models(self) -> str:
        return f"{self.api}/models{self.query}"

    def at_root(self, path: str) -> str:
        """`/metrics` and its like."""
        return self.root + path

    def shown(self) -> str:
        """For people: without user and password."""
        scheme, _, host = self.origin.partition("://")
        return f"{scheme}://{'***@' if self.headers else ''}{host}{self.full or self.api}"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server that runs already. `server` says how it is reached, whatever the path; `restart` is a command that starts it afresh."""

    address: Address
    server: Target
    restart: str = ""

    def target(self, path: str) -> Target:
        """Where requests to a path go."""
        return replace(self.server, endpoint=path)

    def secrets(self) -> tuple[str, ...]:
        """Values that no text may repeat: those of headers, with and without their scheme, and of the query."""
        parts = [word for value in self.server.headers.values() for word in (value, value.rpartition(" ")[2])]
        parts += [value for pair in self.address.query.lstrip("?").split("&") if (value := pair.partition("=")[2])]
        return tuple(dict.fromkeys(p for p in parts if len(p) > 3))


def reached(address: Address, env: Mapping[str, str], *, headers: Mapping[str, str] | None = None, **tls: Any) -> Target:
    """How a server at an address is reached: by the proxy that the variables set, with its own credentials and further headers; `tls` as
    `core.load.Target` has it. ValueError for a header that cannot be sent."""
    proxy = proxy_for(address.origin, env)
    return Target(base_url=address.origin, endpoint="", headers={**address.headers, **(headers or {})}, proxy=proxy, **tls)


def parse(text: str, where: str = "--kv-endpoint") -> Address:
    """The server that a user names; UserError, one line, when it is no http address."""
    words = text.strip()
    try:
        url = urlsplit(words)
        host, port = url.hostname, url.port
    except ValueError:  # whose words may quote a password
        raise UserError(f"{where}: no address of a server; write http://host:port, and a user or password percent-encoded") from None
    if url.scheme.lower() not in ("http", "https") or not host or re.search(r"[\s\\]", words):
        raise UserError(f"{where}: no address of a server; write http://host:port or https://host/path")
    path = re.sub(r"/+$", "", url.path)
    full = path if _API.search(path) else ""
    base = _API.sub("", path)
    api = base if full or _VERSION.search(base) else f"{base}/v1"
    return Address(
        origin=f"{url.scheme.lower()}://{_to_call(host)}" + (f":{port}" if port is not None else ""),
        root=_VERSION.sub("", api), api=api, full=full, query=f"?{url.query}" if url.query else "",
        headers=_credentials(url.username, url.password),
    )  # fmt: skip


def _credentials(user: str | None, password: str | None) -> dict[str, str]:
    if user is None and password is None:
        return {}
    pair = f"{unquote(user or '')}:{unquote(password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's body as a chat of one message."""
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": body["prompt"]}]}


def called(host: str, port: int) -> str:
    """The address of a server that was told to bind `host`."""
    return f"http://{_to_call(host)}:{port}"


def _to_call(host: str) -> str:
    """A host as it stands in an address; this machine where it says all of its addresses."""
    host = UNSPECIFIED.get(str(_ip(host) or host), host)
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    ip = _ip(name)
    return ip is not None and (ip.is_loopback or ip.is_unspecified)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host that is an address, in any spelling that connecting takes: `127.1`, `0x7f000001`, `[::ffff:127.0.0.1]`; None for a name."""
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return _short(host)
    return getattr(ip, "ipv4_mapped", None) or ip


def _short(host: str) -> ipaddress.IPv4Address | None:
    """An IPv4 address of one to four numbers, decimal, octal or hexadecimal, of which the last fills what is left (`inet_aton`)."""
    parts = host.split(".")
    if len(parts) > 4 or not all(map(_NUMBER.fullmatch, parts)):
        return None
    try:
        *first, last = (int(p, 16 if "x" in p.lower() else 8 if p[0] == "0" else 10) for p in parts)
        return ipaddress.IPv4Address(bytes(first) + last.to_bytes(5 - len(parts), "big"))
    except (ValueError, OverflowError):
        return None


def proxy_for(url: str, env: Mapping[str, str]) -> str | None:
    """The proxy that these variables set for an address, None when it is reached directly. Lower-case names win."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or _excepted(host, parts.port, _variable(env, "no_proxy")):
        return None
    named = _variable(env, f"{parts.scheme}_proxy") or _variable(env, "all_proxy")
    if not named:
        return None
    proxy = named if "://" in named else f"http://{named}"
    if urlsplit(proxy).scheme.lower() not in ("http", "https"):
        raise UserError(
            "the proxy that the environment names is no http proxy; only those can be measured through (NO_PROXY excepts a host)"
        )
    return proxy


def _variable(env: Mapping[str, str], name: str) -> str:
    return str(env.get(name) or env.get(name.upper()) or "").strip()


def _excepted(host: str, port: int | None, exceptions: str) -> bool:
    """Whether NO_PROXY names the host: `*`, a name with its subdomains, an address, a range (`10.0.0.0/8`), each with a port or not."""
    for rule in filter(None, re.split(r"[,\s]+", exceptions)):
        name, _, asked = rule.rpartition(":") if re.search(r"^[^:]+:\d+$|\]:\d+$", rule) else (rule, "", "")
        if asked and port != int(asked):
            continue
        if name == "*" or _names(name.strip("[]").lower(), host.lower()):
            return True
    return False


def _names(rule: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
    except ValueError:
        domain = rule.removeprefix("*").lstrip(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))

"""TLS apart from its socket, so that the kernel's stamps can be read together with the bytes that they belong to."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from ..core.load import Target

CHUNK = 65536


def tls_context(target: Target) -> Any:
    """The TLS settings of a target; loaded only where they are needed. OSError for files that cannot be read, or only with a password."""
    import ssl

    def password() -> str:  # without this, OpenSSL asks on the terminal and waits
        key = target.key_file or target.cert_file
        raise OSError(f"the key in {key} wants a password; name one without, as `openssl pkey -in {key} -out NEW` makes it")

    context = ssl.create_default_context(cafile=target.ca_file)
    if target.cert_file:
        context.load_cert_chain(target.cert_file, target.key_file, password)
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _would_block(e: OSError) -> bool:
    return type(e).__name__ in ("SSLWantReadError", "SSLWantWriteError")


class Tls:
    """One side of a connection; `gone` says how the other side has ended it: `close`, or `reset: …` for an alert or a broken record."""

    __slots__ = ("_in", "_out", "_ssl", "gone")

    def __init__(self, context: Any, host: str) -> None:
        import ssl

        self._in, self._out, self.gone = ssl.MemoryBIO(), ssl.MemoryBIO(), ""
        self._ssl = context.wrap_bio(self._in, self._out, server_hostname=host)

    def shake(self, sock: socket.socket) -> bool:
        """A step of the handshake; whether it is done. OSError when it failed."""
        try:
            with suppress(BlockingIOError):
                data = sock.recv(CHUNK)
                self._in.write(data) if data else self._in.write_eof()
            self._ssl.do_handshake()
        except OSError as e:
            if not _would_block(e):
                raise
            return False
        finally:
            if data := self._out.read():
                sock.sendall(data)  # small, so a new connection has room for it
        return True

    def seal(self, data: bytes) -> bytes:
        """`data` as it goes over the wire."""
        self._ssl.write(data)
        return self._out.read()

    def open(self, data: memoryview) -> bytes:
        """What has come whole by these bytes of the wire; nothing where they are part of a record, or one without data."""
        self._in.write(data)
        parts = []
        try:
            while part := self._ssl.read(CHUNK):
                parts.append(part)
            self.gone = "close"
        except OSError as e:
            self.gone = "" if _would_block(e) else f"reset: {e}"
        return parts[0] if len(parts) == 1 else b"".join(parts)

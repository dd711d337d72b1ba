"""A server that runs already, for tests of --kv-endpoint: the fake engine in a process of its own, or in a thread behind TLS; and a model folder."""

import contextlib
import http.client
import http.server
import itertools
import json
import ssl
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .. import fake_engine
from ..harness.pages import in_a_thread

FAKE = Path(fake_engine.__file__)


def model_folder(folder):
    """A tokenizer with enough words of one token, and nothing else: the weights are at the server."""
    folder.mkdir()
    letters = "abcdefghij"
    words = ("".join(w) for w in itertools.product(letters, repeat=4))
    vocab = {f"\u0120{w}": i for i, w in enumerate(itertools.islice(words, 2000))}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
    return folder


@contextlib.contextmanager
def process(port, *options, host="127.0.0.1"):
    """The fake engine, answering."""
    words = [
        sys.executable,
        FAKE,
        "--host",
        host,
        "--port",
        str(port),
        "--model",
        "org/model",
        "--tpot-ms",
        "2",
        "--ttft-ms",
        "5",
        *options,
    ]
    shown = f"[{host}]" if ":" in host else host
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as engine:
        try:
            end = time.monotonic() + 20
            while True:
                try:
                    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://{shown}:{port}/v1/models", timeout=1).close()
                    break
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            yield engine
        finally:
            engine.kill()


@contextlib.contextmanager
def http_proxy(port):
    """A proxy for plain HTTP that asks the fake engine on this port, whatever host it is asked for. Yields its address and those hosts."""
    hosts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def forward(self):
            url = urlsplit(self.path)
            hosts.append(url.hostname)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as engine:
                engine.request(self.command, url.path, body or None, {"Content-Type": "application/json"})
                answer = engine.getresponse()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                while data := answer.read1(65536):
                    self.wfile.write(data)

        do_GET = do_POST = forward

        def log_message(self, *args):
            pass

    with in_a_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address, hosts


@contextlib.contextmanager
def over_tls(folder, key=None):
    """The fake engine's answers over TLS by a certificate of its own; `key` is the bearer token that it wants. Yields address and certificate."""
    cert, private = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", private, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")

    class Handler(fake_engine.Handler):
        asked = types.SimpleNamespace(
            model="org/model",
            model_name=None,
            start_delay=0,
            one_token_delay=0,
            never_ready=False,
            tpot_ms=2,
            ttft_ms=5,
            no_usage=False,
            context=10**9,
        )

        def do_POST(self):
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self.rfile.read(int(self.headers["Content-Length"]))
                return self.answer(401, {"error": {"message": f"invalid key {self.headers.get('Authorization')} at {self.path}"}})
            return super().do_POST()

    class Quiet(fake_engine.Engine):
        def handle_error(self, request, client_address):
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with in_a_thread(server):
        yield f"https://127.0.0.1:{server.server_port}", cert

"""A server of pages by their paths, as a framework's metrics page is one."""

import contextlib
import itertools
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextlib.contextmanager
def in_a_thread(server):
    """A server of ours, answering until it is left: its address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Quiet(BaseHTTPRequestHandler):
    """Says nothing of what it is asked; answers whole bodies."""

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(pages):
    """Its address. Below /odd it speaks no HTTP, below /half it promises more than it gives, below /busy it has no time; what is no page is
    not found."""

    class Handler(Quiet):
        def do_GET(self):
            below = self.path.removesuffix("/metrics")
            if below == "/odd":
                self.wfile.write(b"what?\r\n\r\n")
            elif self.path in pages:
                self.send_response(200)
                self.send_header("Content-Length", str(len(pages[self.path]) + (9 if below == "/half" else 0)))
                self.end_headers()
                self.wfile.write(pages[self.path])
            else:
                self.send_error(503 if below == "/busy" else 404)

    with in_a_thread(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address


@contextlib.contextmanager
def raw(*parts, again=()):
    """Plays these parts to whoever asks: bytes, or seconds to wait; then those of `again` without end, or hangs up. Its address."""
    over = threading.Event()

    def play(peer):
        with contextlib.suppress(OSError), peer:
            peer.recv(65536)
            for part in itertools.chain(parts, itertools.cycle(again)):
                if over.is_set():
                    break
                over.wait(part) if isinstance(part, float) else peer.sendall(part)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=play, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()

"""A server of pages by their paths, as a framework's metrics page is one."""

import contextlib
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


@contextlib.contextmanager
def served(pages):
    """Its address. Below /odd it speaks no HTTP, below /half it promises more than it gives, below /busy it has no time; what is no page is
    not found."""

    class Handler(BaseHTTPRequestHandler):
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

        def log_message(self, *args):
            pass

    with in_a_thread(HTTPServer(("127.0.0.1", 0), Handler)) as address:
        yield address

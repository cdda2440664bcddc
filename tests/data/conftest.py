"""A file server on loopback that can misbehave, for the tests of the downloader."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class FileServer:
    """Serves one body; attributes say how. ``requests`` counts them."""

    def __init__(self, body: bytes):
        self.body = body
        self.requests = 0
        self.statuses: list[int] = []  # answered first, one a request
        self.ends_after: int | None = None  # bytes after which the connection breaks
        self.declares_length = True
        self.may_end = threading.Event()  # until then, an answer stops in front of its last byte
        self.may_end.set()
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler):
        self.requests += 1
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        handler.send_response(200)
        if self.declares_length:
            handler.send_header("Content-Length", str(len(self.body)))
        handler.end_headers()
        body = self.body[: self.ends_after]
        handler.wfile.write(body[:-1])
        self.may_end.wait()
        with suppress(OSError):  # who asked may be gone
            handler.wfile.write(body[-1:])
        handler.close_connection = True


@pytest.fixture
def serve(monkeypatch):
    """Return a function that serves bytes over HTTP until the test ends."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = []

    def start(body: bytes) -> FileServer:
        files = FileServer(body)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                files.answer(self)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        running.append((server, thread, files))
        files.url = f"http://127.0.0.1:{server.server_port}/file"
        return files

    yield start
    for server, thread, files in running:
        files.may_end.set()
        server.shutdown()
        thread.join()
        server.server_close()

"""A file server on loopback that can misbehave, for the tests of the downloader."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class FileServer:
    """Serves one body; attributes say how. ``requests`` lists the Range header of each request."""

    def __init__(self, body: bytes):
        self.body = body
        self.requests: list[str | None] = []
        self.statuses: list[int] = []  # answered first, one a request
        self.cut_after: list[int] = []  # bytes after which the connection breaks, one a request
        self.honours_range = True
        self.shift = 0  # how far from the place asked for a 206 begins
        self.declares_length = True
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler):
        asked = handler.headers.get("Range")
        self.requests.append(asked)
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        body = self.body
        if asked and self.honours_range:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            if start >= len(body):
                handler.send_error(416)
                return
            start += self.shift
            body = body[start:]
            handler.send_response(206)
            handler.send_header(
                "Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}"
            )
        else:
            handler.send_response(200)
        if self.declares_length:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if self.cut_after:
            body = body[: self.cut_after.pop(0)]
        handler.wfile.write(body)
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
        running.append((server, thread))
        files.url = f"http://127.0.0.1:{server.server_port}/file"
        return files

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()

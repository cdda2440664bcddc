"""Fixtures of this folder: a file server on loopback that can misbehave, and an abrupt end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A function that ends its process, as SIGKILL would, at the call after so many.
ENDING = """
import os, sys
def ending(function, calls):
    remaining = iter(range(calls))
    def call(*arguments, **options):
        if next(remaining, None) is None:
            os._exit(9)
        return function(*arguments, **options)
    return call
"""


class FileServer:
    """Serves one body; attributes say how. ``requests`` counts them."""

    def __init__(self, body: bytes):
        self.body = body
        self.requests = 0
        self.statuses: list[int] = []  # answered first, one a request
        self.ends_after: int | None = None  # bytes after which the connection breaks
        self.declares_length = True
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
        handler.wfile.write(self.body[: self.ends_after])
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


@pytest.fixture
def end_abruptly():
    """Return a function that runs a program which uses ``ending`` until it has ended so."""

    def run(program: str, *arguments) -> None:
        command = [sys.executable, "-W", "ignore", "-c", ENDING + program, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run(command, env=environment, timeout=120, check=False).returncode == 9

    return run

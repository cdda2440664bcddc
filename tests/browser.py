"""Headless Chromium, driven through its DevTools protocol over two pipes, without a driver.

References
----------
https://chromedevtools.github.io/devtools-protocol/ and Chromium's ``--remote-debugging-pipe``:
messages in JSON, each ended by a zero byte, to file descriptor 3 and from 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe"
)


class Browser:
    """One page of a browser of its own, which ends with the ``with`` block."""

    def __init__(self, profile: Path, *, size: tuple[int, int] = (1120, 660)) -> None:
        for_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The shell gives the pipes the numbers that Chromium expects, and becomes Chromium. Through
        # other numbers, since a pipe may have one of these already.
        numbers = f"100<&{for_browser} 101>&{from_browser} 3<&100 4>&101 100<&- 101>&-"
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" {numbers}', "bash", EXECUTABLE, *_FLAGS.split()),
                *(f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"),
            ],
            pass_fds=(for_browser, from_browser),
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
        )
        os.close(for_browser)
        os.close(from_browser)
        self._received, self._count, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, *, timeout_s: float = 60, **params: Any) -> Any:
        """Send a command, keep the events that come before its result, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline: float) -> Any:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 2**16)
            assert chunk, "the browser has ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def choose_file(self, selector: str, path: Path) -> None:
        """Give a file to a file input, as the picker does."""
        document = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path.resolve())])

    def drop_file(self, path: Path, *, x: int, y: int) -> None:
        """Drag a file over a point of the page, and drop it there."""
        data = {"items": [], "files": [str(path.resolve())], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    @contextmanager
    def window(self, width: int, height: int = 900) -> Iterator[None]:
        """Give the page a window of this size, in pixels."""
        size = {"width": width, "height": height}
        self.send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        try:
            yield
        finally:
            self.send("Emulation.clearDeviceMetricsOverride")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

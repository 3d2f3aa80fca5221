"""Headless Chromium over its DevTools pipe: pages laid out at a size, in light or dark, measured, photographed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS_MAX = 60.0
_HEIGHT_MAX = 12_000  # of a photograph; a browser refuses one that is too large


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Chromium:
    """One page of one browser. `requests` lists every address that was asked for since `open`."""

    def __init__(self, writer: int, reader: int) -> None:
        self._writer, self._reader = writer, reader
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, *, dark: bool = False, media: str = "screen") -> None:
        """Lay `path` out, as high as it wants to be."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self._size(width, 900)
        self.requests.clear()
        self.messages.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait_loaded()
        self._size(width, min(_HEIGHT_MAX, int(self.evaluate("document.documentElement.scrollHeight"))))

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "a script failed"))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        answer = self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def _wait_loaded(self) -> None:
        until = time.monotonic() + _SECONDS_MAX
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            if time.monotonic() > until:
                raise TimeoutError("the page is not loaded")
            time.sleep(0.02)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._reader, 1 << 20)
            if not piece:
                raise EOFError("the browser has ended")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Log.entryAdded":
            self.messages.append(message["params"]["entry"]["text"])
        return message


@contextlib.contextmanager
def started() -> Iterator[Chromium]:
    """A browser with a profile of its own, ended afterwards with all its processes."""
    found = program()
    assert found is not None
    to_browser, writer = os.pipe()
    reader, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:

        def pipes() -> None:  # the browser reads descriptor 3 and writes 4
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        arguments = [found, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
                     "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars",
                     "--disable-background-networking", "--disable-component-update"]  # fmt: skip
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        browser = subprocess.Popen(
            [*arguments, "about:blank"], preexec_fn=pipes, close_fds=False, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Chromium(writer, reader)
        finally:
            os.close(writer)
            os.close(reader)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(browser.pid, 9)
            browser.wait(10)

"""Debian's chromium, headless, by its debugging protocol over a pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_S = 60.0
_KEYS = {"Enter": 13, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
         "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}  # fmt: skip


def missing_browser() -> str:
    """What is not there for a :class:`Browser`; empty where all is."""
    if any(map(shutil.which, _NAMES)):
        return ""
    return f"no browser: none of {', '.join(_NAMES)} is on PATH (apt-get install chromium)"


class Browser:
    """One browser with one page. ``problems`` are its console errors, exceptions and requests of the network."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._unread = b""
        self._loading = False

    def __enter__(self) -> Self:
        program = next(path for path in map(shutil.which, _NAMES) if path)
        self._profile = tempfile.TemporaryDirectory(prefix="graphcap-browser-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # The browser reads commands from its file 3 and writes answers to its file 4; a shell puts them there.
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
                   f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(target for target in targets if target["type"] == "page")
            attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)  # which ends it
        os.close(self._from)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def open(self, path: Path) -> float:
        """Load a page from disk; returns the seconds until its scripts have run."""
        self._loading = True
        start = time.monotonic()
        frame = self._call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in frame, frame
        while self._loading:
            self._take(self._read())
        assert self.evaluate("document.readyState") == "complete"
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - start

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited.

        Raises:
            AssertionError: it throws.
        """
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One key, as a person presses it: to whatever has the focus."""
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        if len(key) == 1:
            fields["text"] = key
        self._call("Input.dispatchKeyEvent", type="keyDown", **fields)
        self._call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size in pixels, and the scheme that the system asks for."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, as PNG; the page from top to bottom if ``whole``."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], _WAIT_S)
            assert ready, f"the browser said nothing for {_WAIT_S:.0f} s"
            more = os.read(self._from, 1 << 20)
            assert more, f"the browser ended with status {self._process.wait(timeout=10)}"
            self._unread += more
        whole, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loading = False
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"asked for {found['request']['url']}")

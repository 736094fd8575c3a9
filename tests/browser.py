"""A small driver for headless Chromium, over the DevTools protocol's pipe: nothing but the standard library.

    with Browser.start() as browser, browser.page(width=820) as page:
        page.open(path)
        assert page.evaluate("document.title") == "..."

Requests, console messages and uncaught errors of a page are collected; downloads land in the page's own folder.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb",
    "--disable-features=Translate,MediaRouter,OptimizationHints",
)  # fmt: skip
TIMEOUT_S = 60.0
# The pipe's ends must be descriptors 3 and 4 in the browser; this little program puts them there.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    """The path of a Chromium, or None. SPECBENCH_CHROMIUM names one that is elsewhere."""
    return os.environ.get("SPECBENCH_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, or a script on the page raised."""


class Browser:
    """A headless Chromium with a profile of its own; use it in a `with` block."""

    def __init__(self, process: subprocess.Popen[bytes], read_end: int, write_end: int, home: Path) -> None:
        self._process, self._in, self._out, self.home = process, read_end, write_end, home
        self._buffer = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []

    @classmethod
    def start(cls, chromium: str | None = None) -> Self:
        """Raises FileNotFoundError where there is no Chromium."""
        program = chromium or find_chromium()
        if program is None:
            raise FileNotFoundError("no Chromium here")
        home = Path(tempfile.mkdtemp(prefix="specbench-browser-"))
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        command = [
            sys.executable,
            "-c",
            _LAUNCH,
            *map(str, ends),
            program,
            *FLAGS,
            f"--user-data-dir={home / 'profile'}",
        ]
        process = subprocess.Popen(
            command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in (theirs_in, theirs_out, *ends):
            os.close(fd)
        return cls(process, ours_in, ours_out, home)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        for fd in (self._in, self._out):
            os.close(fd)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come meanwhile are kept in `events`."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(end, method)
            if answer.get("id") != self._next:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error'].get('message')}")
            else:
                return dict(answer.get("result", {}))

    def _receive(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise BrowserError(f"{what}: {'the browser ended' if ready else f'no answer in {TIMEOUT_S:g} s'}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def drain(self, seconds: float) -> None:
        """Collect what comes within so many seconds."""
        end = time.monotonic() + seconds
        with contextlib.suppress(BrowserError):
            while True:
                self.events.append(self._receive(end, "events"))

    @contextlib.contextmanager
    def page(self, width: int = 1400, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """A page of this size in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, width, height, dark)
        try:
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target)


class Page:
    """One tab. `requests` are the addresses that it asked for, `problems` its console errors and uncaught ones."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, dark: bool) -> None:
        self._browser, self._session, self._first = browser, session, len(browser.events)
        self.downloads = Path(tempfile.mkdtemp(prefix="downloads-", dir=browser.home))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.media(dark=dark)
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def media(self, *, dark: bool = False, kind: str = "") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it is there."""
        self.call("Page.navigate", url=path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        end = time.monotonic() + TIMEOUT_S
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.protocol") != "file:":
            if time.monotonic() > end:
                raise BrowserError(f"{path} was not loaded in {TIMEOUT_S:g} s")
            time.sleep(0.02)

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression; promises are waited for. Raises BrowserError where it throws."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            told = found["exceptionDetails"]
            raise BrowserError(str(told.get("exception", {}).get("description") or told.get("text")))
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press and release a key, such as "ArrowRight"."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to this place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        extra: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            extra = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **extra)["data"]))

    def downloaded(self, name: str) -> Path:
        """Wait for a download to be complete."""
        path, end = self.downloads / name, time.monotonic() + 15
        while not path.exists() or path.with_name(f"{name}.crdownload").exists():
            if time.monotonic() > end:
                raise BrowserError(f"{name} was not downloaded; there is {[p.name for p in self.downloads.iterdir()]}")
            time.sleep(0.05)
        return path

    def _events(self, method: str) -> list[dict[str, Any]]:
        self._browser.drain(0.05)
        events = self._browser.events[self._first :]
        return [e["params"] for e in events if e.get("method") == method and e.get("sessionId") == self._session]

    @property
    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    @property
    def blocked(self) -> list[str]:
        """Why requests were stopped before they left, one reason a request."""
        return [str(e["blockedReason"]) for e in self._events("Network.loadingFailed") if e.get("blockedReason")]

    @property
    def problems(self) -> list[str]:
        logged = [
            e["entry"]["text"] for e in self._events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")
        ]
        thrown = [str(e["exceptionDetails"].get("exception", {}).get("description") or e["exceptionDetails"]["text"])
                  for e in self._events("Runtime.exceptionThrown")]  # fmt: skip
        said = [str([a.get("value") for a in e["args"]]) for e in self._events("Runtime.consoleAPICalled")
                if e["type"] in ("error", "warning", "assert")]  # fmt: skip
        return [*logged, *thrown, *said]

"""Drives a headless Chromium through the DevTools protocol (https://chromedevtools.github.io)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, CALL_S = 60.0, 60.0


def find_chromium() -> str:
    """Return the path of the browser.

    Raises:
        AssertionError: it is not installed.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, (
        "expected chromium on PATH, found none; install it (apt-get install chromium), or leave "
        'these tests out with -m "not browser"'
    )
    return found


class Tab:
    """One page. `requests` lists the URLs of all requests since it was opened, those of frames too,
    and `errors` what its scripts reported."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session = socket, session
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Event] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Receive answers and events until the socket closes."""
        async for message in self._socket:
            found = json.loads(message.data)
            if (number := found.get("id")) in self._waiting:
                self._waiting.pop(number).set_result(found)
                continue
            method, details = found.get("method"), found.get("params", {})
            if method == "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(details["exceptionDetails"]))
            elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
                self.errors.append(json.dumps(details["entry"]))
            self._events.setdefault(method, asyncio.Event()).set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(
            message | ({"sessionId": self._session} if self._session else {})
        )
        found = await asyncio.wait_for(self._waiting[number], CALL_S)
        assert "error" not in found, (method, found["error"])
        return found["result"]

    async def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        loaded = self._events["Page.loadEventFired"] = asyncio.Event()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(loaded.wait(), CALL_S)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that it returns."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.1)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the colour scheme of the system."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def drag(self, x: float, y: float, to_x: float) -> None:
        """Drag the mouse horizontally, between points of the window."""
        for kind, at in (("mousePressed", x), ("mouseMoved", to_x), ("mouseReleased", to_x)):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", clickCount=1
            )

    async def screenshot(self, path: Path, *, full: bool = True) -> None:
        """Write a picture of the page."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def open_tab(url: str = "about:blank") -> AsyncIterator[Tab]:
    """Start a browser with one page, and end it with the block."""
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    browser = await asyncio.create_subprocess_exec(
        find_chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-port=0",
        "--remote-allow-origins=*",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(START_S):
            while not port_file.exists() or not port_file.read_text().endswith("\n"):
                assert browser.returncode is None, "chromium ended as it started"
                await asyncio.sleep(0.1)
                if port_file.exists() and len(port_file.read_text().splitlines()) == 2:
                    break
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            address = next(each for each in targets if each["type"] == "page")[
                "webSocketDebuggerUrl"
            ]
            async with client.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket, "")
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.open(url)
                yield tab
                listening.cancel()
    finally:
        if browser.returncode is None:
            browser.terminate()
        await browser.wait()
        shutil.rmtree(profile, ignore_errors=True)

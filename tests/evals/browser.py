"""A headless Chromium driven over its DevTools protocol, for the HTML report's tests."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One page; `problems` collects console errors and warnings, exceptions, failed requests, CSP reports."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        mine = self.number
        await self.socket.send_json({"id": mine, "method": method, "params": params})
        while True:
            message = await self._next()
            if message.get("id") == mine:
                assert "error" not in message, message
                return dict(message["result"])

    async def _next(self) -> dict[str, Any]:
        message = json.loads((await self.socket.receive(timeout=30)).data)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True
        return dict(message)

    async def open(self, path: Path) -> None:
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        self.loaded = False
        await self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            await self._next()

    async def js(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def key(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    async def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def shot(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A fresh Chromium with a fresh profile; gone at the end."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            while True:
                line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode(errors="replace")
                assert line, "Chromium ended before it listened"
                found = re.search(r"DevTools listening on ws://([^/]+)/", line)
                if found:
                    break
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{found[1]}/json/list") as answer:
                    targets = await answer.json()
                target = next(t for t in targets if t["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**27) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.wait()
            await asyncio.sleep(0.2)  # children let go of the profile

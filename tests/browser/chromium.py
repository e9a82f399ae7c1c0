"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import patience, until

CHROMIUM = os.environ.get("DYNCTL_CHROMIUM") or shutil.which("chromium") or "chromium"

#: How the browser answers for a document that another one replaces.
_REPLACED = ("execution context", "context with specified id", "navigated or closed")


class Replaced(AssertionError):
    """A script was to run in a document that another one replaces."""


class Tab:
    """One page. ``problems``: what the console, the network and the policy of content reported."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded: set[str] = set()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def command(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        found = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(patience(20)):
            return await found

    async def open(self, url: str) -> None:
        """Go to ``url`` and wait until it is loaded."""
        # The event of an earlier page, such as the empty first one, may come only now.
        loader = (await self.command("Page.navigate", url=url))["loaderId"]
        await until(lambda: loader in self._loaded, 20)

    async def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 15.0) -> None:
        """Wait until an expression is true, of this document or of the next one."""
        async with asyncio.timeout(patience(seconds)):
            while True:
                with suppress(Replaced):
                    if await self.run(script):
                        return
                await asyncio.sleep(0.05)

    async def press(self, key: str, code: int) -> None:
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            await self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                windowsVirtualKeyCode=code,
            )  # fmt: skip

    async def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write the page to a file; not ``whole``: what fits the window."""
        answer = await self.command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                future = self._answers.pop(found["id"])
                if "error" in found:
                    replaced = any(one in found["error"]["message"] for one in _REPLACED)
                    kind = Replaced if replaced else AssertionError
                    future.set_exception(kind(found["error"]))
                else:
                    future.set_result(found["result"])
                continue
            method, parameters = found["method"], found["params"]
            if method == "Page.lifecycleEvent":
                if parameters["name"] == "load":
                    self._loaded.add(parameters["loaderId"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            elif method == "Log.entryAdded":
                entry = parameters["entry"]
                if entry["level"] in ("error", "warning"):
                    self.problems.append(entry["text"])
            elif method == "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            elif method == "Audits.issueAdded":
                self.problems.append(str(parameters["issue"]))

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Tab]:
    """A browser with one page; its profile is in ``directory``."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-extensions", "--disable-background-networking",
        "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={directory}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        ready = directory / "DevToolsActivePort"
        await until(lambda: ready.exists() and "\n" in ready.read_text(), 30)
        port = int(ready.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as client:
            socket = await client.ws_connect(await _page(client, port), max_msg_size=1 << 26)
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
                await tab.command(f"{domain}.enable")
            await tab.command("Page.setLifecycleEventsEnabled", enabled=True)
            yield tab
            await tab.close()
    finally:
        # All its processes: they are a group of their own.
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _page(client: aiohttp.ClientSession, port: int) -> str:
    """The address of the first page; the browser answers before it has one."""
    async with asyncio.timeout(patience(20)):
        while True:
            async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
                for one in await answer.json():
                    if one["type"] == "page":
                        return str(one["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)

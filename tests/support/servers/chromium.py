"""A headless Chromium, driven by the DevTools protocol. Skips where none is installed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab. `errors`: what its console and its scripts complained of, and what its policy forbade."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        """Hosts that anything was asked of."""
        self._reader = asyncio.ensure_future(self._read())

    async def command(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], 60)

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited where it is a promise."""
        reply = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def wait(self, script: str, timeout_s: float = 30.0) -> None:
        """Until an expression is true."""
        for _ in range(int(timeout_s / 0.05)):
            if await self.run(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"never true: {script}; the page shows {await self.run('document.body.innerText')}"
        )

    async def go(self, url: str) -> None:
        """Load a page, and wait until its first request was answered."""
        await self.run("window.isLeft = true")  # the page before may be complete, too
        await self.command("Page.navigate", url=url)
        await self.wait("!window.isLeft && document.readyState === 'complete'")

    async def press(self, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
        """A key, down and up."""
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """As if written on the keyboard, where the focus is."""
        await self.command("Input.insertText", text=text)

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"], None)
                if waiting is not None and not waiting.done():
                    if "error" in said:
                        waiting.set_exception(AssertionError(str(said["error"])))
                    else:
                        waiting.set_result(said["result"])
            else:
                self._notice(said["method"], said["params"])

    def _notice(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(params["entry"]["text"]))
            case "Network.requestWillBeSent":
                origin = re.match(r"https?://([^/]+)", params["request"]["url"])
                if origin:
                    self.hosts.add(origin[1])


@contextlib.asynccontextmanager
async def chromium(width: int = 1100, height: int = 900) -> AsyncIterator[Page]:
    """A tab of a browser of its own."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
                *("--remote-debugging-port=0", f"--window-size={width},{height}"),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            for _ in range(600):
                if port_file.exists() and port_file.read_text().strip():
                    break
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as listed:
                    tab = next(target for target in await listed.json() if target["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.command(f"{domain}.enable")
                    yield page
                    await page.close()
        finally:
            process.kill()
            process.wait(60)

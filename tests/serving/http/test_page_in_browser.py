"""The page in a real browser: it loads, sends, streams, stops, reloads; what a model says stays text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.routes.app import ServerContext
from tests.support.models.tool_templates import HERMES
from tests.support.servers.chromium import Page, chromium
from tests.support.servers.fake_server import FakeServer
from tests.support.servers.rude_clients import until
from tests.support.servers.scripted_engine import ScriptedRanks, scripted_server

pytestmark = pytest.mark.slow

HOSTILE = (
    "<think>hm <b>bold</b></think>"
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\n\n"
    "[a](javascript:window.broken=1) [b](https://example.org/?a=1&b=<i>) **strong** `<code>`\n\n"
    "```js\n</code></pre><script>window.broken = 1</script>\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | <svg onload='window.broken=1'> |\n\n- one\n- two\n"
)
AXE = os.environ.get("PHASEWISE_AXE", "")
"""Path of axe.min.js, from npm's axe-core."""


def paged_server() -> contextlib.AbstractContextManager[tuple[FakeServer, ScriptedRanks]]:
    """A scripted server with the page."""
    return scripted_server(HERMES, "<|im_start|>assistant\n", surroundings=ServerContext(page=True))


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServer, ScriptedRanks]]:
    with paged_server() as pair:
        yield pair


def browse(visit: Callable[[Page], Awaitable[None]]) -> None:
    async def run() -> None:
        async with chromium() as page:
            await visit(page)
            assert page.errors == []

    asyncio.run(run())


async def opened(page: Page, url: str) -> None:
    await page.go(url)
    await page.wait(
        "!document.getElementById('chat-view').hidden && document.activeElement.id === 'question'"
    )
    await page.run("document.getElementById('temperature').value = 0")


async def ask(page: Page, text: str) -> None:
    """By the keyboard alone."""
    await page.run("document.getElementById('question').focus()")
    await page.type(text)
    await page.press("Enter", 13, "\r")


ANSWER = "[...document.querySelectorAll('.message.answer')].at(-1)"
IDLE = "!document.getElementById('send').disabled"


def test_it_sends_streams_keeps_and_shows_text_as_text(running: tuple[FakeServer, ScriptedRanks]) -> None:
    server, ranks = running

    async def visit(page: Page) -> None:
        await opened(page, server.url)
        ranks.script = lambda _prompt: HOSTILE
        await ask(page, "<b>hello</b>")
        await page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
        assert await page.run("window.broken") is None
        assert (
            await page.run(
                "document.querySelectorAll('#messages script, #messages img, #messages svg').length"
            )
            == 0
        )
        shown = await page.run(f"{ANSWER}.innerText")
        assert "<script>window.broken = 1</script>" in shown
        assert await page.run("document.querySelector('.message.user').innerText") == "You\n\n<b>hello</b>"
        links = await page.run(f"[...{ANSWER}.querySelectorAll('a')].map(one => one.href)")
        assert links == ["https://example.org/?a=1&b=%3Ci%3E"]
        counts = {"strong": 1, "code": 2, "pre": 1, "table": 1, "li": 2, "details": 1}
        for tag, n in counts.items():
            assert await page.run(f"{ANSWER}.querySelectorAll('{tag}').length") == n, tag
        assert "tokens/s" in await page.run("document.getElementById('status').textContent")

        await page.go(server.url)  # the conversation is there again
        await page.wait("document.querySelectorAll('.message').length === 2")
        assert await page.run("window.broken") is None
        await page.run("document.getElementById('clear').click()")
        await page.wait("document.querySelectorAll('.message').length === 0")
        assert page.hosts == {server.url.removeprefix("http://")}

    browse(visit)


def test_it_stops_and_asks_again(running: tuple[FakeServer, ScriptedRanks]) -> None:
    server, ranks = running
    slow = threading.Event()

    async def visit(page: Page) -> None:
        await opened(page, server.url)
        ranks.script = lambda _prompt: "word " * 600
        ranks.before_step = lambda: (slow.wait(0.02), None)[1]
        await ask(page, "go on")
        await page.wait(f"{ANSWER}?.innerText.includes('word word word')")
        await page.run("document.getElementById('stop').click()")
        await page.wait(IDLE)
        ranks.before_step = lambda: None
        assert await page.run("document.getElementById('status').textContent") == "stopped"
        cut = await page.run(f"{ANSWER}.innerText.length")
        assert 10 < cut < 2900
        server.wait_until_idle()  # what nobody reads is not computed
        ranks.script = lambda _prompt: "short"
        await page.run("document.getElementById('again').click()")
        await page.wait(f"{IDLE} && {ANSWER}.innerText.endsWith('short')")
        assert await page.run("document.querySelectorAll('.message').length") == 2

    try:
        browse(visit)
    finally:
        ranks.before_step = lambda: None


SIZES = [(390, 844), (320, 568), (844, 390), (1100, 900)]
SEND_IN_SIGHT = """(() => {
  const send = document.getElementById('send').getBoundingClientRect();
  const stop = document.getElementById('stop').getBoundingClientRect();
  const root = document.documentElement;
  return send.top >= 0 && send.height > 0 && Math.max(send.bottom, stop.bottom) <= innerHeight
    && root.scrollHeight <= innerHeight && root.scrollWidth <= innerWidth;
})()"""
SETTINGS_ARE_WHOLE = """(() => {
  const settings = document.getElementById('settings');
  const edge = settings.getBoundingClientRect().right;
  return settings.scrollWidth <= settings.clientWidth
    && [...settings.querySelectorAll('input, textarea')].every(
      one => one.getBoundingClientRect().width > 60 && one.getBoundingClientRect().right <= edge);
})()"""
NEWEST_IN_SIGHT = f"""(() => {{
  const log = document.getElementById('messages').getBoundingClientRect();
  const newest = {ANSWER}.getBoundingClientRect();
  return newest.bottom <= log.bottom + 1 && newest.bottom > log.top && log.bottom <= innerHeight;
}})()"""


@pytest.mark.parametrize(("width", "height"), SIZES, ids=[f"{w}x{h}" for w, h in SIZES])
def test_send_is_in_sight_and_the_newest_message_is_followed(
    running: tuple[FakeServer, ScriptedRanks], width: int, height: int
) -> None:
    server, ranks = running

    async def visit(page: Page) -> None:
        await page.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        await opened(page, server.url)
        assert await page.run(SEND_IN_SIGHT)
        ranks.script = lambda _prompt: "a line of words\n\n" * 30
        ranks.before_step = lambda: (threading.Event().wait(0.002), None)[1]
        for n_messages in (2, 4):
            await ask(page, "question\n" * 9)
            await page.wait(f"document.querySelectorAll('.message').length === {n_messages}")
            while await page.run(f"!({IDLE})"):
                assert await page.run(SEND_IN_SIGHT)
            assert await page.run(SEND_IN_SIGHT)
            await page.wait(NEWEST_IN_SIGHT)

        await page.run("document.getElementById('messages').scrollTop = 0")  # who reads above stays there
        await page.run("document.getElementById('again').click()")
        await page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
        assert await page.run(SEND_IN_SIGHT)
        await page.run("document.getElementById('settings').open = true")
        assert await page.run(SEND_IN_SIGHT)
        assert await page.run(SETTINGS_ARE_WHOLE)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")

    try:
        browse(visit)
    finally:
        ranks.before_step = lambda: None


ALERT = "[...document.querySelectorAll('[role=alert].message')].at(-1)"
IN_PHASE = {
    "prompt": "!document.getElementById('prompt-bar').hidden",
    "answer": f"{ANSWER}?.innerText.includes('word') && document.getElementById('prompt-bar').hidden"
    " && document.getElementById('status').textContent === ''",
}


@pytest.mark.parametrize("phase", IN_PHASE)
def test_a_server_that_is_away_is_told_in_words_and_no_progress_stays(phase: str) -> None:
    """Its connection breaks while it computes a prompt or an answer; then it ends, and a question follows."""
    held = threading.Event()

    async def visit(page: Page, server: FakeServer, ranks: ScriptedRanks) -> None:
        await opened(page, server.url)
        ranks.script = lambda _prompt: "word " * 600
        most = 2 if phase == "prompt" else 60
        ranks.before_step = lambda: len(ranks.batches) >= most and held.wait(60)
        await ask(page, "a question " * 300)
        await page.wait(IN_PHASE[phase])
        for connection in [*server.connections.open]:
            loop = connection.transport._loop  # a killed server's sockets are closed by the kernel
            loop.call_soon_threadsafe(connection.transport.abort)
        await page.wait(f"{IDLE} && {ALERT} !== undefined")
        assert "ended before the answer did" in await page.run(f"{ALERT}.innerText")
        assert await page.run("document.getElementById('prompt-bar').hidden")
        assert await page.run("document.getElementById('status').textContent") == ""
        held.set()
        server.server.end(at_once=True)
        until(lambda: server.server.has_ended, "it does not end")
        await ask(page, "more")
        await page.wait(f"{IDLE} && {ALERT}.innerText.includes('the server does not answer')")
        page.errors[:] = [error for error in page.errors if "net::" not in error]  # each failed request

    with paged_server() as (server, ranks):
        try:
            browse(lambda page: visit(page, server, ranks))
        finally:
            held.set()


@pytest.mark.parametrize("button", ["send", "again"])
def test_the_focus_is_never_lost(running: tuple[FakeServer, ScriptedRanks], button: str) -> None:
    """By the keyboard: what is pressed is disabled then, and the focus would fall to the page."""
    server, ranks = running
    focused = "document.activeElement.id"

    async def visit(page: Page) -> None:
        await opened(page, server.url)
        ranks.script = lambda _prompt: "short"
        await ask(page, "a")
        await page.wait(f"{IDLE} && {ANSWER}?.innerText.endsWith('short')")
        ranks.script = lambda _prompt: "word " * 600
        ranks.before_step = lambda: (threading.Event().wait(0.02), None)[1]
        if button == "send":
            await page.type("more")
        await page.run(f"document.getElementById('{button}').focus()")
        await page.press(" ", 32, " ")
        await page.wait(f"{ANSWER}.innerText.includes('word word word')")
        assert await page.run(focused) == "question"
        await page.run("document.getElementById('stop').focus()")
        await page.press(" ", 32, " ")
        await page.wait(IDLE)
        assert await page.run(focused) == "question"

    try:
        browse(visit)
    finally:
        ranks.before_step = lambda: None
    server.wait_until_idle()


def test_comments_in_a_stream_are_no_part_of_the_answer() -> None:
    facts = ServerContext(page=True)
    limits = HttpLimits(sign_of_life_s=0.02)
    with scripted_server(HERMES, "<|im_start|>assistant\n", surroundings=facts, limits=limits) as (
        server,
        ranks,
    ):
        ranks.script = lambda _prompt: "hello"
        ranks.before_step = lambda: (threading.Event().wait(0.2), None)[1]

        async def visit(page: Page) -> None:
            await opened(page, server.url)
            await ask(page, "hi")
            await page.wait(f"{IDLE} && {ANSWER}.innerText.endsWith('hello')")
            assert await page.run("document.querySelector('.message.error')") is None

        browse(visit)


def test_errors_of_the_server_are_told(running: tuple[FakeServer, ScriptedRanks]) -> None:
    server, _ = running

    async def visit(page: Page) -> None:
        await opened(page, server.url)
        await ask(page, "x" * 5000)  # the context has 4,000 tokens
        await page.wait("document.querySelector('.message.error')?.textContent.includes('context')")
        page.errors.clear()  # the browser itself names the 400

    browse(visit)


def test_a_key_is_asked_for_and_kept_in_the_tab() -> None:
    facts = ServerContext(page=True)
    limits = HttpLimits(api_keys=("right",))
    with scripted_server(HERMES, "<|im_start|>assistant\n", surroundings=facts, limits=limits) as (
        server,
        ranks,
    ):
        ranks.script = lambda _prompt: "hello"

        async def visit(page: Page) -> None:
            await page.go(server.url)
            await page.wait("document.activeElement.id === 'key'")
            for key, is_right in (("wrong", False), ("right", True)):
                await page.run("document.getElementById('key').value = ''")
                await page.type(key)
                await page.press("Enter", 13, "\r")
                if not is_right:
                    await page.wait("document.getElementById('key-error').textContent.includes('not know')")
            await page.wait("document.activeElement.id === 'question'")
            await page.run("document.getElementById('temperature').value = 0")
            await ask(page, "hi")
            await page.wait(f"{IDLE} && {ANSWER}.innerText.endsWith('hello')")
            page.errors.clear()  # the browser names each 401

        browse(visit)


@pytest.mark.skipif(not AXE, reason="PHASEWISE_AXE does not name axe.min.js (npm install axe-core)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keyboard_and_contrast_by_axe(running: tuple[FakeServer, ScriptedRanks], scheme: str) -> None:
    server, ranks = running
    axe = Path(AXE).read_text(encoding="utf-8")

    async def visit(page: Page) -> None:
        await page.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await opened(page, server.url)
        ranks.script = lambda _prompt: HOSTILE
        await ask(page, "look")
        await page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
        await page.run("document.getElementById('settings').open = true")
        # Page.evaluate is not under the page's policy, a script element would be.
        await page.run(axe)
        violations: Any = await page.run(
            "axe.run().then(one => one.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
        )
        assert violations == []

    browse(visit)

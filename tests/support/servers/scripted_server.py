"""An OpenAI server whose every answer is a script: what it sends, and when. On a loopback port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aiohttp import web

Script: TypeAlias = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

VOCAB_SIZE = 40_000


@dataclass
class ScriptedServer:
    """The server's address, the JSON bodies that it was sent, in order, and the keys that came with them."""

    url: str
    keys: set[str | None] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def streamed(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body.get("stream")]


def event(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    """One event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


def count_tokens(prompt: str | Sequence[int]) -> int:
    """Ids as they are; of a text, its words and one token that opens it."""
    return len(prompt.split()) + 1 if isinstance(prompt, str) else len(prompt)


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def prompt_of(body: dict[str, Any]) -> Any:
    return body["prompt"] if "prompt" in body else body["messages"][0]["content"]


async def whole_answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """`max_tokens` words at once, and the usage."""
    n_tokens = body["max_tokens"]
    usage = {"prompt_tokens": count_tokens(prompt_of(body)), "completion_tokens": n_tokens}
    if not body.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": "word"}], "usage": usage})
    response = await open_stream(request)
    for index in range(n_tokens):
        await response.write(event(" word", "length" if index == n_tokens - 1 else None))
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return response


def timed_answer(first_s: float, gap_s: float) -> Script:
    """As `whole_answer`, but the tokens take their time."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await whole_answer(request, body)
        response = await open_stream(request)
        await asyncio.sleep(first_s)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(gap_s if index else 0)
            await response.write(event(" word", "length" if index == body["max_tokens"] - 1 else None))
        await response.write(b"data: [DONE]\n\n")
        return response

    return script


@contextlib.contextmanager
def scripted_server(
    script: Script = whole_answer,
    *,
    models: Sequence[str] = ("scripted",),
    takes_ids: bool = True,
    socket_path: str | None = None,
) -> Iterator[ScriptedServer]:
    """Serve `script` on both generating routes until the end of `with`; on a Unix socket, if one is named."""
    server = ScriptedServer("")

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server.bodies.append(body)
        server.keys.add(request.headers.get("Authorization"))
        if not takes_ids and not isinstance(prompt_of(body), str):
            return web.json_response({"error": {"message": "texts only"}}, status=400)
        return await script(request, body)

    async def list_models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in models]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", generate)
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_get("/v1/models", list_models)
    with _running(app, socket_path) as url:
        server.url = url
        yield server


@contextlib.contextmanager
def _running(app: web.Application, socket_path: str | None) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    runner = web.AppRunner(app, shutdown_timeout=0.2)
    try:
        on_loop(runner.setup())
        site = web.UnixSite(runner, socket_path) if socket_path else web.TCPSite(runner, "127.0.0.1", 0)
        on_loop(site.start())
        yield "http://localhost" if socket_path else f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        on_loop(runner.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()

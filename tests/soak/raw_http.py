"""HTTP/1.1 by hand over asyncio streams: thousands of connections cost little, and clients can misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

END_OF_STREAM = "[DONE]"


@dataclass
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Streamed:
    """The content of a stream so far: the text of its pieces, why it ended, and what it counted."""

    text: str = ""
    n_pieces: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Codes of error events."""
    usage: dict[str, int] | None = None
    n_done: int = 0

    def take(self, event: str) -> None:
        """One `data:` line's content."""
        if event == END_OF_STREAM:
            self.n_done += 1
            return
        said = json.loads(event)
        if "error" in said:
            self.errors.append(said["error"]["code"])
        self.usage = said.get("usage") or self.usage
        for choice in said.get("choices", []):
            self.text += choice["text"]
            self.n_pieces += 1
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])


class Connection:
    """One connection to 127.0.0.1, kept alive; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, receive_buffer: int | None = None) -> Connection:
        """receive_buffer: bytes that the kernel takes for a reader that does not read."""
        link = socket.socket()
        link.setblocking(False)
        if receive_buffer is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=link, limit=receive_buffer or 1 << 16))

    async def send(self, method: str, path: str, body: Any = None, key: str | None = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if key is not None:
            head += f"Authorization: Bearer {key}\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers. ConnectionError where the server has closed instead."""
        try:
            text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("closed instead of answering") from error
        first, *lines = text.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return int(first.split()[1]), {name.lower(): value for name, value in headers.items()}

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body, as it comes. ConnectionError where it is cut short."""
        try:
            if "content-length" in headers:
                yield await self._reader.readexactly(int(headers["content-length"]))
                return
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("cut short") from error

    async def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """Send a request and read the whole answer."""
        await self.send(method, path, body)
        status, headers = await self.head()
        content = b"".join([piece async for piece in self.pieces(headers)])
        return Reply(status, headers, content)

    async def events(self, headers: dict[str, str]) -> AsyncIterator[str]:
        """The contents of a stream's `data: ` lines."""
        left = b""
        async for piece in self.pieces(headers):
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    yield line[6:].decode()

    def abort(self) -> None:
        """Leave without a word (RST)."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def ask(port: int, method: str, path: str, body: Any = None) -> Reply:
    """One request over a connection of its own."""
    connection = await Connection.open(port)
    try:
        return await connection.ask(method, path, body)
    finally:
        connection.abort()


async def stream(port: int, path: str, body: Any) -> tuple[Reply | None, Streamed]:
    """One streamed request to its end; a Reply instead where it was refused."""
    connection = await Connection.open(port)
    said = Streamed()
    try:
        await connection.send("POST", path, {**body, "stream": True})
        status, headers = await connection.head()
        if status != 200:
            content = b"".join([piece async for piece in connection.pieces(headers)])
            return Reply(status, headers, content), said
        async for event in connection.events(headers):
            said.take(event)
    finally:
        connection.abort()
    return None, said

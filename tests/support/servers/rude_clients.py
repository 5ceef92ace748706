"""Clients that do what a good client does not: requests byte by byte, and sockets that are never read."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

ENOUGH_S = 60.0
"""More than anything takes on a busy machine: it matters to what fails alone."""


def connect(url: str, *, receive_bytes: int | None = None) -> socket.socket:
    """receive_bytes: room for this much that is not read; the kernel's own choice is megabytes."""
    address = urlsplit(url)
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(ENOUGH_S)
    raw.connect((address.hostname or "", address.port or 0))
    return raw


def completion(**fields: object) -> bytes:
    """A whole request, head and body."""
    return request("/v1/completions", {"model": "fake", "prompt": "a", "ignore_eos": True, **fields})


def request(path: str, fields: Mapping[str, object]) -> bytes:
    """A whole POST, head and body."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_to_end(raw: socket.socket) -> bytes:
    """Until the other side closes; b"" where it resets at once."""
    said = b""
    try:
        while part := raw.recv(65536):
            said += part
    except ConnectionResetError:
        pass
    return said


def until(holds: Callable[[], bool], what: str, timeout_s: float = ENOUGH_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


async def until_on_loop(holds: Callable[[], object]) -> None:
    """As `until`, while the event loop goes on."""
    async with asyncio.timeout(ENOUGH_S):
        while not holds():
            await asyncio.sleep(0.001)


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

"""Reads JSON bodies within limits on their size, memory and processor time."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from phasewise._json import MOST_CONTAINERS, MOST_VALUES, is_flood
from phasewise.serving.http.errors import ApiError, bad_request, from_validation
from phasewise.serving.http.monitoring.access_log import note_ignored
from phasewise.serving.http.requests.schemas import OpenRequest
from phasewise.serving.http.transport.connection import connection_of

Made = TypeVar("Made")
REST = 3.0
"""Ratio of rest to work. The event loop has the GIL to itself for at least three quarters of the time, so
that a short request beside large ones seldom waits for the GIL."""


class RestedThread:
    """Runs one job at a time in order of arrival; used on one event loop. After a job the thread rests for
    REST times the job's processor time, even if its client has left; jobs that come meanwhile wait."""

    def __init__(self, executor: Executor | None = None) -> None:
        """`executor`: runs the jobs; None: the event loop's default executor."""
        self._free = asyncio.Semaphore(1)
        self._executor = executor

    async def run(self, work: Callable[[], Made], before: Callable[[], None] | None = None) -> Made:
        """Return the result of `work`. `before` is called on the loop just before the job starts; if it
        raises, the job is dropped without a rest."""
        spent_s = 0.0

        def timed() -> Made:
            nonlocal spent_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                spent_s = time.thread_time() - began_s

        def rest(ended: asyncio.Future[Made]) -> None:
            if not ended.cancelled():
                ended.exception()  # its client may have left
            loop.call_later(REST * spent_s, self._free.release)

        await self._free.acquire()
        try:
            if before is not None:
                before()
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._executor, timed)
        except BaseException:
            self._free.release()
            raise
        done.add_done_callback(rest)
        return await asyncio.shield(done)


_MAP_FROM_BYTES = 64 * 1024
"""Smaller bodies lie in malloc's heap. Larger ones have pages of their own, which go back to the system."""


@dataclass(slots=True)
class UnfinishedBodies:
    """Request bodies that have not come whole, limited to `max_bytes` for all of one server together. With a
    limit for each body alone, a few hundred senders that never finish would hold gigabytes. If a new piece
    does not fit, the body that began first is dropped: a client that sends without pause is done long before
    its body is the oldest."""

    max_bytes: int
    n_bytes: int = 0
    _bodies: dict[UnfinishedBody, None] = field(default_factory=dict)
    """The bodies in the order in which they began, as keys."""

    def begin(self, most_bytes: int, wake: Callable[[], None]) -> UnfinishedBody:
        """Start a body of at most `most_bytes`. `wake` is called if the body is dropped to make room."""
        body = UnfinishedBody(self, most_bytes, wake)
        self._bodies[body] = None
        return body

    def _make_room(self, n_bytes: int, newcomer: UnfinishedBody) -> bool:
        """Free `n_bytes` for `newcomer`; False if `newcomer` itself was the oldest body and was dropped."""
        while self.n_bytes + n_bytes > self.max_bytes:
            oldest = next((body for body in self._bodies if body.n_bytes), newcomer)
            oldest.end()
            if oldest is newcomer:
                return False
            oldest.wake()
        return True


class UnfinishedBody:
    """A body of `UnfinishedBodies` while it is received. `end` frees its memory and must be called."""

    __slots__ = ("_all", "_heap", "_mapped", "_most_bytes", "ended", "n_bytes", "wake")

    def __init__(self, all_: UnfinishedBodies, most_bytes: int, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.n_bytes = 0
        self.ended = False
        """True once the bytes are freed, by the reader or to make room for other bodies."""
        self._all = all_
        self._most_bytes = most_bytes
        self._heap = bytearray()
        self._mapped: mmap.mmap | None = None

    def add(self, part: bytes) -> None:
        """Append a piece; no effect once the body has `ended`."""
        if self.ended:
            return
        assert self.n_bytes + len(part) <= self._most_bytes
        if not self._all._make_room(len(part), self):
            return
        if self._mapped is None and self.n_bytes + len(part) > _MAP_FROM_BYTES:
            # No page of it exists before it is written.
            self._mapped = mmap.mmap(-1, self._most_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mapped.write(self._heap)
            self._heap = bytearray()
        if self._mapped is None:
            self._heap += part
        else:
            self._mapped.write(part)
        self.n_bytes += len(part)
        self._all.n_bytes += len(part)

    def whole(self) -> bytes:
        """All bytes so far."""
        return bytes(self._heap) if self._mapped is None else self._mapped[: self.n_bytes]

    def end(self) -> None:
        """Free the memory; a second call has no effect."""
        if self.ended:
            return
        self._all._bodies.pop(self, None)
        self._all.n_bytes -= self.n_bytes
        self.ended = True
        self.n_bytes = 0
        self._heap = bytearray()
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


Body = TypeVar("Body", bound=BaseModel)

_N_BYTES = "phasewise.body_bytes"
"""Key of the body's length in an ASGI scope."""

_DISCARD_UP_TO_BYTES = 64 * 1024 * 1024
"""Bytes that are read past the limit, so that the sender sees the answer."""
_WORTH_A_THREAD_BYTES = 256 * 1024
"""Larger bodies are validated on a thread, because that takes milliseconds."""


class BodyReader:
    """Reads bodies of at most `max_bytes`, all unfinished ones of `max_unfinished_bytes`, on one loop."""

    def __init__(self, max_bytes: int, max_unfinished_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.unfinished = UnfinishedBodies(max(max_bytes, max_unfinished_bytes))
        self._large = RestedThread()  # of many threads that want Python's lock the loop is but one

    async def read(self, request: Request, model: type[Body]) -> Body:
        """Read and validate a body. Raises ApiError: 415 or 400 where it does not fit `model`, 413 where it
        is too large, 503 where it came slowly and other requests needed its memory."""
        refuse_other_types(request)
        connection = connection_of(request.scope)
        body = self.unfinished.begin(self._max_bytes, connection.wake_reader if connection else lambda: None)
        try:
            await self._read_limited(request, body)
            request.scope[_N_BYTES] = body.n_bytes
            if body.n_bytes <= _WORTH_A_THREAD_BYTES:
                given = _checked(body.whole(), model)
            else:
                given = await self._checked_beside(body, model)
            if isinstance(given, OpenRequest):
                note_ignored(request.scope, given.ignored())
            return given
        finally:
            body.end()

    async def convert(self, request: Request, convert: Callable[[], Made]) -> Made:
        """Run `convert` for a request whose body was read, on a thread if that body is large."""
        if n_bytes_of(request) <= _WORTH_A_THREAD_BYTES:
            return convert()
        return await self._large.run(convert)

    async def _checked_beside(self, body: UnfinishedBody, model: type[Body]) -> Body:
        raw = b""

        def take() -> None:
            nonlocal raw
            _refuse_ended(body)
            raw = body.whole()  # its memory goes when its client does

        return await self._large.run(lambda: _checked(raw, model), before=take)

    async def _read_limited(self, request: Request, body: UnfinishedBody) -> None:
        n_read = 0
        more = True
        while more:  # an empty part comes, too, where the body has made room for others
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part, more = message.get("body", b""), message.get("more_body", False)
            n_read += len(part)
            if n_read <= self._max_bytes:
                body.add(part)
                _refuse_ended(body)
            elif n_read > _DISCARD_UP_TO_BYTES:
                break
            else:
                body.end()
        if n_read > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def n_bytes_of(request: Request) -> int:
    """Length of the body that was read of `request`."""
    return int(request.scope.get(_N_BYTES, 0))


def _checked(raw: bytes, model: type[Body]) -> Body:
    if is_flood(raw):
        raise bad_request(
            f"the body has more than {MOST_VALUES} values or {MOST_CONTAINERS} lists and objects; "
            "send less at a time",
            code="too_many_values",
        )
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error


def _refuse_ended(body: UnfinishedBody) -> None:
    if body.ended:
        message = "the body took long to come, and requests that came since need its memory; send it again"
        raise ApiError(503, message, code="bodies_too_large", closes=True)


_OF_BROWSERS = {"origin", "sec-fetch-site"}


def refuse_other_types(request: Request) -> None:
    """Raise ApiError 415 for a browser's request (with Origin or Sec-Fetch-Site) that is not JSON: a page of
    another origin may post a form or plain text without a preflight, but not JSON (CSRF)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not _OF_BROWSERS & set(request.headers):
        return
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise ApiError(
        415,
        "the body must be JSON: send the header Content-Type: application/json",
        code="unsupported_media_type",
        closes=True,
    )

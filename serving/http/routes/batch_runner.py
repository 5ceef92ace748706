"""Runs batches: their lines are sent to the server's own routes, in shadow of all other requests. A line that
has an answer is never sent again; a line that a restart cuts off is. While the server is busy or starting, a
line is retried until the batch expires; while the disk is full, the batch waits. Lines are read in pieces on
one rested thread for all batches, so a batch can end between two pieces of a large file."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.types import ASGIApp, Message, Scope

from phasewise._files import open_file
from phasewise.serving.batches.lines import BatchLine, answer_line, read_lines, written
from phasewise.serving.batches.store import ENDS_AS, UNFINISHED, BatchStore, BatchStoreError, StoredBatch
from phasewise.serving.http.requests.body import RestedThread
from phasewise.serving.http.routes.middleware import shadow_scope
from phasewise.serving.http.transport.server import Lifecycle

MOST_LINES = 50_000
"""Most requests in a batch, as in OpenAI's API."""
_MOST_LINES_IN_FILE = 2 * MOST_LINES
"""Most lines of a batch file, empty lines included."""
_READ_AT_ONCE = 64
_BUSY = (429, 503)
_MOST_PAUSE_S = 30.0
_NOT_LOADED = b'"model_not_loaded"'
"""Bytes in the answer to a line whose model cannot be loaded; such a line is not retried."""
_FULL_PAUSE_S = 5.0

Made = TypeVar("Made")


class _Said(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class _Unreadable(Exception):
    """The file of a batch is invalid; the message says why."""


def _read_pieces(path: Path, most_bytes: int, url: str) -> Generator[list[BatchLine], None, None]:
    """A batch's file in pieces of at most 64 lines, or little over `most_bytes`. May raise _Unreadable."""
    n_lines = n_requests = begins_at = 0
    read: list[BatchLine] = []
    with open_file(path) as file:
        for line in read_lines(file, most_bytes, (url,)):
            n_lines += 1
            n_requests += line is not None
            if n_requests > MOST_LINES or n_lines > _MOST_LINES_IN_FILE:
                raise _Unreadable(f"the file has more than {MOST_LINES} lines")
            if line is not None:
                read.append(line)
                if len(read) == _READ_AT_ONCE or file.tell() - begins_at >= most_bytes:
                    yield read
                    read, begins_at = [], file.tell()
    if read:
        yield read


class BatchRunner:
    """Runs all batches of a server, on its event loop; the store is opened at first use. `most_bytes`: size
    limit of the store; 0: no batches are taken. `n_at_once`: lines in progress of all batches.
    `most_line_bytes`: size limit of a line, that of a request's body."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        n_at_once: int,
        most_line_bytes: int,
        life: Lifecycle,
        report: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._most_line_bytes = most_line_bytes
        self.life = life
        self._report = report
        self._app: ASGIApp | None = None
        self._store: BatchStore | None = None
        self._opening = threading.Lock()
        self._places = asyncio.Semaphore(n_at_once)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="phasewise-batches")
        self._reading = RestedThread(self._reader)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._cancelled: dict[str, asyncio.Event] = {}

    def store(self) -> BatchStore:
        """The store, opened at first use; from any thread. Raises BatchStoreError if it cannot be used."""
        with self._opening:
            if self._store is None:
                if self._most_bytes == 0:
                    raise BatchStoreError("elsewhere", "this server takes no batches (--batch-bytes)")
                try:
                    self._store = BatchStore(self._folder, self._most_bytes)
                except OSError as error:
                    message = f"{self._folder} cannot be used for batches: {error.strerror or error}"
                    raise BatchStoreError("elsewhere", message) from None
            return self._store

    def close(self) -> None:
        """Close the store once the event loop has ended."""
        self._reader.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def begin(self, app: ASGIApp) -> None:
        """Resume the batches that an earlier server left; called on the event loop that serves `app`."""
        self._app = app
        if self._most_bytes and (self._folder / "batches.sqlite").exists():
            self.wake()

    def wake(self) -> None:
        """Look for batches that were added or are to be cancelled."""
        look = asyncio.ensure_future(self._look())
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self) -> None:
        try:
            store = await asyncio.to_thread(self.store)
            batches = await asyncio.to_thread(store.unfinished)
        except BatchStoreError as error:
            self._report(f"warning: batches of an earlier server wait: {error}")
            return
        for batch in batches:
            if batch.id not in self._tasks:
                self._cancelled[batch.id] = asyncio.Event()
                task = asyncio.ensure_future(self._run(store, batch))
                self._tasks[batch.id] = task
                task.add_done_callback(partial(self._ended, batch.id))
            if batch.fields["status"] == "cancelling":
                self._cancelled[batch.id].set()

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[batch_id], self._cancelled[batch_id]
        if not task.cancelled() and task.exception() is not None:
            self._report(f"warning: batch {batch_id} waits for the next start: {task.exception()!r}")

    # ---- a batch -----------------------------------------------------------------------------------------

    async def _run(self, store: BatchStore, batch: StoredBatch) -> None:
        """Run a batch from its present state to its end or the server's. The batch may have ended already."""
        batch = await asyncio.to_thread(store.batch, batch.owner, batch.id)
        stop = threading.Event()
        try:
            how = batch.fields.get(ENDS_AS)  # a server ended while the files were written
            if how is None and batch.fields["status"] in UNFINISHED:
                how = await self._until_its_end(store, batch)
            if how is not None:
                await self._kept(lambda: store.finish(batch, how, stop))
        except _Unreadable as why:
            error = {"code": "invalid_file", "message": str(why), "param": "input_file_id", "line": None}
            errors = {"object": "list", "data": [error]}
            await self._kept(lambda: store.finish(batch, "failed", stop, errors=errors))
        finally:
            stop.set()

    async def _until_its_end(self, store: BatchStore, batch: StoredBatch) -> str | None:
        """Answer the batch's lines until all are answered, or it is cancelled or expired. Returns the final
        status; None if the server is stopping."""
        answering = asyncio.ensure_future(self._answer_all(store, batch))
        cancelling = asyncio.ensure_future(self._cancelled[batch.id].wait())
        left_s = batch.fields["expires_at"] - time.time()
        try:
            await asyncio.wait(
                (answering, cancelling), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done():
                answering.result()
        finally:
            is_whole = answering.done()
            for task in (answering, cancelling):
                task.cancel()
            await asyncio.gather(answering, cancelling, return_exceptions=True)
        if self.life.is_draining:
            return None
        how = "completed" if is_whole else "cancelled" if self._cancelled[batch.id].is_set() else "expired"
        if how != "completed":
            await self._give_up_rest(store, batch, how)
        return how

    async def _answer_all(self, store: BatchStore, batch: StoredBatch) -> None:
        """Count the batch's lines, unless that is done, and send the unanswered ones."""
        if batch.fields["status"] == "validating":
            n_lines = 0
            async with aclosing(self._pieces(store, batch)) as pieces:
                async for some in pieces:
                    n_lines += len(some)
            if not n_lines:
                raise _Unreadable("the file has no line")
            now_s = int(time.time())
            counted = partial(store.update, batch, among=UNFINISHED, in_progress_at=now_s, n_lines=n_lines)
            await self._kept(counted)
            await self._kept(partial(store.update, batch, among=("validating",), status="in_progress"))
        await self._feed(store, batch, await asyncio.to_thread(store.answered, batch.id))

    async def _pieces(self, store: BatchStore, batch: StoredBatch) -> AsyncGenerator[list[BatchLine], None]:
        """The non-empty lines of the batch in pieces. Raises _Unreadable if there are too many."""
        path, url = store.path_of(batch.input_id), batch.fields["endpoint"]
        lines = _read_pieces(path, self._most_line_bytes, url)
        try:
            while some := await self._kept(lambda: next(lines, None), self._reading.run):
                yield some
        finally:
            self._reader.submit(lines.close)  # behind what is being read

    async def _feed(self, store: BatchStore, batch: StoredBatch, done: set[int]) -> None:
        """Send the lines that are not in `done` as places become free, and wait for all answers."""
        answering: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self._pieces(store, batch)) as pieces:
                async for some in pieces:
                    for line in some:
                        if line.number in done:
                            continue
                        await self._places.acquire()
                        task = asyncio.ensure_future(self._answer(store, batch, line))
                        answering.add(task)
                        task.add_done_callback(lambda _task: self._places.release())
                        ended = {task for task in answering if task.done()}
                        for each in ended:
                            each.result()
                        answering -= ended
            for task in answering:
                await task
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, store: BatchStore, batch: StoredBatch, line: BatchLine) -> None:
        """Send a line and store its answer."""
        said = None if line.fault is not None else await self._send(batch.owner, line)

        def keep() -> None:
            response = None
            if said is not None:
                request_id = said.headers.get(b"x-request-id", b"").decode("latin-1")
                response = {"status_code": said.status, "request_id": request_id, "body": _json(said.body)}
            is_good = said is not None and said.status == 200
            store.answer(batch.id, line.number, written(answer_line(line, response)), is_good=is_good)

        await self._kept(keep)

    async def _send(self, owner: str, line: BatchLine) -> _Said:
        pause_s = 1.0
        while True:
            said = await self._call(owner, line)
            if said.status not in _BUSY or _NOT_LOADED in said.body:
                return said
            if self.life.is_draining:
                await asyncio.Event().wait()  # the loop ends
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _call(self, owner: str, line: BatchLine) -> _Said:
        """Send a line to the application as a request of `owner`, without a socket."""
        assert self._app is not None
        unread = [line.body]
        started: list[Message] = []
        parts: list[bytes] = []

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # it stays
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            else:
                parts.append(message.get("body", b""))

        scope: Scope = shadow_scope(line.url, owner)
        await self._app(scope, receive, send)
        return _Said(started[0]["status"], dict(started[0]["headers"]), b"".join(parts))

    async def _give_up_rest(self, store: BatchStore, batch: StoredBatch, how: str) -> None:
        """Store an error for every line without an answer."""
        done = await asyncio.to_thread(store.answered, batch.id)
        n_lines = 0

        def give_up(some: list[BatchLine]) -> None:
            for line in some:
                if line.number not in done:
                    why = f"batch_{how}", f"the batch has {_SAYS[how]} before this line was answered"
                    store.answer(batch.id, line.number, written(answer_line(line, None, why)), is_good=False)

        async with aclosing(self._pieces(store, batch)) as pieces:
            async for some in pieces:
                n_lines += len(some)
                await self._kept(partial(give_up, some))
        await self._kept(partial(store.update, batch, among=UNFINISHED, n_lines=n_lines))

    async def _kept(
        self,
        work: Callable[[], Made],
        run: Callable[[Callable[[], Made]], Awaitable[Made]] = asyncio.to_thread,
    ) -> Made:
        """Return the result of `work`, which uses the store on a thread; while the disk is full, retry."""
        has_told = False
        while True:
            try:
                return await run(work)
            except BatchStoreError as error:
                if error.kind != "full":
                    raise
                if not has_told:
                    self._report(f"warning: batches wait for room: {error}")
                has_told = True
                await asyncio.sleep(_FULL_PAUSE_S)


_SAYS = {"expired": "expired", "cancelled": "been cancelled"}


def _json(body: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(body)
    return body.decode("utf-8", "replace")

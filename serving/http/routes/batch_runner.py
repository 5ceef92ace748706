"""Batches in progress: their lines are sent to the server's own routes, in shadow of all other requests.

A line that has an answer is never sent again; what a restart cuts off is. A server that is busy or starting
is asked again until the batch's time is over. Where the disk is full the batch waits for room.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.types import ASGIApp, Message, Scope

from phasewise.serving.batches.lines import BatchLine, answered, faulty, given_up, read_line, written
from phasewise.serving.batches.store import UNFINISHED, BatchStore, BatchStoreError, StoredBatch
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.routes.middleware import shadow_scope

MOST_LINES = 50_000
"""OpenAI's own limit."""
_READ_AT_ONCE = 64
_BUSY = (429, 503)
_MOST_PAUSE_S = 30.0
_FULL_PAUSE_S = 5.0

Made = TypeVar("Made")


class _Said(NamedTuple):
    """An answer of the server's own routes."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class BatchRunner:
    """All batches of a server. Used on its event loop; the store is opened when it is first wanted.

    most_bytes: of the store; 0: this server takes no batches. n_at_once: lines in progress, of all batches.
    """

    def __init__(
        self, folder: Path, most_bytes: int, n_at_once: int, life: Lifecycle, report: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._life = life
        self._report = report
        self._app: ASGIApp | None = None
        self._store: BatchStore | None = None
        self._opening = threading.Lock()
        self._places = asyncio.Semaphore(n_at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._cancelled: dict[str, asyncio.Event] = {}

    def store(self) -> BatchStore:
        """From any thread. BatchStoreError: this server has none."""
        with self._opening:
            if self._store is None:
                if self._most_bytes == 0:
                    raise BatchStoreError("elsewhere", "this server takes no batches (--batch-bytes, --also)")
                try:
                    self._store = BatchStore(self._folder, self._most_bytes)
                except OSError as error:
                    message = f"{self._folder} cannot be used for batches: {error.strerror or error}"
                    raise BatchStoreError("elsewhere", message) from None
            return self._store

    def close(self) -> None:
        """Once no loop runs any more."""
        if self._store is not None:
            self._store.close()

    def begin(self, app: ASGIApp) -> None:
        """On the loop that serves `app`: go on with what an earlier server left."""
        self._app = app
        if self._most_bytes and (self._folder / "batches.sqlite").exists():
            self.wake()

    def refuse_unless_open(self) -> None:
        """ApiError while the server is stopping or starting."""
        refusal = self._life.refusal()
        if refusal is not None:
            raise refusal

    def wake(self) -> None:
        """A batch was added, or is to be cancelled."""
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
        """From where it is to its end, or to that of the server. It may have ended since the look."""
        batch = await asyncio.to_thread(store.batch, batch.owner, batch.id)
        if batch.fields["status"] not in UNFINISHED:
            return
        if batch.fields["status"] == "validating":
            begun = await self._kept(partial(self._validate, store, batch))
            if begun is None:
                return
            batch = begun
        done = await asyncio.to_thread(store.answered, batch.id)
        feeding = asyncio.ensure_future(self._feed(store, batch, done))
        cancelling = asyncio.ensure_future(self._cancelled[batch.id].wait())
        left_s = batch.fields["expires_at"] - time.time()
        try:
            await asyncio.wait(
                (feeding, cancelling), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if feeding.done():
                feeding.result()
        finally:
            is_whole = feeding.done()
            for task in (feeding, cancelling):
                task.cancel()
            await asyncio.gather(feeding, cancelling, return_exceptions=True)
        if self._life.is_draining:
            return
        how = "completed" if is_whole else "cancelled" if self._cancelled[batch.id].is_set() else "expired"
        if how != "completed":
            await self._kept(partial(self._give_up_rest, store, batch, how))
        await self._kept(partial(store.finish, batch, how))

    def _validate(self, store: BatchStore, batch: StoredBatch) -> StoredBatch | None:
        """Count its lines. None: it has failed."""
        n_lines = sum(1 for _ in islice(self._lines(store, batch), MOST_LINES + 1))
        now_s = int(time.time())
        if 0 < n_lines <= MOST_LINES:
            store.update(batch, among=UNFINISHED, in_progress_at=now_s, n_lines=n_lines)
            return store.update(batch, among=("validating",), status="in_progress")
        message = "the file has no line" if not n_lines else f"the file has more than {MOST_LINES} lines"
        error = {"code": "invalid_file", "message": message, "param": "input_file_id", "line": None}
        errors = {"object": "list", "data": [error]}
        store.update(batch, among=UNFINISHED, is_over=True, status="failed", failed_at=now_s, errors=errors)
        return None

    def _lines(self, store: BatchStore, batch: StoredBatch) -> Iterator[BatchLine]:
        """Its lines, but for empty ones."""
        seen: set[str] = set()
        with store.path_of(batch.input_id).open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield read_line(number, raw, seen, (batch.fields["endpoint"],))

    async def _feed(self, store: BatchStore, batch: StoredBatch, done: set[int]) -> None:
        """Send every line that has no answer, as places become free; ends once all have one."""
        lines = (line for line in self._lines(store, batch) if line.number not in done)
        answering: set[asyncio.Task[None]] = set()
        try:
            while some := await asyncio.to_thread(lambda: list(islice(lines, _READ_AT_ONCE))):
                for line in some:
                    await self._places.acquire()
                    task = asyncio.ensure_future(self._answer(store, batch, line))
                    answering.add(task)
                    task.add_done_callback(lambda _task: self._places.release())
                    answering = {task for task in answering if not _has_ended(task)}
            for task in answering:
                await task
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, store: BatchStore, batch: StoredBatch, line: BatchLine) -> None:
        """Send a line and keep its answer; unless the server ends before."""
        answer, is_good = faulty(line), False
        if line.fault is None:
            said = await self._send(batch.owner, line)
            request_id = said.headers.get(b"x-request-id", b"").decode("latin-1")
            answer = answered(line, said.status, request_id, _json(said.body))
            is_good = said.status == 200
        raw = written(answer)
        await self._kept(partial(store.answer, batch.id, line.number, raw, is_good=is_good))

    async def _send(self, owner: str, line: BatchLine) -> _Said:
        pause_s = 1.0
        while True:
            said = await self._call(owner, line)
            if said.status not in _BUSY:
                return said
            if self._life.is_draining:
                await asyncio.Event().wait()  # the loop ends
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _call(self, owner: str, line: BatchLine) -> _Said:
        """As a request of the owner's that came through no socket."""
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

    def _give_up_rest(self, store: BatchStore, batch: StoredBatch, how: str) -> None:
        """Every line without an answer gets the reason."""
        done = store.answered(batch.id)
        for line in self._lines(store, batch):
            if line.number not in done:
                why = given_up(
                    line, f"batch_{how}", f"the batch has {_SAYS[how]} before this line was answered"
                )
                store.answer(batch.id, line.number, written(why), is_good=False)

    async def _kept(self, work: Callable[[], Made]) -> Made:
        """The result of `work` of the store, once there is room for it."""
        has_told = False
        while True:
            try:
                return await asyncio.to_thread(work)
            except BatchStoreError as error:
                if error.kind != "full":
                    raise
                if not has_told:
                    self._report(f"warning: batches wait for room: {error}")
                has_told = True
                await asyncio.sleep(_FULL_PAUSE_S)


_SAYS = {"expired": "expired", "cancelled": "been cancelled"}


def _has_ended(task: asyncio.Task[None]) -> bool:
    """True if it is done; raises what it failed with."""
    if task.done():
        task.result()
    return task.done()


def _json(body: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(body)
    return body.decode("utf-8", "replace")

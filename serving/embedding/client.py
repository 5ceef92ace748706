"""Requests for vectors through the queues of all devices. Everything here runs on one event loop.

A request is placed whole, or refused (`queues`). Each device has a line of inputs that wait and sends its
worker batches of them, two at a time, so that the worker never waits for the front. When a worker dies, the
inputs of its batches wait again, once; what fails a second time is an error. The process is started again,
as often as `Restarts` allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from phasewise.serving.embedding.protocol import Floats, inputs_to_bytes
from phasewise.serving.embedding.queues import DeviceQueue, QueueManager
from phasewise.serving.encoder.text import Tokens
from phasewise.serving.engine_host import EngineState
from phasewise.serving.errors import QueueFull, RanksError, ServingError, Stopping
from phasewise.serving.restarts import Restarts

log = logging.getLogger(__name__)

BATCHES_AHEAD = 2
BATCH_TOKENS = 2048
BATCH_INPUTS = 64
MOST_TRIES = 2
_LONGEST_RETRY_S = 60
_RATE_OF_LAST = 64


class Worker(Protocol):
    """One device's worker process (`worker_process`), or a stand-in."""

    async def attach(self) -> None: ...
    async def embed(self, body: bytes) -> Floats: ...
    async def lost(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[], Worker]
"""A worker that is ready; blocks while it starts. RanksError where it cannot."""


@dataclass(eq=False, slots=True)
class _Input:
    """One input on its way."""

    tokens: Tokens
    answer: asyncio.Future[Floats]
    tries: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens.ids)

    @property
    def wanted(self) -> bool:
        return not self.answer.done()


@dataclass(eq=False, slots=True)
class _Lane:
    """What waits for one device."""

    queue: DeviceQueue
    start: Start
    worker: Worker
    waiting: deque[_Input] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: Restarts = field(default_factory=Restarts)
    n_batches: int = 0
    n_inputs: int = 0
    n_restarts: int = 0


@dataclass(frozen=True)
class LaneState:
    """What /metrics says of one device."""

    name: str
    is_up: bool
    inputs: int
    tokens: int
    n_batches: int
    n_inputs: int
    n_restarts: int


class EmbeddingClient:
    """`workers`: for each queue what starts its worker, and the worker that has been started."""

    def __init__(self, manager: QueueManager, workers: Sequence[tuple[Start, Worker]]) -> None:
        self._manager = manager
        self._lanes = [
            _Lane(queue, start, worker)
            for queue, (start, worker) in zip(manager.queues, workers, strict=True)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._live: set[_Input] = set()
        self._n_answers = 0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_RATE_OF_LAST)
        self._stopping = False
        self.on_lost: Callable[[], None] = lambda: None
        """Called once no device can embed any more."""

    # ---- what the server asks ----------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if not self._tasks:
            return "starting"
        if any(lane.queue.is_up for lane in self._lanes):
            return "running"
        return "lost" if all(lane.queue.is_gone for lane in self._lanes) else "replacing"

    @property
    def is_alive(self) -> bool:
        return self.state != "lost"

    @property
    def n_live(self) -> int:
        """Inputs in progress."""
        return len(self._live)

    @property
    def n_answers(self) -> int:
        """HTTP answers in progress."""
        return self._n_answers

    def lanes(self) -> list[LaneState]:
        return [
            LaneState(
                lane.queue.name,
                lane.queue.is_up,
                lane.queue.inputs,
                lane.queue.tokens,
                lane.n_batches,
                lane.n_inputs,
                lane.n_restarts,
            )
            for lane in self._lanes
        ]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin on this loop."""
        for at in range(len(self._lanes)):
            self._tasks.append(
                loop.create_task(self._run(at), name=f"phasewise-{self._lanes[at].queue.name}")
            )

    def end_everything(self) -> None:
        """Tell every request in progress that the server is stopping."""
        self._stopping = True
        for one in list(self._live):
            if one.wanted:
                one.answer.set_exception(Stopping("the server is stopping"))

    def close(self) -> None:
        """End the workers; after the loop has ended."""
        for lane in self._lanes:
            lane.worker.close()

    # ---- requests ----------------------------------------------------------------------------------------

    def refuse_if_full(self) -> None:
        """QueueFull where not even an input of one token has room now: nothing need be cut into tokens
        first.
        """
        if not any(queue.has_room(1) for queue in self._manager.queues):
            raise self._full()

    async def embed(self, inputs: Sequence[Tokens]) -> list[Floats]:
        """A vector for each input. QueueFull: busy, for one input as for many; RanksError, StepFailed,
        Stopping.
        """
        if self._stopping:
            raise Stopping("the server is stopping")
        if self.state == "lost":
            raise RanksError("no device can embed any more; start the server again")
        places = self._manager.place([len(one.ids) for one in inputs])
        if places is None:
            raise self._full()
        loop = asyncio.get_running_loop()
        placed = [_Input(one, loop.create_future()) for one in inputs]
        self._live.update(placed)
        self._n_answers += 1
        for one, at in zip(placed, places, strict=True):
            self._lanes[at].waiting.append(one)
            one.answer.add_done_callback(self._forgetting(one))
        for at in set(places):
            self._lanes[at].news.set()
        try:
            return await asyncio.gather(*(one.answer for one in placed))
        finally:
            self._n_answers -= 1
            for one in placed:
                if one.wanted:
                    one.answer.cancel()
                elif not one.answer.cancelled():
                    one.answer.exception()  # the caller knows it already from the first of them

    def retry_after_s(self) -> int:
        """Until what is in progress has been computed, at the speed of late."""
        if len(self._ends) < 2:
            return 1
        tokens = sum(size for _, size in self._ends)
        spent_s = max(1e-3, time.monotonic() - self._ends[0][0])
        return max(1, min(_LONGEST_RETRY_S, math.ceil(self._manager.tokens * spent_s / max(1, tokens))))

    def _full(self) -> QueueFull:
        after_s = self.retry_after_s()
        return QueueFull(
            f"{self._manager.inputs} inputs are in progress and these do not fit beside them;"
            f" try again in {after_s} s",
            after_s,
        )

    def _forgetting(self, one: _Input) -> Callable[[asyncio.Future[Floats]], None]:
        def forget(_answer: asyncio.Future[Floats]) -> None:
            self._live.discard(one)

        return forget

    # ---- one device --------------------------------------------------------------------------------------

    async def _run(self, at: int) -> None:
        """Serve one lane, over one worker after the other, until there is no hope for another."""
        lane = self._lanes[at]
        try:
            while True:
                await self._serve(at)
                lane.queue.is_up = False
                log.error("the embedding worker of %s was lost", lane.queue.name)
                self._move_waiting(at)
                if not await self._start_again(lane):
                    break
                lane.queue.is_up = True
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the lane of %s failed", lane.queue.name)
        lane.queue.is_up = False
        self._fail(lane.waiting, at, RanksError(f"{lane.queue.name} was lost and cannot be started again"))
        lane.queue.is_gone = True
        if all(one.queue.is_gone for one in self._lanes):
            self.on_lost()

    async def _serve(self, at: int) -> None:
        """Send batches until the worker is lost."""
        lane = self._lanes[at]
        await lane.worker.attach()
        lost = asyncio.ensure_future(lane.worker.lost())
        batches: set[asyncio.Task[None]] = set()
        try:
            while not lost.done():
                while len(batches) < BATCHES_AHEAD and (batch := self._next_batch(at)):
                    batches.add(asyncio.ensure_future(self._compute(at, batch)))
                news = asyncio.ensure_future(lane.news.wait())
                waited = {lost, news, *batches} if len(batches) < BATCHES_AHEAD else {lost, *batches}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                lane.news.clear()
                batches -= {task for task in done if task in batches}
        finally:
            lost.cancel()
            if batches:
                await asyncio.wait(batches)

    def _next_batch(self, at: int) -> list[_Input]:
        """The first that wait, as many as make a good batch; those that are no longer wanted are let go."""
        lane = self._lanes[at]
        batch: list[_Input] = []
        tokens = 0
        while lane.waiting and len(batch) < BATCH_INPUTS:
            one = lane.waiting[0]
            if batch and tokens + one.size > BATCH_TOKENS:
                break
            lane.waiting.popleft()
            if not one.wanted:
                self._manager.release(at, one.size)
                continue
            batch.append(one)
            tokens += one.size
        return batch

    async def _compute(self, at: int, batch: list[_Input]) -> None:
        lane = self._lanes[at]
        lane.n_batches += 1
        try:
            vectors = await lane.worker.embed(inputs_to_bytes([one.tokens for one in batch]))
            if len(vectors) != len(batch):
                raise RanksError(f"{lane.queue.name} gave {len(vectors)} vectors for {len(batch)} inputs")
        except RanksError as error:
            self._again(at, batch, error)
            return
        except ServingError as error:
            self._fail(batch, at, error)
            return
        lane.n_inputs += len(batch)
        for one, vector in zip(batch, vectors, strict=True):
            self._manager.release(at, one.size)
            self._ends.append((time.monotonic(), one.size))
            if one.wanted:
                one.answer.set_result(vector)

    def _again(self, at: int, batch: list[_Input], error: RanksError) -> None:
        """Inputs of a lost batch wait again, in front and once; what was lost twice is an error."""
        lane = self._lanes[at]
        for one in reversed(batch):
            one.tries += 1
            if one.wanted and one.tries >= MOST_TRIES:
                self._fail([one], at, error)
            else:
                lane.waiting.appendleft(one)

    def _move_waiting(self, at: int) -> None:
        """What waits for a device that is down goes to others with room; the rest waits for it."""
        lane, staying = self._lanes[at], deque[_Input]()
        while lane.waiting:
            one = lane.waiting.popleft()
            place = self._manager.move(at, one.size)
            if place is None:
                staying.append(one)
            else:
                self._lanes[place].waiting.append(one)
                self._lanes[place].news.set()
        lane.waiting = staying

    def _fail(self, inputs: Iterable[_Input], at: int, error: ServingError) -> None:
        for one in list(inputs):
            self._manager.release(at, one.size)
            if one.wanted:
                one.answer.set_exception(error)
        if inputs is self._lanes[at].waiting:
            self._lanes[at].waiting.clear()

    async def _start_again(self, lane: _Lane) -> bool:
        loop = asyncio.get_running_loop()
        while not self._stopping and (pause_s := lane.restarts.pause_s(time.monotonic())) is not None:
            await asyncio.sleep(pause_s)
            with suppress(OSError):
                lane.worker.kill()
            try:
                lane.worker = await loop.run_in_executor(None, lane.start)
            except RanksError as error:
                log.error("%s", error)
                continue
            lane.n_restarts += 1
            return True
        return False

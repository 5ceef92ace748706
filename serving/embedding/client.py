"""Requests for vectors through the queues of all devices. Everything here runs on one event loop.

A request is placed whole, or refused (`queues`). Each device has a line of inputs that wait, in which clients
take turns (`turns`), and sends its worker batches of them, two at a time, so that the worker never waits for
the front. When a worker dies, the inputs of its batches wait again, once; what fails a second time is an
error. The process is started again, as often as `Restarts` allows.
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

from phasewise._words import counted
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import check_numbers
from phasewise.serving.embedding.pace import DevicePace, LearntDepth
from phasewise.serving.embedding.protocol import Floats, inputs_to_bytes
from phasewise.serving.embedding.queues import UNLIMITED, Depth, DeviceQueue, QueueManager
from phasewise.serving.embedding.turns import InputTurns
from phasewise.serving.engine.engine_host import EngineState
from phasewise.serving.errors import QueueFull, RanksError, ServingError, StepFailed, Stopping
from phasewise.serving.processes.restarts import Restarts

log = logging.getLogger(__name__)

BATCHES_AHEAD = 2
BATCH_TOKENS = 2048
BATCH_INPUTS = 64
FIRST_DEPTH = Depth(BATCHES_AHEAD * BATCH_INPUTS, BATCHES_AHEAD * BATCH_TOKENS)
"""The depth of an accelerator that has none, until its first batch has ended."""
LEAST_PATIENCE_S = {"accelerator": 8.0, "cpu": 60.0}
"""A worker on a CPU may have to wait for other programs; an accelerator is its worker's own."""
FIRST_PATIENCE_S = 120.0
MOST_TRIES = 2
WRITING = 0.2
"""The share of the promised time that is kept for reading and writing, and for batches that take longer."""
_LONGEST_RETRY_S = 60
_RATE_OF_LAST = 64


class Worker(Protocol):
    """One device's worker process (`worker_process`), or a stand-in."""

    async def attach(self) -> None: ...
    async def embed(self, body: bytes) -> Floats: ...
    async def lost(self) -> None: ...
    def end_now(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[], Worker]
"""A worker that is ready; blocks while it starts. RanksError where it cannot."""


@dataclass(eq=False, slots=True)
class _Input:
    """One input on its way."""

    tokens: Tokens
    answer: asyncio.Future[Floats]
    owner: str = ""
    """The client that it came from."""
    end_s: float = math.inf
    """When its answer would be later than promised; what a lost worker had is answered at any time."""
    tries: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens.ids)

    @property
    def wanted(self) -> bool:
        return not self.answer.done()


@dataclass(eq=False, slots=True)
class _Lane:
    """The inputs that wait for one device."""

    queue: DeviceQueue
    start: Start
    worker: Worker
    pace: DevicePace
    learnt: LearntDepth | None
    """None where the plan has a depth, or the device is a CPU."""
    waiting: InputTurns[_Input] = field(default_factory=InputTurns)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: Restarts = field(default_factory=Restarts)
    running: dict[asyncio.Task[None], tuple[float, int]] = field(default_factory=dict)
    """The batches that the worker has: when they were sent, and their tokens."""
    free_at_s: float = 0.0
    """When the worker was last known to have ended a batch."""
    n_batches: int = 0
    n_inputs: int = 0
    n_restarts: int = 0

    @classmethod
    def over(cls, queue: DeviceQueue, start: Start, worker: Worker, slo_s: float) -> _Lane:
        learns = queue.is_accelerator and queue.depth == UNLIMITED
        learnt = LearntDepth(FIRST_DEPTH) if learns else None
        if learnt is not None:
            queue.depth = learnt.depth
        return cls(queue, start, worker, DevicePace(slo_s, queue.depth.tokens), learnt)

    @property
    def computing_tokens(self) -> int:
        """Tokens of the batches that the worker has."""
        return sum(tokens for _, tokens in self.running.values())

    @property
    def patience_s(self) -> float:
        """Time after which a worker that does not answer is ended."""
        least_s = LEAST_PATIENCE_S["accelerator" if self.queue.is_accelerator else "cpu"]
        return self.pace.patience_s(self.computing_tokens, least_s, FIRST_PATIENCE_S)

    def heed(self, s_per_token: float) -> None:
        """Hold from now on what a device of this speed computes in time."""
        if self.learnt is not None:
            self.queue.depth = self.learnt.depth_at(s_per_token)
        else:
            self.queue.share = self.pace.share_at(s_per_token)

    def heed_unfinished(self, now_s: float) -> None:
        """A batch that takes longer than those of late tells so before it ends."""
        if self.running:
            sent_s, tokens = next(iter(self.running.values()))
            self.heed(self.pace.unfinished(tokens, now_s - max(sent_s, self.free_at_s)))


@dataclass(frozen=True)
class LaneState:
    """The state of one device for /metrics."""

    name: str
    is_up: bool
    inputs: int
    tokens: int
    depth: Depth
    """The most that it may hold now."""
    n_batches: int
    n_inputs: int
    n_restarts: int


class EmbeddingClient:
    """`workers`: for each queue what starts its worker, and the worker that has been started.

    `slo_s`: what the queues' depths promise. Where devices are slower than that, less is held (`pace`).
    """

    def __init__(
        self, manager: QueueManager, workers: Sequence[tuple[Start, Worker]], slo_s: float | None = None
    ) -> None:
        self._manager = manager
        self._lanes = [
            _Lane.over(queue, start, worker, math.inf if slo_s is None else slo_s)
            for queue, (start, worker) in zip(manager.queues, workers, strict=True)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._live: set[_Input] = set()
        self._held: dict[str, Depth] = {}
        """The inputs of each client in progress."""
        self._n_answers = 0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_RATE_OF_LAST)
        self._promised_s = math.inf if slo_s is None else slo_s * (1 - WRITING)
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
                lane.queue.depth.scaled(lane.queue.share),
                lane.n_batches,
                lane.n_inputs,
                lane.n_restarts,
            )
            for lane in self._lanes
        ]

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin on this loop."""
        for index in range(len(self._lanes)):
            self._tasks.append(
                loop.create_task(self._run(index), name=f"phasewise-{self._lanes[index].queue.name}")
            )

    def end_everything(self) -> None:
        """Tell every request in progress that the server is stopping."""
        self._stopping = True
        for pending in list(self._live):
            if pending.wanted:
                pending.answer.set_exception(Stopping("the server is stopping"))

    def close(self) -> None:
        """End the workers; after the loop has ended."""
        for lane in self._lanes:
            lane.worker.close()

    # ---- requests ----------------------------------------------------------------------------------------

    def refuse_if_full(self, owner: str = "") -> None:
        """QueueFull where not even an input of one token has room now: nothing need be cut into tokens
        first.
        """
        if any(queue.has_room(1) for queue in self._manager.queues) or self._is_owed(owner, Depth(1, 1)):
            return
        raise self._full()

    async def embed(
        self, inputs: Sequence[Tokens], owner: str = "", arrived_s: float | None = None
    ) -> list[Floats]:
        """A vector for each input. QueueFull: busy, for one input as for many, also where the device has
        become so slow that what has been accepted would be late; RanksError, StepFailed, Stopping.

        owner: the client that they come from. Clients take turns, and each may have an equal part of all
        depths in progress, whatever the others have. arrived_s: when the request did (`time.monotonic`);
        None: now.
        """
        if self._stopping:
            raise Stopping("the server is stopping")
        if self.state == "lost":
            raise RanksError("no device can embed any more; start the server again")
        now_s = time.monotonic()
        for lane in self._lanes:
            lane.heed_unfinished(now_s)
        sizes = [len(tokens.ids) for tokens in inputs]
        wanted = Depth(len(sizes), sum(sizes))
        places = self._manager.place(sizes, is_owed=self._is_owed(owner, wanted))
        if places is None:
            raise self._full()
        loop = asyncio.get_running_loop()
        end_s = (now_s if arrived_s is None else arrived_s) + self._promised_s
        if not self._manager.are_within_depths(places):
            end_s = math.inf
        placed = [_Input(tokens, loop.create_future(), owner, end_s) for tokens in inputs]
        self._live.update(placed)
        self._held[owner] = self._held.get(owner, Depth(0, 0)) + wanted
        self._n_answers += 1
        for pending, place in zip(placed, places, strict=True):
            self._lanes[place].waiting.join(pending)
            pending.answer.add_done_callback(self._forgetting(pending))
        for place in set(places):
            self._lanes[place].news.set()
        try:
            return await asyncio.gather(*(pending.answer for pending in placed))
        finally:
            self._n_answers -= 1
            for pending in placed:
                if pending.wanted:
                    pending.answer.cancel()
                elif not pending.answer.cancelled():
                    pending.answer.exception()  # the caller knows it already from the first of them

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

    def _forgetting(self, pending: _Input) -> Callable[[asyncio.Future[Floats]], None]:
        def forget(_answer: asyncio.Future[Floats]) -> None:
            self._live.discard(pending)
            self._held[pending.owner] -= Depth(1, pending.size)
            if not self._held[pending.owner].inputs:
                del self._held[pending.owner]

        return forget

    def _is_owed(self, owner: str, wanted: Depth) -> bool:
        """True if a client has less in progress than its part, where others have something too."""
        n_clients = len(self._held.keys() | {owner})
        held = self._held.get(owner, Depth(0, 0)) + wanted
        return n_clients > 1 and self._manager.holds(held, n_clients)

    # ---- one device --------------------------------------------------------------------------------------

    async def _run(self, index: int) -> None:
        """Serve one lane, over one worker after the other, until there is no hope for another."""
        lane = self._lanes[index]
        try:
            while True:
                await self._serve(index)
                lane.queue.is_up = False
                log.error("the embedding worker of %s was lost", lane.queue.name)
                self._move_waiting(index)
                if not await self._start_again(lane):
                    break
                lane.queue.is_up = True
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the lane of %s failed", lane.queue.name)
        lane.queue.is_up = False
        self._fail(lane.waiting, index, RanksError(f"{lane.queue.name} was lost and cannot be started again"))
        lane.queue.is_gone = True
        if all(each_lane.queue.is_gone for each_lane in self._lanes):
            self.on_lost()

    async def _serve(self, index: int) -> None:
        """Send batches until the worker is lost."""
        lane = self._lanes[index]
        await lane.worker.attach()
        lost = asyncio.ensure_future(lane.worker.lost())
        batches: set[asyncio.Task[None]] = set()
        try:
            while not lost.done():
                while len(batches) < BATCHES_AHEAD and (batch := self._next_batch(index)):
                    batches.add(self._begin(index, batch))
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

    def _next_batch(self, index: int) -> list[_Input]:
        """The first that wait, as many as make a good batch; those that are no longer wanted are let go."""
        lane = self._lanes[index]
        batch: list[_Input] = []
        tokens = 0
        if not lane.waiting:
            self._take_over(index)
        while lane.waiting and len(batch) < BATCH_INPUTS:
            pending = lane.waiting.head
            if batch and tokens + pending.size > BATCH_TOKENS:
                break
            lane.waiting.take()
            if (
                pending.wanted
                and not pending.tries
                and self._is_late(lane, tokens + pending.size, pending.end_s)
            ):
                pending.answer.set_exception(self._full())
            if not pending.wanted:
                self._manager.release(index, pending.size)
                continue
            batch.append(pending)
            tokens += pending.size
        return batch

    def _is_late(self, lane: _Lane, tokens: int, end_s: float) -> bool:
        """True if a batch of `tokens` tokens would end after `end_s`. False for an idle worker."""
        if not lane.running:
            return False
        return time.monotonic() + lane.pace.s_per_token * (lane.computing_tokens + tokens) > end_s

    def _begin(self, index: int, batch: list[_Input]) -> asyncio.Task[None]:
        lane, n_tokens = self._lanes[index], sum(pending.size for pending in batch)
        task = asyncio.ensure_future(self._compute(index, batch, n_tokens))
        lane.running[task] = time.monotonic(), n_tokens
        task.add_done_callback(lane.running.pop)
        return task

    async def _compute(self, index: int, batch: list[_Input], n_tokens: int) -> None:
        lane = self._lanes[index]
        lane.n_batches += 1
        sent_s = time.monotonic()
        try:
            vectors = await self._embedded(lane, batch)
            if len(vectors) != len(batch):
                raise RanksError(
                    f"{lane.queue.name} gave {counted(len(vectors), 'vector')}"
                    f" for {counted(len(batch), 'input')}"
                )
        except RanksError as error:
            lane.worker.end_now()
            await lane.worker.lost()  # what runs again goes to the next one
            self._again(index, batch, error)
            return
        except ServingError as error:
            self._fail(batch, index, error)
            return
        lane.n_inputs += len(batch)
        began_s, lane.free_at_s = max(sent_s, lane.free_at_s), time.monotonic()
        if lane.learnt is not None:
            lane.learnt.computed(len(batch), n_tokens)
        lane.pace.computed(n_tokens, lane.free_at_s - began_s)
        lane.heed(lane.pace.s_per_token)
        for pending, vector in zip(batch, vectors, strict=True):
            self._manager.release(index, pending.size)
            self._ends.append((time.monotonic(), pending.size))
            if pending.wanted:
                _answer(pending, vector)

    async def _embedded(self, lane: _Lane, batch: list[_Input]) -> Floats:
        """Vectors of a batch. RanksError where the worker is lost, or hangs and is ended."""
        body, patience_s = inputs_to_bytes([pending.tokens for pending in batch]), lane.patience_s
        try:
            return await asyncio.wait_for(lane.worker.embed(body), patience_s)
        except TimeoutError as error:
            raise RanksError(
                f"the embedding worker of {lane.queue.name} did not answer for {patience_s:.0f} s"
            ) from error

    def _again(self, index: int, batch: list[_Input], error: RanksError) -> None:
        """Inputs of a lost batch wait again, in front and once; what was lost twice is an error."""
        lane = self._lanes[index]
        for pending in reversed(batch):
            pending.tries += 1
            if pending.wanted and pending.tries >= MOST_TRIES:
                self._fail([pending], index, error)
            else:
                lane.waiting.rejoin(pending)

    def _move_waiting(self, index: int) -> None:
        """Move the inputs that wait for a device that is down to others with room; the rest waits for it."""
        lane, staying = self._lanes[index], InputTurns[_Input]()
        while lane.waiting:
            pending = lane.waiting.take()
            place = self._manager.move(index, pending.size)
            if place is None:
                staying.join(pending)
            else:
                self._lanes[place].waiting.join(pending)
                self._lanes[place].news.set()
        lane.waiting = staying

    def _take_over(self, index: int) -> None:
        """Give an accelerator with room what waits for CPUs because it had none."""
        rank, n_moved = self._lanes[index].queue.rank, 0
        for other, lane in enumerate(self._lanes):
            while lane.queue.rank > rank and lane.waiting and n_moved < BATCH_INPUTS:
                place = self._manager.move(other, lane.waiting.head.size)
                if place is None:
                    break
                self._lanes[place].waiting.join(lane.waiting.take())
                self._lanes[place].news.set()
                n_moved += 1

    def _fail(self, inputs: Iterable[_Input], index: int, error: ServingError) -> None:
        for pending in list(inputs):
            self._manager.release(index, pending.size)
            if pending.wanted:
                pending.answer.set_exception(error)
        if inputs is self._lanes[index].waiting:
            self._lanes[index].waiting = InputTurns()

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


def _answer(pending: _Input, vector: Floats) -> None:
    """Other inputs of the batch have vectors of their own: one that has none fails alone."""
    try:
        check_numbers(vector)
    except StepFailed as error:
        pending.answer.set_exception(error)
    else:
        pending.answer.set_result(vector)

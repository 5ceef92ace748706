"""Requests for vectors through the queues of all devices, on one event loop.

A request is placed whole, or refused (`queues`). Each device (`lane`) has a line of waiting inputs, in which
clients take turns (`turns`), and sends its worker batches, two at a time, so that the worker never waits. An
input that would be answered later than promised, by the forecast of its device and recent errors of such
forecasts (`lateness`), is refused on arrival, or at the latest before it is sent to the worker.

When a worker dies, the inputs of its batches wait again, once; an input that fails twice is an error. The
process is started again, as often as `Restarts` allows."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from phasewise._words import counted
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.encoder.pooling import check_numbers
from phasewise.serving.embedding.lane import Input, InputTurns, Lane, SentBatch, Start, Worker
from phasewise.serving.embedding.pace import KEPT
from phasewise.serving.embedding.protocol import Floats, inputs_to_bytes
from phasewise.serving.embedding.queues import UNLIMITED, Depth, QueueManager
from phasewise.serving.engine.engine_host import EngineState
from phasewise.serving.errors import EngineLost, QueueFull, RanksError, ServingError, StepFailed, Stopping

log = logging.getLogger(__name__)

MOST_TRIES = 2
_LONGEST_RETRY_S = 60
_RATE_OF_LAST = 64


@dataclass(frozen=True)
class Asker:
    """The sender of a request. `arrived_s`: the time at which the request's last bytes came, by the event
    loop's clock; None: now. `at_end`: called with a function to run once the answer has been written; the
    default runs that function at once."""

    name: str = ""
    arrived_s: float | None = None
    at_end: Callable[[Callable[[], None]], None] = lambda call: call()


class EmbeddingClient:
    """A client of all devices' workers. `workers`: for each queue the function that starts a worker, and a
    worker that has been started. `slo_s`: the promised time of an answer; None: no time is promised."""

    def __init__(
        self, manager: QueueManager, workers: Sequence[tuple[Start, Worker]], slo_s: float | None = None
    ) -> None:
        self._manager = manager
        self._is_planned = any(queue.depth != UNLIMITED for queue in manager.queues)
        self._lanes = [
            Lane.over(queue, start, worker, math.inf if slo_s is None else slo_s, index)
            for index, (queue, (start, worker)) in enumerate(zip(manager.queues, workers, strict=True))
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._live: set[Input] = set()
        self._held: dict[str, Depth] = {}
        """Inputs and tokens in progress of each client."""
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
    def lost(self) -> EngineLost | None:
        """The reason why no device can embed any more; None: one can."""
        if self.is_alive:
            return None
        return EngineLost("every embedding worker was lost for good; start the server again")

    @property
    def n_live(self) -> int:
        """Inputs in progress."""
        return len(self._live)

    @property
    def n_answers(self) -> int:
        """HTTP answers in progress."""
        return self._n_answers

    @property
    def promised_s(self) -> float:
        """The longest promised time of an answer, in seconds; inf: no time is promised."""
        return max(lane.slo_s for lane in self._lanes)

    def lanes(self) -> list[Lane]:
        """The lanes of all devices, with their depths brought up to date."""
        now_s = self._now_s()
        for lane in self._lanes:
            lane.heed(now_s, now_s + lane.slo_s * (1 - KEPT))
        return self._lanes

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start serving every lane on this loop."""
        self._loop = loop
        for lane in self._lanes:
            self._tasks.append(loop.create_task(self._run(lane), name=f"phasewise-{lane.queue.name}"))

    def _now_s(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def end_everything(self) -> None:
        """Tell every request in progress that the server is stopping."""
        self._stopping = True
        for pending in list(self._live):
            if pending.wanted:
                pending.answer.set_exception(Stopping("the server is stopping"))

    def close(self) -> None:
        """End the workers; call once the event loop has ended."""
        for lane in self._lanes:
            lane.worker.close()

    # ---- requests ----------------------------------------------------------------------------------------

    def refuse_if_full(self, asker: Asker) -> None:
        """Raise QueueFull if no queue has room even for an input of one token, before texts are tokenized."""
        now_s = self._now_s()
        end_s = self._heed(asker, now_s)
        is_free = any(queue.has_room(1) for queue in self._manager.queues)
        if now_s > end_s or not (is_free or self._is_owed(asker.name, Depth(1, 1))):
            raise self._full()

    async def embed(self, inputs: Sequence[Tokens], asker: Asker = Asker()) -> list[Floats]:
        """A vector for each input, in order. QueueFull where there is no room for all inputs or the answer
        would come later than promised; RanksError, StepFailed, Stopping. Clients take turns, and each may
        have an equal share of all depths in progress, whatever the others have. The promised time counts from
        the arrival of the request. An idle device takes any input."""
        if self._stopping:
            raise Stopping("the server is stopping")
        if self.state == "lost":
            raise RanksError("no device can embed any more; start the server again")
        now_s = self._now_s()
        end_s = self._heed(asker, now_s)
        sizes = [len(tokens.ids) for tokens in inputs]
        wanted = Depth(len(sizes), sum(sizes))
        if now_s > end_s:
            raise self._full()
        places = self._manager.place(sizes, is_owed=self._is_owed(asker.name, wanted))
        if places is None:
            raise self._full()
        loop = asyncio.get_running_loop()
        lanes = [self._lanes[place] for place in places]
        ends_s = {lane: lane.end_of_placed(lanes.count(lane), now_s, end_s) for lane in {*lanes}}
        placed = [
            Input(tokens, lane, loop.create_future(), asker.name, ends_s[lane])
            for tokens, lane in zip(inputs, lanes, strict=True)
        ]
        self._live.update(placed)
        self._held[asker.name] = self._held.get(asker.name, Depth(0, 0)) + wanted
        self._n_answers += 1
        for pending in placed:
            pending.lane.join(pending, now_s)
            pending.answer.add_done_callback(partial(self._forget, pending))
        try:
            vectors = await asyncio.gather(*(pending.answer for pending in placed))
        finally:
            self._n_answers -= 1
            for pending in placed:
                if pending.wanted:
                    pending.answer.cancel()
                elif not pending.answer.cancelled():
                    pending.answer.exception()  # the caller knows it already from the first of them
        asker.at_end(lambda: self._answered(placed))
        return vectors

    def _heed(self, asker: Asker, now_s: float) -> float:
        """Adjust every lane's depth to this client's request; return the time by which to answer it."""
        arrived_s = now_s if asker.arrived_s is None else asker.arrived_s
        end_s = arrived_s + self.promised_s * (1 - KEPT)
        for lane in self._lanes:
            lane.heed(now_s, end_s)
        return end_s

    def _answered(self, placed: Sequence[Input]) -> None:
        """Record the time that writing the answer with the vectors of these inputs took."""
        writing_s = self._now_s() - max(pending.computed_s for pending in placed)
        for pending in placed:
            pending.lane.answered(pending, writing_s)

    def retry_after_s(self) -> int:
        """Seconds until the inputs in progress have been computed, at the recent speed."""
        if len(self._ends) < 2:
            return 1
        tokens = sum(size for _, size in self._ends)
        spent_s = max(1e-3, self._now_s() - self._ends[0][0])
        return max(1, min(_LONGEST_RETRY_S, math.ceil(self._manager.tokens * spent_s / max(1, tokens))))

    def _full(self) -> QueueFull:
        after_s = self.retry_after_s()
        return QueueFull(
            f"{self._manager.inputs} inputs are in progress and these do not fit beside them;"
            f" try again in {after_s} s",
            after_s,
        )

    def _forget(self, pending: Input, _answer: asyncio.Future[Floats]) -> None:
        self._live.discard(pending)
        self._held[pending.owner] -= Depth(1, pending.size)
        if not self._held[pending.owner].inputs:
            del self._held[pending.owner]

    def _is_owed(self, owner: str, wanted: Depth) -> bool:
        """True if a client, with these inputs, holds at most its share, and others have inputs too."""
        n_clients = len(self._held.keys() | {owner})
        held = self._held.get(owner, Depth(0, 0)) + wanted
        return n_clients > 1 and self._manager.holds(held, n_clients)

    # ---- one device --------------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        """Serve one lane, worker after worker, until no further worker can be started."""
        try:
            while True:
                await self._serve(lane)
                lane.queue.is_up = False
                log.error("the embedding worker of %s was lost", lane.queue.name)
                self._move_waiting(lane)
                if not await self._start_again(lane):
                    break
                lane.queue.is_up = True
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the lane of %s failed", lane.queue.name)
        lane.queue.is_up = False
        self._fail(lane.waiting, lane, RanksError(f"{lane.queue.name} was lost and cannot be started again"))
        lane.queue.is_gone = True
        if all(each_lane.queue.is_gone for each_lane in self._lanes):
            self.on_lost()

    async def _serve(self, lane: Lane) -> None:
        """Send batches to the lane's worker until the worker is lost."""
        await lane.worker.attach()
        if lane.is_unmeasured:
            try:
                async with asyncio.timeout(lane.patience_s):
                    await lane.measure(stretches=not self._is_planned)
            except (TimeoutError, RanksError):
                lane.worker.end_now()
            except ServingError as error:
                log.warning("%s was not timed: %s", lane.queue.name, error)
                lane.is_measured = True
        lost = asyncio.ensure_future(lane.worker.lost())
        batches: set[asyncio.Task[None]] = set()
        try:
            while not lost.done():
                await lane.company()
                while len(batches) < lane.batches_ahead and (batch := self._next_batch(lane)):
                    batches.add(self._begin(lane, batch))
                news = asyncio.ensure_future(lane.news.wait())
                waited = {lost, news, *batches} if len(batches) < lane.batches_ahead else {lost, *batches}
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                lane.news.clear()
                batches -= {task for task in done if task in batches}
        finally:
            lost.cancel()
            if batches:
                await asyncio.wait(batches)

    def _next_batch(self, lane: Lane) -> list[Input]:
        """The next waiting inputs, as many as make a good batch; those that nobody wants are dropped."""
        batch: list[Input] = []
        tokens = 0
        if not lane.waiting:
            self._take_over(lane)
        now_s, most, end_s = self._now_s(), lane.most_in_batch, math.inf
        while lane.waiting and len(batch) < most.inputs:
            pending = lane.waiting.head
            with_it = tokens + pending.size
            is_late = lane.is_late(with_it, now_s, min(end_s, pending.end_s)) and not pending.tries
            if batch and (is_late or with_it > most.tokens):
                break
            lane.waiting.take()
            if pending.wanted and is_late:
                lane.refused(pending, now_s)
                pending.answer.set_exception(self._full())
            if not pending.wanted:
                self._manager.release(lane.index, pending.size)
                continue
            batch.append(pending)
            tokens, end_s = with_it, min(end_s, pending.end_s)
        return batch

    def _begin(self, lane: Lane, batch: list[Input]) -> asyncio.Task[None]:
        now_s = self._now_s()
        lane.n_batches += 1
        n_tokens = sum(pending.size for pending in batch)
        for pending in batch:
            pending.batch, pending.sent_end_s = lane.n_batches, lane.end_of(n_tokens, now_s)
        running = SentBatch(now_s, n_tokens)
        task = asyncio.ensure_future(self._compute(lane, batch, running))
        lane.running[task] = running
        task.add_done_callback(lane.running.pop)
        return task

    async def _compute(self, lane: Lane, batch: list[Input], running: SentBatch) -> None:
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
            self._again(lane, batch, error)
            return
        except ServingError as error:
            self._fail(batch, lane, error)
            return
        lane.computed(batch, running, self._now_s())
        for pending, vector in zip(batch, vectors, strict=True):
            self._manager.release(lane.index, pending.size)
            self._ends.append((lane.free_at_s, pending.size))
            if pending.wanted:
                _answer(pending, vector)

    async def _embedded(self, lane: Lane, batch: list[Input]) -> Floats:
        """Vectors of a batch. RanksError where the worker is lost, or is ended because it is late."""
        body, patience_s = inputs_to_bytes([pending.tokens for pending in batch]), lane.patience_s
        try:
            return await asyncio.wait_for(lane.worker.embed(body), patience_s)
        except TimeoutError as error:
            raise RanksError(
                f"the embedding worker of {lane.queue.name} did not answer for {patience_s:.0f} s"
            ) from error

    def _again(self, lane: Lane, batch: list[Input], error: RanksError) -> None:
        """Put the inputs of a lost batch back in front of the line; those lost for the second time fail."""
        for pending in reversed(batch):
            pending.tries += 1
            if pending.wanted and pending.tries >= MOST_TRIES:
                self._fail([pending], lane, error)
            else:
                lane.waiting.rejoin(pending)

    def _move_waiting(self, lane: Lane) -> None:
        """Move the inputs that wait for a lost device to others with room; the rest keep waiting."""
        staying = InputTurns()
        while lane.waiting:
            pending = lane.waiting.take()
            place = self._manager.move(lane.index, pending.size)
            if place is None:
                staying.join(pending)
            else:
                self._lanes[place].join(pending, self._now_s())
        lane.waiting = staying

    def _take_over(self, lane: Lane) -> None:
        """Move inputs that wait for CPUs to an accelerator that has room again."""
        rank, most, n_moved = lane.queue.rank, lane.most_in_batch.inputs, 0
        for other in self._lanes:
            while other.queue.rank > rank and other.waiting and n_moved < most:
                place = self._manager.move(other.index, other.waiting.head.size)
                if place is None:
                    break
                self._lanes[place].join(other.waiting.take(), self._now_s())
                n_moved += 1

    def _fail(self, inputs: Iterable[Input], lane: Lane, error: ServingError) -> None:
        for pending in list(inputs):
            self._manager.release(lane.index, pending.size)
            if pending.wanted:
                pending.answer.set_exception(error)
        if inputs is lane.waiting:
            lane.waiting = InputTurns()

    async def _start_again(self, lane: Lane) -> bool:
        loop = asyncio.get_running_loop()
        while not self._stopping and (pause_s := lane.restarts.pause_s(self._now_s())) is not None:
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


def _answer(pending: Input, vector: Floats) -> None:
    """Set the result of an input; a vector that is not finite fails alone, not its whole batch."""
    try:
        check_numbers(vector)
    except StepFailed as error:
        pending.answer.set_exception(error)
    else:
        pending.answer.set_result(vector)

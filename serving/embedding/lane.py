"""One device's lane: the inputs that wait for the device, the batches that its worker has, and the forecast
of when they are computed. The caller gives the time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phasewise.serving.embedding.depth import line_through
from phasewise.serving.embedding.encoder.input_tokens import Tokens
from phasewise.serving.embedding.lateness import FIRST_SHARE, Lateness
from phasewise.serving.embedding.pace import KEPT, DevicePace, LearntDepth
from phasewise.serving.embedding.plan import DEFAULT_SLO_S
from phasewise.serving.embedding.protocol import Floats, inputs_to_bytes
from phasewise.serving.embedding.queues import UNLIMITED, Depth, DeviceQueue
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.scheduling.waiting_line import ClientTurns

log = logging.getLogger(__name__)

BATCHES_AHEAD = 2
BATCH_TOKENS = 2048
BATCH_INPUTS = 64
BATCH_SHARE = 0.1
"""The largest share of the promised time that a CPU's batch takes by the plan: its inputs end together."""
LEAST_BATCH_S = 0.02
"""The least time of a CPU's batch, where enough inputs wait: sending a batch costs a millisecond."""
FIRST_DEPTH = Depth(BATCHES_AHEAD * BATCH_INPUTS, BATCHES_AHEAD * BATCH_TOKENS)
"""The depth of an accelerator without a plan until its first batch has ended, where no time is promised."""
PROBE_TOKENS, PROBE_INPUTS = 32, 16
"""Size of the larger of two probe batches through which a device's first latency line is drawn."""
LONG_INPUT_TOKENS, LEAST_INPUTS = 512, 3
"""Without a plan, the promised time is at least that of `LEAST_INPUTS` inputs of `LONG_INPUT_TOKENS`."""
LEAST_PATIENCE_S = {"accelerator": 8.0, "cpu": 60.0}
"""The least wait, in seconds, before a silent worker is ended; on a CPU it may have to wait for others."""
FIRST_PATIENCE_S = 120.0
ALMOST = 1 - 1e-9
"""The factor by which rounding is allowed for: work that ends at exactly the promised time has room."""
DEAR_BATCH_S = 0.01
"""Time per batch, beside tokens, from which an accelerator gets one at a time, and waits for inputs."""
COMPANY = 0.1
MOST_COMPANY = 0.5
"""An idle device whose batches are dear waits for `COMPANY` of a batch's fixed time, and again while inputs
come, for at most `MOST_COMPANY` of that time."""


class Worker(Protocol):
    """One device's worker process (`worker_process`), or a stand-in."""

    async def attach(self) -> None: ...
    async def embed(self, body: bytes) -> Floats: ...
    async def lost(self) -> None: ...
    def end_now(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


Start = Callable[[], Worker]
"""Starts a worker and returns it ready; blocks meanwhile. RanksError where the worker cannot start."""


@dataclass(eq=False, slots=True)
class Input:
    """One input in progress. Times are of the event loop's clock."""

    tokens: Tokens
    lane: Lane
    """The lane of the input's device."""
    answer: asyncio.Future[Floats]
    owner: str = ""
    """The client that sent the input."""
    end_s: float = math.inf
    """The time from which the answer is late; inf for an input whose worker was lost."""
    tries: int = 0
    placed_end_s: float = math.inf
    """The forecast, on arrival, of when the input would be computed."""
    sent_end_s: float = math.inf
    """The forecast, when the input was sent to the worker, of when it would be computed."""
    computed_s: float = math.inf
    batch: int = 0
    """The number of the input's batch."""

    @property
    def size(self) -> int:
        return len(self.tokens.ids)

    @property
    def wanted(self) -> bool:
        return not self.answer.done()


class InputTurns:
    """The inputs that wait for one device: first inputs of lost batches, then those of clients in turns."""

    def __init__(self) -> None:
        self._again: deque[Input] = deque()
        self._turns: ClientTurns[Input] = ClientTurns()

    def __bool__(self) -> bool:
        return bool(self._again or self._turns)

    def __iter__(self) -> Iterator[Input]:
        yield from self._again
        yield from self._turns

    @property
    def head(self) -> Input:
        """The input that `take` gives next. IndexError: nothing waits."""
        return self._again[0] if self._again else self._turns.head()

    def join(self, pending: Input) -> None:
        """Append an input behind all others of its client."""
        self._turns.join(pending.owner, pending)

    def rejoin(self, pending: Input) -> None:
        """Put an input before all others."""
        self._again.appendleft(pending)

    def take(self) -> Input:
        """Remove and return the head; its client's turn is over. IndexError: nothing waits."""
        return self._again.popleft() if self._again else self._turns.take()


class SentBatch(NamedTuple):
    """A batch that has been sent to the worker. `sent_s`: the time of sending."""

    sent_s: float
    tokens: int


@dataclass(eq=False, slots=True)
class Lane:
    """One device's waiting inputs, running batches and forecasts. `slo_s`: promised seconds, or inf."""

    queue: DeviceQueue
    start: Start
    worker: Worker
    slo_s: float
    pace: DevicePace
    learnt: LearntDepth | None
    """None where the plan has a depth, or a CPU promises no time."""
    placed: Lateness
    """Recent errors of forecasts made when inputs arrived."""
    sent: Lateness
    """Recent errors of forecasts made when inputs were sent to the worker."""
    index: int = 0
    """The place of the queue in its manager."""
    waiting: InputTurns = field(default_factory=InputTurns)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: Restarts = field(default_factory=Restarts)
    running: dict[asyncio.Task[None], SentBatch] = field(default_factory=dict)
    """Batches that the worker has, the oldest first."""
    free_at_s: float = 0.0
    """The time at which the worker last ended a batch, as far as known."""
    is_measured: bool = False
    """True once two batches were timed for a first depth, which happens only without a plan."""
    n_batches: int = 0
    n_inputs: int = 0
    n_restarts: int = 0

    @classmethod
    def over(cls, queue: DeviceQueue, start: Start, worker: Worker, slo_s: float, index: int = 0) -> Lane:
        learnt, planned_s_per_token = None, 0.0
        is_promised = math.isfinite(slo_s)
        if queue.depth == UNLIMITED and (queue.is_accelerator or is_promised):
            first = Depth(PROBE_INPUTS, PROBE_INPUTS * PROBE_TOKENS) if is_promised else FIRST_DEPTH
            learnt = LearntDepth(first, slo_s if is_promised else DEFAULT_SLO_S)
            queue.depth = learnt.depth
        elif is_promised:
            usable_s = max(0.0, slo_s * (1 - KEPT - FIRST_SHARE) - queue.batch_s)
            planned_s_per_token = ALMOST * usable_s / queue.depth.tokens
        pace = DevicePace(queue.batch_s, planned_s_per_token)
        return cls(queue, start, worker, slo_s, pace, learnt, Lateness(slo_s), Lateness(slo_s), index)

    @property
    def is_unmeasured(self) -> bool:
        """True if the device promises a time but no batch of its own has been timed."""
        return self.learnt is not None and math.isfinite(self.slo_s) and not self.is_measured

    async def measure(self, *, stretches: bool) -> None:
        """Time two batches of made-up tokens: the line through them is the first depth (section IV-B2).
        `stretches`: make the promised time longer where a few long inputs take longer, in two measurements: a
        short disturbance of the host changes nothing. RanksError, StepFailed."""
        assert self.learnt is not None
        await self._probe(1)  # reads the weights from disk
        points = [await self._probe(1), await self._probe(PROBE_INPUTS)]
        if stretches and _promised_s(points) > self.slo_s:
            again = [await self._probe(1), await self._probe(PROBE_INPUTS)]
            points = [min(pair) for pair in zip(points, again, strict=True)]
        self.queue.batch_s = self.pace.batch_s = line_through(*points).beta_s
        for tokens, seconds in points:
            self.pace.computed(tokens, seconds)
        if stretches:
            longer_s = _promised_s(points) - self.slo_s
            if longer_s > 0:
                self.slo_s += longer_s
                log.warning("%s is slow: answers are promised within %.1f s", self.queue.name, self.slo_s)
                for pending in self.waiting:
                    pending.end_s += longer_s * (1 - KEPT)
            self.placed, self.sent = Lateness(self.slo_s), Lateness(self.slo_s)
        self.learnt = LearntDepth(self.learnt.depth, self.slo_s)
        self.learnt.computed(PROBE_INPUTS, PROBE_INPUTS * PROBE_TOKENS)
        self.queue.depth = self.learnt.depth_at(self.pace.s_per_token)
        self.is_measured = True

    async def _probe(self, n_inputs: int) -> tuple[int, float]:
        """Time a batch of made-up inputs; return its tokens and seconds."""
        loop = asyncio.get_running_loop()
        body, began_s = inputs_to_bytes([Tokens([0] * PROBE_TOKENS)] * n_inputs), loop.time()
        await self.worker.embed(body)
        return n_inputs * PROBE_TOKENS, loop.time() - began_s

    def join(self, pending: Input, now_s: float) -> None:
        """Append an input to this device's line, behind all others of its client."""
        pending.lane, pending.placed_end_s = self, self.end_of_all(now_s)
        self.waiting.join(pending)
        self.news.set()

    # ---- forecasts ---------------------------------------------------------------------------------------

    def s_per_token(self, now_s: float) -> float:
        """Recent seconds per token, raised if the running batch already takes longer than recent ones."""
        first = next(self._begun(), None)
        return self.pace.s_per_token if first is None else self.pace.unfinished(first[1], now_s - first[0])

    def end_of(self, tokens: int, now_s: float) -> float:
        """The time at which `tokens` more are computed, if they are sent now."""
        return now_s + self._running_left_s(now_s) + self._seconds(tokens, now_s)

    def end_of_all(self, now_s: float) -> float:
        """The time at which all inputs of the lane are computed."""
        return self.end_of(max(0, self.queue.tokens - self.running_tokens), now_s)

    def end_of_placed(self, n_inputs: int, now_s: float, end_s: float) -> float:
        """The time from which `n_inputs` inputs placed now are late: `end_s`, or inf for inputs that an idle
        device took although it takes longer, or has not been measured."""
        is_alone = self.queue.inputs == n_inputs
        return math.inf if is_alone and (self.is_unmeasured or self.end_of_all(now_s) > end_s) else end_s

    def is_late(self, tokens: int, now_s: float, end_s: float) -> bool:
        """True if a batch of `tokens` sent now would be answered after `end_s`. An idle worker takes a batch
        unless its forecast alone, without correction, is late."""
        if math.isinf(end_s):
            return False
        correction_s = self.sent.correction_s if self.running else 0.0
        return self.end_of(tokens, now_s) + correction_s > end_s

    def heed(self, now_s: float, end_s: float) -> None:
        """Limit the queue to the inputs that are computed by `end_s`."""
        s_per_token = self.s_per_token(now_s)
        if self.learnt is not None:
            self.queue.depth = self.learnt.depth_at(s_per_token)
        if math.isinf(end_s) or s_per_token == 0:
            self.queue.share = 1.0
            return
        left_s = end_s - now_s - self.placed.correction_s - self._running_left_s(now_s) - self.pace.batch_s
        most = self.most_in_batch.tokens
        n_whole, rest_s = divmod(max(0.0, left_s), most * s_per_token + self.pace.batch_s)
        tokens = self.running_tokens + n_whole * most + min(most, rest_s / s_per_token)
        self.queue.share = min(1.0, tokens / self.queue.depth.tokens)

    def _begun(self) -> Iterator[tuple[float, int]]:
        """Each batch that the worker has: the earliest time at which it begins or began, and its tokens."""
        for batch in self.running.values():
            yield max(batch.sent_s, self.free_at_s), batch.tokens

    def _running_left_s(self, now_s: float) -> float:
        left_s = 0.0
        for number, (began_s, tokens) in enumerate(self._begun()):
            spent_s = now_s - began_s if number == 0 else 0.0
            left_s += max(0.0, self._seconds(tokens, now_s) - spent_s)
        return left_s

    def _seconds(self, tokens: int, now_s: float) -> float:
        """Forecast seconds of this many tokens, divided into batches."""
        n_batches = math.ceil(tokens / self.most_in_batch.tokens)
        return n_batches * self.pace.batch_s + tokens * self.s_per_token(now_s)

    # ---- batches -----------------------------------------------------------------------------------------

    @property
    def running_tokens(self) -> int:
        """Tokens of the batches that the worker has."""
        return sum(batch.tokens for batch in self.running.values())

    @property
    def has_dear_batches(self) -> bool:
        """True if an accelerator's fixed time per batch makes fewer, larger batches worth a wait."""
        return self.queue.is_accelerator and self.pace.batch_s >= DEAR_BATCH_S

    @property
    def batches_ahead(self) -> int:
        """The number of batches that the worker may have at a time."""
        return 1 if self.has_dear_batches else BATCHES_AHEAD

    @property
    def most_in_batch(self) -> Depth:
        """The largest batch: a plan's depth on an accelerator; on a CPU a short one, since long batches gain
        nothing."""
        if self.queue.is_accelerator:
            return self.queue.depth if self.learnt is None else Depth(BATCH_INPUTS, BATCH_TOKENS)
        s_per_token = self.pace.planned_s_per_token or self.pace.s_per_token
        if s_per_token == 0 or math.isinf(self.slo_s):
            return Depth(BATCH_INPUTS, BATCH_TOKENS)
        within = int(max(LEAST_BATCH_S, BATCH_SHARE * self.slo_s) / s_per_token)
        return Depth(BATCH_INPUTS, min(BATCH_TOKENS, max(1, within)))

    @property
    def patience_s(self) -> float:
        """Seconds after which a worker that does not answer is ended."""
        least_s = LEAST_PATIENCE_S["accelerator" if self.queue.is_accelerator else "cpu"]
        batches = [batch.tokens for batch in self.running.values()]
        return self.pace.patience_s(batches, least_s, FIRST_PATIENCE_S)

    async def company(self) -> None:
        """Wait for more inputs if the device is idle and its batches are dear."""
        if not self.has_dear_batches or self.running or not self.waiting:
            return
        loop = asyncio.get_running_loop()
        until_s, n_inputs = loop.time() + MOST_COMPANY * self.pace.batch_s, 0
        while n_inputs < self.queue.inputs < self.queue.depth.inputs and loop.time() < until_s:
            n_inputs = self.queue.inputs
            await asyncio.sleep(COMPANY * self.pace.batch_s)

    # ---- ends --------------------------------------------------------------------------------------------

    def computed(self, batch: Sequence[Input], running: SentBatch, now_s: float) -> None:
        """Record that the worker has returned the vectors of this batch."""
        self.n_inputs += len(batch)
        began_s, self.free_at_s = max(running.sent_s, self.free_at_s), now_s
        if self.learnt is not None:
            self.learnt.computed(len(batch), running.tokens)
        self.pace.computed(running.tokens, now_s - began_s)
        for pending in batch:
            pending.computed_s = now_s

    def answered(self, pending: Input, writing_s: float) -> None:
        """Record the forecast errors of an answered input. `writing_s`: from the vector to the answer."""
        if math.isfinite(pending.end_s) and math.isfinite(pending.computed_s) and not pending.tries:
            end_s = pending.computed_s + writing_s
            self.placed.seen(pending.batch, end_s - pending.placed_end_s, end_s)
            self.sent.seen(pending.batch, end_s - pending.sent_end_s, end_s)

    def refused(self, pending: Input, now_s: float) -> None:
        """Record the forecast error of a placed input that was refused because it would be late."""
        self.placed.seen(self.n_batches, self.end_of(pending.size, now_s) - pending.placed_end_s, now_s)


def _promised_s(points: Sequence[tuple[int, float]]) -> float:
    """The shortest time that a device may promise, by two timed batches (tokens, seconds)."""
    return LEAST_INPUTS * line_through(*points).seconds(LONG_INPUT_TOKENS)

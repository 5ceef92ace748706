"""The engine's client on the event loop: sends requests, and routes answers' pieces to HTTP answers."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phasewise._words import counted, plural
from phasewise.serving.engine.messages import (
    Abort,
    Answer,
    Delivery,
    EngineLoad,
    Failure,
    Message,
    Progress,
    StepStats,
    Submit,
)
from phasewise.serving.errors import QueueFull, RequestError, ServingError, Stopping
from phasewise.serving.http.http_settings import HttpLimits

_add_to_eventfd = ctypes.PyDLL(None).eventfd_write
"""eventfd(2) through ctypes. A `PyDLL` call keeps the GIL."""
_add_to_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopWakeup:
    """`wake` makes `loop` call `on_wake`; several calls of `wake` before that make one call.
    `call_soon_threadsafe` releases the GIL to write to a socket. The loop's thread then takes the GIL, and
    the calling thread goes on only when the loop is idle, or after half a millisecond. Writing to an eventfd
    without releasing the GIL avoids that."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_wake: Callable[[], None]) -> None:
        self._on_wake = on_wake
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._eventfd, self._woken)

    def wake(self) -> None:
        """Schedule `on_wake` from any thread, before `close`; no effect once the loop has ended."""
        _add_to_eventfd(self._eventfd, 1)

    def close(self) -> None:
        os.close(self._eventfd)

    def _woken(self) -> None:
        os.eventfd_read(self._eventfd)
        self._on_wake()


Out = Answer | Failure | Progress
Pieces = Sequence[tuple[int, Answer | Progress]]
"""Each piece of an answer with the index of its request among those sent."""

_RATE_OF_LAST = 64
_LONGEST_RETRY_S = 300
_MOST_RESPONSES = 8
"""The memory of all answers together is limited to this many times `max_response_bytes`."""
_TOKEN_BYTES = 128
_ALTERNATIVE_BYTES = 112
"""Memory of one alternative token with its log-probability: a tuple of two numbers."""


class AnswerReader(Protocol):
    """The connection of a client that reads an answer as it comes."""

    @property
    def is_behind(self) -> bool:
        """True if the client has yet to take bytes that were written to the connection."""
        ...

    def cut(self) -> None:
        """Close the connection and drop the bytes that the client has not read."""


NOTHING_YET = Answer("", "", (), 0, 0)
"""Stands for the last piece of an answer of which no piece has come."""


@dataclass(slots=True)
class RequestLife:
    """One request from its sending to its end. Times: `time.perf_counter_ns`."""

    request: Submit
    index: int = 0
    """The request's place among those of its HTTP answer."""
    sent_ns: int = field(default_factory=time.perf_counter_ns)
    sent_at_s: float = field(default_factory=time.time)
    ended_at_s: float = 0.0
    """Unix times of the sending and of the end."""
    first_ns: int | None = None
    """Time at which the first token was sampled; None: none was so far."""
    n_generated: int = 0
    """Tokens generated so far; after a loss they are not counted twice."""
    last: Answer = NOTHING_YET
    reason: str | None = None
    """The reason of the end: a finish reason, `error` or `aborted`; None: it has not ended."""

    def add(self, piece: Answer) -> None:
        self.first_ns = piece.at_ns if self.first_ns is None else self.first_ns
        self.n_generated = max(self.n_generated, piece.n_generated)
        self.last = piece


class AnswerStream:
    """The pieces of one HTTP answer, on their way from the engine to `take`. `most_unread`: most pieces that
    may wait here for a reader that is behind; one more closes the stream and cuts the reader. Pieces that
    wait while the reader is not behind do not count. `reader`: None for an answer that is sent whole."""

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[Submit],
        most_unread: int = 0,
        reader: AnswerReader | None = None,
        *,
        tells_progress: bool = False,
    ) -> None:
        self.owner = requests[0].client
        self.in_shadow = requests[0].in_shadow
        self.model = requests[0].model
        """The id of the model whose engine answers."""
        self.tells_progress = tells_progress
        """True if the progress of the prompts is among the pieces."""
        self.has_begun = False
        """True if a piece of the answer has come, or the answer has ended."""
        self.n_bytes = 0
        """Approximate memory of waiting pieces; for an answer that is sent whole, of all its pieces."""
        self.take: Callable[[Pieces], bool] | None = None
        """Takes all pieces that wait; False if it cannot now, and calls `pass_on` later. None: not yet."""
        self.closed = False
        self._client = client
        self.lives = {
            request.request_id: RequestLife(request, index) for index, request in enumerate(requests)
        }
        self._open = set(self.lives)
        self._arrived: list[tuple[int, Answer | Progress]] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._most_unread = most_unread
        self._reader = reader

    @property
    def n_places(self) -> int:
        """Choices of the answer, each of which holds a place from its beginning to its end."""
        return len(self.lives)

    @property
    def is_over(self) -> bool:
        """True if nothing more is to be taken."""
        return self.closed or not (self._arrived or (self._open and self._error is None))

    def put(self, out: Out) -> None:
        """Add a piece without passing it on: call `pass_on` after the last piece of a delivery."""
        if self.closed or self._error is not None:
            return
        if isinstance(out, Failure):
            self._open.discard(out.request_id)
            self._error, self.has_begun = out.error, True
            return
        if isinstance(out, Answer):
            self.has_begun = True
        elif self._arrived and self._arrived[-1][1].request_id == out.request_id:
            self._arrived.pop()  # older progress of the same prompt: its reader is behind
        reader = self._reader
        if reader is not None and len(self._arrived) >= self._most_unread and reader.is_behind:
            self.close()
            reader.cut()
            return
        self._arrived.append((self.lives[out.request_id].index, out))
        if isinstance(out, Answer):
            if out.finish_reason is not None:
                self._open.discard(out.request_id)
            size = _bytes_of(out)
            self.n_bytes += size
            self._client.holds(self, size)

    def refuse(self, error: RequestError) -> None:
        """End the answer with an error; cut the connection if part of the answer may have been sent."""
        if self._reader is None:
            self.give_way(error)
        else:
            self.close()
            self._reader.cut()

    def give_way(self, error: ServingError) -> None:
        """End the answer with an error and free its places at once."""
        self._error, self.has_begun = error, True
        self._client.forget(self, self._open, gives_way=True)
        self._open = set()
        self._news.set()

    def pass_on(self) -> None:
        """Have the pieces that have come taken, if `take` can now."""
        if self._arrived and self.take is not None and self.take(self._arrived):
            self._arrived = []
            if self._reader is not None:
                self._release()
        if self.take is None or self.is_over:
            self._news.set()

    async def begun(self) -> None:
        """Wait until there is something to take, or nothing will be."""
        while not (self._arrived or self.is_over):
            self._news.clear()
            await self._news.wait()

    async def ended(self) -> None:
        """Wait until all is taken. Raises the engine's error where a request fails."""
        while not self.is_over:
            self._news.clear()
            await self._news.wait()
        if self._error is not None and not self.closed:
            raise self._error

    def _release(self) -> None:
        self._client.holds(self, -self.n_bytes)
        self.n_bytes = 0

    def close(self) -> None:
        """Abort the requests that have not ended and drop their pieces; a second call has no effect."""
        if self.closed:
            return
        self.closed = True
        self._arrived = []
        self._release()
        self._client.forget(self, self._open)
        self._open = set()
        self._news.set()


def _bytes_of(piece: Answer) -> int:
    """Approximate memory of a piece in bytes."""
    tokens = piece.tokens
    n_alternatives = sum(len(token.top) for token in tokens) if tokens and tokens[0].top else 0
    prompt = piece.prompt or ()
    n_alternatives += sum(len(token.top) for token in prompt)
    n_tokens = 1 + len(tokens) + len(prompt)
    return len(piece.text) + _TOKEN_BYTES * n_tokens + _ALTERNATIVE_BYTES * n_alternatives


class Observer:
    """Base of observers of the requests and answers: metrics and the length log."""

    def sent(self, life: RequestLife) -> None:
        """Note that a request goes to the engine."""

    def came(self, life: RequestLife, piece: Answer) -> None:
        """Note a piece, which is not in `life` yet."""

    def ended(self, life: RequestLife) -> None:
        """Note that a request has ended."""

    def stepped(self, stats: StepStats) -> None:
        """Note a step of an engine."""


class EngineClient:
    """Routes each piece that the engine delivers to the HTTP answer that waits for it."""

    def __init__(self, send: Callable[[Message], None], limits: HttpLimits) -> None:
        self._send = send
        self.limits = limits
        self._streams: dict[str, AnswerStream] = {}
        self._answers: dict[AnswerStream, None] = {}
        """The unfinished answers in order of arrival, as keys."""
        self._ends_s: deque[float] = deque(maxlen=_RATE_OF_LAST)
        self._n_of_owner: Counter[str] = Counter()
        self._n_in_shadow = 0
        self._held_bytes = 0
        self._delivered: deque[Delivery] = deque()
        self._wakeup: LoopWakeup | None = None
        self._observers: list[Observer] = []
        self._has_ended = False
        """True once every answer was told that the server is stopping; no request is taken from then on."""
        self.load: EngineLoad | None = None
        """The load that the engine reported last."""
        self._making_way: set[str] = set()
        """Models that are about to be unloaded, and answer no requests of batches."""

    @property
    def n_live(self) -> int:
        """Requests sent and not ended, without those of batches (in shadow)."""
        return len(self._streams) - self._n_in_shadow

    @property
    def n_answers(self) -> int:
        """HTTP answers that are not fully sent, without those of batches (in shadow)."""
        return sum(not stream.in_shadow for stream in self._answers)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the event loop on which the HTTP answers live. Deliveries before this call are lost."""
        self._wakeup = LoopWakeup(loop, self._route_delivered)

    def close(self) -> None:
        """Release the eventfd of the wakeup; nothing may be delivered after this call."""
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None

    def observe(self, observer: Observer) -> None:
        """Add an observer, called on the event loop. May be called from any thread."""
        self._observers = [*self._observers, observer]

    def remove_observer(self, observer: Observer) -> None:
        """Remove an observer. May be called from any thread, one at a time with `observe`."""
        self._observers = [other for other in self._observers if other is not observer]

    def open(
        self, requests: Sequence[Submit], reader: AnswerReader | None = None, *, tells_progress: bool = False
    ) -> AnswerStream:
        """Send the requests of one HTTP answer to the engine. Raises QueueFull or Stopping. `reader`: the
        connection of a streamed answer, cut if it is too far behind. Each request takes a place of its
        client's share, except requests of batches (in shadow), whose number the sender limits."""
        owner = requests[0].client
        if self._has_ended:
            raise Stopping("the server is stopping")
        in_shadow = requests[0].in_shadow
        if not in_shadow:
            self._find_places(len(requests), owner)
        elif requests[0].model in self._making_way:
            raise _makes_way(requests[0].model)
        most_unread = self.limits.max_pieces_unread * len(requests)
        stream = AnswerStream(self, requests, most_unread, reader, tells_progress=tells_progress)
        if in_shadow:
            self._n_in_shadow += len(requests)
        else:
            self._n_of_owner[owner] += len(requests)
        self._answers[stream] = None
        if not (self.n_live or in_shadow):  # how fast answers ended before a pause says nothing of now
            self._ends_s.clear()
        for life in stream.lives.values():
            self._streams[life.request.request_id] = stream
            for observer in self._observers:
                observer.sent(life)
            self._send(life.request)
        return stream

    def holds(self, stream: AnswerStream, n_bytes: int) -> None:
        """Count `n_bytes` more memory for `stream`; end the largest answer if a limit is exceeded."""
        self._held_bytes += n_bytes
        if n_bytes <= 0:
            return
        if stream.n_bytes > self.limits.max_response_bytes:
            largest = stream
        elif self._held_bytes > _MOST_RESPONSES * self.limits.max_response_bytes:
            largest = max(self._answers, key=lambda answer: answer.n_bytes)
        else:
            return
        largest.refuse(
            RequestError(
                f"the answer takes more than {self.limits.max_response_bytes} bytes of memory, or all "
                "answers take too much; ask for fewer choices, tokens or log-probabilities, or stream it"
            )
        )

    def forget(self, stream: AnswerStream, unfinished: Iterable[str], *, gives_way: bool = False) -> None:
        """Forget `stream`, abort its unfinished requests and free their places. `gives_way`: True if that
        says nothing of how fast answers end."""
        self._answers.pop(stream, None)
        for request_id in unfinished:
            self._send(Abort(request_id))
            self._end(stream, request_id, "aborted", is_counted=not gives_way)

    def deliver(self, delivery: Delivery) -> None:
        """Take load and pieces of answers from the engine's thread, and wake the event loop for them."""
        self.load = delivery.load
        if self._wakeup is not None:
            self._delivered.append(delivery)
            self._wakeup.wake()

    def end_everything(self) -> None:
        """Tell every answer in progress that the server is stopping, after the pieces already delivered."""
        self._has_ended = True
        self._route_delivered()
        self._route(
            tuple(Failure(request_id, Stopping("the server is stopping")) for request_id in self._streams),
            None,
        )

    def retry_after_s(self, n_too_many: int) -> int:
        """Seconds until `n_too_many` places will be free, at the rate at which the last answers ended. Before
        any answer has ended: the age of the oldest."""
        if len(self._ends_s) > 1:
            # To now, not to the last end: an engine that has stopped ending answers is slow.
            wait_s = n_too_many * (time.monotonic() - self._ends_s[0]) / len(self._ends_s)
        else:
            streams = ((name, stream) for name, stream in self._streams.items() if not stream.in_shadow)
            now_ns = time.perf_counter_ns()
            first_ns = min((stream.lives[name].sent_ns for name, stream in streams), default=now_ns)
            wait_s = (now_ns - first_ns) / 1e9
        return max(1, min(_LONGEST_RETRY_S, math.ceil(wait_s)))

    def _find_places(self, n_new: int, owner: str) -> None:
        """Free `n_new` places, if need be by ending another client's waiting answers. Raises QueueFull."""
        most, share = self.limits.max_live_requests, self.limits.max_sequences_per_key
        if n_new > min(most, share):
            raise RequestError(
                f"this server computes at most {min(most, share)} choices of one client at a time", "n"
            )
        n_own = self._n_of_owner[owner]
        if n_own + n_new > share:
            after_s = self.retry_after_s(n_own + n_new - share)
            raise QueueFull(
                f"{counted(n_own, 'request')} of yours {plural(n_own, 'is', 'are')} in progress or waiting,"
                f" and {share} may be; try again in {after_s} s",
                after_s,
            )
        n_missing = self.n_live + n_new - most
        if self.load is not None and self.load.n_waiting:  # the engine has no room even for those that wait
            n_waiting = self.n_live - self.load.n_running + n_new
            n_missing = max(n_missing, n_waiting - self.limits.max_waiting_requests)
        if n_missing <= 0:
            return
        after_s = self.retry_after_s(n_missing)
        full = QueueFull(
            f"{counted(self.n_live, 'request')} {plural(self.n_live, 'is', 'are')} in progress or waiting"
            f" and no more may be; try again in {after_s} s",
            after_s,
        )
        waiting = [stream for stream in self._answers if not (stream.has_begun or stream.in_shadow)]
        others = displaced(n_missing, owner, n_new, self._n_of_owner, waiting)
        if not others:
            raise full
        for stream in others:
            stream.give_way(full)

    def admit_shadows(self, model: str, admitted: bool) -> None:
        """Admit a model's batch answers, or end them for its room; their lines are sent again later."""
        if admitted:
            self._making_way.discard(model)
            return
        self._making_way.add(model)
        for stream in list(self._answers):
            if stream.in_shadow and stream.model == model:
                stream.give_way(_makes_way(model))

    def _route_delivered(self) -> None:
        while self._delivered:
            delivery = self._delivered.popleft()
            for prompt in delivery.progress:
                stream = self._streams.get(prompt.request_id)
                if stream is not None and stream.tells_progress and not stream.has_begun:
                    stream.put(prompt)
                    stream.pass_on()
            self._route(delivery.outs, delivery.stats)

    def _route(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        told: dict[AnswerStream, None] = {}
        for out in outs:
            stream = self._streams.get(out.request_id)
            if stream is None:
                continue
            reason: str | None = "error" if isinstance(out, Failure) else out.finish_reason
            if isinstance(out, Answer):
                life = stream.lives[out.request_id]
                for observer in self._observers:
                    observer.came(life, out)
                life.add(out)
            if reason is not None:
                self._end(stream, out.request_id, reason)
            stream.put(out)
            told[stream] = None
        if stats is not None:
            for observer in self._observers:
                observer.stepped(stats)
        for stream in told:
            stream.pass_on()

    def _end(self, stream: AnswerStream, request_id: str, reason: str, *, is_counted: bool = True) -> None:
        """End a request of `stream`, and free its place, unless it has ended."""
        if self._streams.pop(request_id, None) is None:
            return
        life = stream.lives[request_id]
        life.reason, life.ended_at_s = reason, time.time()
        for observer in self._observers:
            observer.ended(life)
        if stream.in_shadow:
            self._n_in_shadow -= 1
            return
        if is_counted:
            self._ends_s.append(time.monotonic())
        self._n_of_owner[stream.owner] -= 1
        if not self._n_of_owner[stream.owner]:
            del self._n_of_owner[stream.owner]


def _makes_way(model: str) -> QueueFull:
    return QueueFull(f"the model {model} makes room for another", 1)


def displaced(
    n_missing: int, owner: str, n_new: int, held: Mapping[str, int], waiting: Sequence[AnswerStream]
) -> list[AnswerStream]:
    """Answers that must end so that `owner` gets `n_new` places, `n_missing` of which are taken. Each is the
    newest waiting answer of the client that holds most places at that point, and only a client that holds
    more than `owner` will hold loses answers. Empty if that frees too few places. `held`: places of each
    client, running and waiting. `waiting`: answers in order of arrival."""
    left = dict(held)
    queues: dict[str, list[AnswerStream]] = {}
    for answer in waiting:
        queues.setdefault(answer.owner, []).append(answer)
    chosen: list[AnswerStream] = []
    while n_missing > 0:
        largest = max(queues, key=lambda client: left[client], default=owner)
        if left.get(largest, 0) <= left.get(owner, 0) + n_new:
            return []
        newest = queues[largest].pop()
        if not queues[largest]:
            del queues[largest]
        left[largest] -= newest.n_places
        n_missing -= newest.n_places
        chosen.append(newest)
    return chosen

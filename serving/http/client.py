"""The asyncio side of the engine: messages out, the pieces of each HTTP answer in. All on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from phasewise.serving.errors import QueueFull, RequestError, Stopping
from phasewise.serving.messages import Abort, Answer, Delivery, EngineLoad, Failure, Submit

Message = Submit | Abort


class AnswerStream:
    """The pieces of one HTTP answer: (index of the request among those sent, piece)."""

    def __init__(self, client: EngineClient, requests: Sequence[Submit]) -> None:
        self._client = client
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._open = set(self._index)
        self._arrived: asyncio.Queue[Answer | Failure] = asyncio.Queue()

    def put(self, out: Answer | Failure) -> None:
        self._arrived.put_nowait(out)

    async def next(self) -> tuple[int, Answer] | None:
        """The next piece; None after the last. Raises what the engine says where a request fails."""
        if not self._open:
            return None
        out = await self._arrived.get()
        if isinstance(out, Failure):
            self._open.discard(out.request_id)
            raise out.error
        if out.finish_reason is not None:
            self._open.discard(out.request_id)
        return self._index[out.request_id], out

    def close(self) -> None:
        """Stop listening; what has not ended is aborted. Closing twice does nothing more."""
        self._client.forget(self._index, self._open)
        self._open = set()


class Observer(Protocol):
    """Sees the traffic, for metrics."""

    def sent(self, request: Submit) -> None: ...

    def delivered(self, delivery: Delivery) -> None: ...

    def forgotten(self, request_id: str) -> None: ...


class EngineClient:
    """Routes each piece that the engine delivers to the HTTP answer that waits for it."""

    def __init__(self, send: Callable[[Message], None], max_live: int) -> None:
        self._send = send
        self._max_live = max_live
        self._streams: dict[str, AnswerStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._observers: list[Observer] = []
        self.load: EngineLoad | None = None
        """The engine's, as it said last."""

    @property
    def n_live(self) -> int:
        """Requests sent and not ended."""
        return len(self._streams)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the HTTP answers live. Deliveries before are lost: nobody has asked yet."""
        self._loop = loop

    def observe(self, observer: Observer) -> None:
        """`observer` sees all that is sent and delivered, on the event loop."""
        self._observers.append(observer)

    def open(self, requests: Sequence[Submit]) -> AnswerStream:
        """Send requests to the engine. QueueFull at once where there are too many."""
        if len(requests) > self._max_live:
            raise RequestError(f"this server computes at most {self._max_live} choices at a time", "n")
        if self.n_live + len(requests) > self._max_live:
            raise QueueFull(
                f"{self.n_live} requests are in progress or waiting and at most {self._max_live} may be; "
                "try again later"
            )
        stream = AnswerStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
            for observer in self._observers:
                observer.sent(request)
            self._send(request)
        return stream

    def forget(self, request_ids: Iterable[str], unfinished: set[str]) -> None:
        """Nobody reads these any more; those unfinished are aborted."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        for request_id in unfinished:
            self._send(Abort(request_id))
            for observer in self._observers:
                observer.forgotten(request_id)

    def deliver(self, delivery: Delivery) -> None:
        """From the engine's thread."""
        self.load = delivery.load
        if self._loop is None or self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):  # the loop closed just now: nobody reads any more
            self._loop.call_soon_threadsafe(self._route, delivery)

    def end_everything(self) -> None:
        """Tell every answer in progress that the server is stopping."""
        for request_id, stream in list(self._streams.items()):
            stream.put(Failure(request_id, Stopping("the server is stopping")))

    def _route(self, delivery: Delivery) -> None:
        for observer in self._observers:
            observer.delivered(delivery)
        for out in delivery.outs:
            stream = self._streams.get(out.request_id)
            if stream is not None:
                stream.put(out)
            if isinstance(out, Failure) or out.finish_reason is not None:
                self._streams.pop(out.request_id, None)

"""Turns validated bodies into messages for the engine, on threads that clients share fairly. Slow work holds
up only its kind, in four lanes: texts, conversations (by a chat template), long prompts, and grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request

from phasewise.serving.engine.messages import Submit
from phasewise.serving.errors import QueueFull
from phasewise.serving.grammar.guides import MatcherGuide
from phasewise.serving.http.errors import ClientLeft, engine_errors
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.monitoring.access_log import note_ignored
from phasewise.serving.http.requests.body import n_bytes_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_to_messages import (
    RequiredGrammar,
    chat_requests,
    compiled,
    completion_requests,
    delay_guide,
    estimated,
    held_to,
    prompts_of,
    tell_unheld,
)
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.sandbox.confined import CancelToken
from phasewise.serving.scheduling.waiting_line import ClientTurns

Made = TypeVar("Made")

_LONG_CHARACTERS = 128 * 1024
MOST_ORDINARY = 256
MOST_LONG = 16
_MOST_GRAMMARS = 16


class FairLane:
    """Runs up to `n_threads` jobs at a time on one event loop; clients take turns. If `most_waiting` wait,
    the last job of the client with most jobs is refused, so that no client keeps others out."""

    def __init__(self, name: str, n_threads: int = 2, most_waiting: int = MOST_ORDINARY) -> None:
        self._name = name
        self._n_threads = n_threads
        self._most_waiting = most_waiting
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"phasewise-{name}")
        self._n_running = 0
        self._waiting: ClientTurns[asyncio.Future[None]] = ClientTurns()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, client: str, work: Callable[[], Made]) -> Made:
        """Return the result of `work`, run on a thread once it is the client's turn. Raises QueueFull if too
        many jobs wait. A cancelled wait leaves the queue; a job that has begun runs on and occupies its
        thread until it ends."""
        loop = asyncio.get_running_loop()
        if self._n_running < self._n_threads:
            self._n_running += 1
        else:
            await self._turn(client, loop)
        done = loop.run_in_executor(self._executor, work)
        done.add_done_callback(self._next)
        return await asyncio.shield(done)

    def close(self) -> None:
        """Stop the threads; queued jobs are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: str, loop: asyncio.AbstractEventLoop) -> None:
        if self.n_waiting >= self._most_waiting:
            self._refuse_one_for(client)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.join(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # the turn came after its client had left
            else:
                with suppress(ValueError):  # it was refused
                    self._waiting.remove(client, turn)
            raise

    def _refuse_one_for(self, client: str) -> None:
        longest = self._waiting.longest
        if longest is None or self._waiting.count(longest) <= self._waiting.count(client) + 1:
            raise self._full()
        last = self._waiting.take_last(longest)
        if not last.done():
            last.set_exception(self._full())

    def _full(self) -> QueueFull:
        return QueueFull(f"too many requests wait for their {self._name}; try again later", 1)

    def _next(self, done: asyncio.Future[Made]) -> None:
        if not done.cancelled():
            done.exception()  # the client that asked for it may have left
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the free thread to the client that has waited longest for a turn."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._n_running -= 1


class Preparation:
    """Prepares the requests of one server on threads; used on one event loop."""

    def __init__(self) -> None:
        self._texts = FairLane("prompt")
        self._conversations = FairLane("conversation")
        self._long = FairLane("long prompt", 1, MOST_LONG)
        self._grammars = FairLane("grammar", 1, _MOST_GRAMMARS)

    async def prepare(
        self, request: Request, body: ChatRequest | CompletionRequest, model: ServedModel
    ) -> Sequence[Submit]:
        """Make the requests for `model`, with the grammar of their answers. Raises ApiError or ClientLeft."""
        client, cancel = client_of(request.scope), CancelToken()

        def made() -> tuple[Sequence[Submit], RequiredGrammar | None]:
            if isinstance(body, ChatRequest):
                requests = chat_requests(body, model, client, cancel)
            else:
                requests = completion_requests(body, model, client)
            return estimated(requests, model), held_to(body, model)

        lane = self._lane_of(request, body)
        with engine_errors():
            requests, wanted = await while_there(request, lane.run(client.name, made), cancel)
            guide: MatcherGuide | None = None
            if wanted is not None and model.guides is not None:
                guide, asked = model.guides.known(wanted.grammar), wanted
                if guide is None:
                    work = self._grammars.run(client.name, lambda: compiled(asked, model, cancel))
                    wanted, guide = await while_there(request, work, cancel)
            tell_unheld(body, wanted, guide, model)
            note_ignored(request.scope, body.ignored())
            if wanted is not None and guide is not None:
                begun = delay_guide(guide, wanted, body, requests[0].prompt_token_ids, model)
                requests = [replace(submit, guide=begun) for submit in requests]
        return requests

    async def tokenize(
        self, request: Request, make: Callable[[CancelToken], Made], *, is_text: bool = False
    ) -> Made:
        """Run `make`, which tokenizes, in its lane. Raises ApiError or ClientLeft."""
        lane = self._texts if is_text else self._conversations
        lane = self._long if n_bytes_of(request) > _LONG_CHARACTERS else lane
        cancel = CancelToken()
        work = lane.run(client_of(request.scope).name, lambda: make(cancel))
        with engine_errors():
            return await while_there(request, work, cancel)

    def _lane_of(self, request: Request, body: ChatRequest | CompletionRequest) -> FairLane:
        """The lane by prompt length: for a chat that of its body too, for templates may take any field."""
        if isinstance(body, ChatRequest):
            n_characters = max(n_bytes_of(request), sum(len(message.text) for message in body.messages))
        else:
            n_characters = sum(map(len, prompts_of(body.prompt)))  # a token id counts as one
        if n_characters > _LONG_CHARACTERS:
            return self._long
        return self._conversations if isinstance(body, ChatRequest) else self._texts


async def while_there(request: Request, work: Awaitable[Made], cancel: CancelToken | None = None) -> Made:
    """Return the result of `work`, or cancel it and raise ClientLeft if the client closes its connection
    first. `cancel` is ended then, and also if the wait is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            if cancel is not None:
                cancel.end()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""From a checked body to messages for the engine, on threads that clients share by turns.

Lanes, so that what takes long holds up nothing but its like: texts, conversations (which a template of the
model's writes out), long prompts of both kinds, and grammars that have to be compiled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request

from phasewise.serving.engine.messages import Submit
from phasewise.serving.errors import ServingError
from phasewise.serving.grammar.guides import GuideCompiler, MatcherGuide
from phasewise.serving.http.errors import ClientLeft, from_engine
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.monitoring.access_log import note_ignored
from phasewise.serving.http.requests.body import n_bytes_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.fair_lane import FairLane
from phasewise.serving.http.requests.lengths import estimated
from phasewise.serving.http.requests.request_to_messages import (
    RequestOrigin,
    RequiredGrammar,
    compiled,
    delay_guide,
    held_to,
    n_characters,
    tell_unheld,
)
from phasewise.serving.http.requests.schemas import GenerationRequest
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.sandbox.confined import Abandoned, CancelToken

Body = TypeVar("Body", bound=GenerationRequest)
Made = TypeVar("Made")

_LONG_CHARACTERS = 128 * 1024
_N_ORDINARY = 2
_MOST_ORDINARY = 256
_MOST_LONG = 16
_MOST_GRAMMARS = 16


class Preparation:
    """Prepares the requests of one server; on one event loop."""

    def __init__(self) -> None:
        self._texts = FairLane("prompt", _N_ORDINARY, _MOST_ORDINARY)
        self._conversations = FairLane("conversation", _N_ORDINARY, _MOST_ORDINARY)
        self._long = FairLane("long prompt", 1, _MOST_LONG)
        self._grammars = FairLane("grammar", 1, _MOST_GRAMMARS)

    async def prepare(
        self,
        request: Request,
        body: Body,
        make: Callable[[Body, ServedModel, RequestOrigin], Sequence[Submit]],
        model: ServedModel,
    ) -> Sequence[Submit]:
        """Messages to `model` that `make` makes of `body`. ApiError, or ClientLeft."""
        client, cancel = client_of(request.scope), CancelToken()
        sender = RequestOrigin(client.cache_space, client.name, client.in_shadow, cancel)

        def work() -> tuple[Sequence[Submit], RequiredGrammar | None]:
            return estimated(make(body, model, sender), model), held_to(body, model)

        lane = self._lane_of(request, body)
        try:
            requests, wanted = await while_there(request, lane.run(client.name, work), cancel)
            guide: MatcherGuide | None = None
            if wanted is not None:
                wanted, guide = await self._guide(request, wanted, client.name, model.guides, cancel)
            tell_unheld(body, wanted, guide, model)
            note_ignored(request.scope, body.ignored())
            if wanted is not None and guide is not None:
                begun = delay_guide(guide, wanted, body, requests[0].prompt_token_ids, model)
                requests = [replace(submit, guide=begun) for submit in requests]
        except Abandoned as error:
            raise ClientLeft from error
        except ServingError as error:
            raise from_engine(error) from error
        return requests

    async def tokenize(
        self, request: Request, make: Callable[[CancelToken], Made], *, is_text: bool = False
    ) -> Made:
        """The result of `make`, which writes out a conversation or a text as tokens, in the lanes of prompts.
        ApiError, or ClientLeft."""
        lane = self._texts if is_text else self._conversations
        lane = self._long if n_bytes_of(request) > _LONG_CHARACTERS else lane
        cancel = CancelToken()
        work = lane.run(client_of(request.scope).name, lambda: make(cancel))
        try:
            return await while_there(request, work, cancel)
        except Abandoned as error:
            raise ClientLeft from error
        except ServingError as error:
            raise from_engine(error) from error

    def _lane_of(self, request: Request, body: GenerationRequest) -> FairLane:
        """A chat is as long as its body: templates get fields that this server does not know."""
        if isinstance(body, ChatRequest) and n_bytes_of(request) > _LONG_CHARACTERS:
            return self._long
        if n_characters(body) > _LONG_CHARACTERS:
            return self._long
        return self._conversations if isinstance(body, ChatRequest) else self._texts

    async def _guide(
        self,
        request: Request,
        wanted: RequiredGrammar,
        client: str,
        guides: GuideCompiler | None,
        cancel: CancelToken,
    ) -> tuple[RequiredGrammar, MatcherGuide | None]:
        assert guides is not None, "held_to refuses"
        guide = guides.known(wanted.grammar)
        if guide is not None:
            return wanted, guide
        work = self._grammars.run(client, lambda: compiled(wanted, guides, cancel))
        return await while_there(request, work, cancel)


async def while_there(request: Request, work: Awaitable[Made], cancel: CancelToken | None = None) -> Made:
    """Return the result of `work`; where the client closes its connection before, ClientLeft. `cancel` ends
    then, and where the wait is cancelled."""
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

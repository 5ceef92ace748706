"""Answers that run again, and those that do not: what is left of a first run is no part of a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message as AsgiMessage

from phasewise.serving.engine.messages import Abort, Answer, Delivery, EngineLoad, Failure, Message, Submit
from phasewise.serving.errors import QueueFull, RankLost, Stopping
from phasewise.serving.http.answers.client import EngineClient
from phasewise.serving.http.answers.openai_objects import Choice, CompletionWriter, Reply
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.http.routes.generation_service import respond
from tests.support.servers.rude_clients import until_on_loop

LOAD = EngineLoad(0, 0, 0, 64)


async def _stays() -> AsgiMessage:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def request_of_one_that_stays() -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, _stays)


class TextWriter(CompletionWriter):
    """Its body is the texts of its choices, with a `|` between two."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return "|".join(choice.text for choice in choices).encode()


async def answered_by(client: EngineClient, n_choices: int) -> Response:
    requests = [Submit(f"c-0-{index}", (1,), 4) for index in range(n_choices)]
    model = ServedModel(("m",), 0, 500, 500, frozenset(), lambda _text, _special: [], lambda _: b"", None)
    reply = Reply(requests, model, n_choices)
    writer = TextWriter(reply, CompletionRequest(model="m", prompt="a"))
    return await respond(client, reply, writer, request_of_one_that_stays())


def test_pieces_of_the_first_run_are_no_part_of_the_second() -> None:
    """One of two choices is lost. A piece of the other is on its way while both are sent anew."""
    sent: list[Message] = []

    def submitted() -> list[str]:
        return [message.request_id for message in sent if isinstance(message, Submit)]

    def deliver(client: EngineClient, *outs: Answer | Failure) -> None:
        client.deliver(Delivery(outs, None, LOAD))

    async def answered() -> bytes:
        client = EngineClient(sent.append, HttpLimits())
        client.attach(asyncio.get_running_loop())
        try:
            answering = asyncio.ensure_future(answered_by(client, 2))
            await until_on_loop(lambda: len(submitted()) == 2)
            deliver(client, Answer("c-0-1", "old", (), 1, 0))
            deliver(client, Failure("c-0-0", RankLost("an instance was lost")))
            await until_on_loop(lambda: len(submitted()) == 4)
            assert Abort("c-0-1") in sent
            deliver(client, Answer("c-0-1", "late", (), 2, 0))
            for name in submitted()[2:]:
                deliver(client, Answer(name, "new", (), 1, 0, "length"))
            return bytes((await answering).body)
        finally:
            client.close()

    assert asyncio.run(answered()) == b"new|new"


def test_nothing_is_sent_once_all_were_told_that_the_server_stops() -> None:
    """Nobody would tell it a second time."""
    sent: list[Message] = []

    async def asks() -> None:
        client = EngineClient(sent.append, HttpLimits())
        client.attach(asyncio.get_running_loop())
        try:
            answering = asyncio.ensure_future(answered_by(client, 1))
            client.end_everything()  # before its task has begun
            with pytest.raises(Stopping):
                await answering
            assert (client.n_answers, client.n_live) == (0, 0)
        finally:
            client.close()

    asyncio.run(asks())
    assert sent == []


def test_a_model_that_makes_way_answers_no_line_of_a_batch() -> None:
    """Nor one that held the model before, and whose prompt was read meanwhile."""
    sent: list[Message] = []
    client = EngineClient(sent.append, HttpLimits())
    line = Submit("a-1", (1,), model="a", in_shadow=True)
    others = [replace(line, request_id="b-1", model="b"), replace(line, request_id="a-2", in_shadow=False)]
    again = replace(line, request_id="a-3")
    client.open([line])

    client.admit_shadows("a", False)
    with pytest.raises(QueueFull, match="makes room"):
        client.open([again])
    for other in others:
        client.open([other])
    client.admit_shadows("a", True)
    client.open([again])

    assert sent == [line, Abort("a-1"), *others, again]

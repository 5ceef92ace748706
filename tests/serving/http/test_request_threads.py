"""Waiting for work while a client is there: the work is told where nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fastapi import Request
from starlette.types import Message

from phasewise.serving.http.errors import ClientLeft
from phasewise.serving.http.requests.fair_lane import FairLane
from phasewise.serving.http.requests.request_threads import while_there
from phasewise.serving.sandbox.confined import CancelToken
from tests.support.servers.rude_clients import ENOUGH_S


@pytest.mark.parametrize("how", ["the client leaves", "the wait is cancelled"])
def test_work_that_nobody_waits_for_is_told_to_end(how: str) -> None:
    """A batch that is cancelled cancels its requests: their grammars need not be compiled."""
    cancel, begun = CancelToken(), threading.Event()

    async def scene() -> None:
        left, lane = asyncio.Event(), FairLane("work", 1, 10)
        loop = asyncio.get_running_loop()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        def work() -> None:
            begun.set()
            ended.wait(ENOUGH_S)

        ended = threading.Event()
        waiting = asyncio.ensure_future(
            while_there(Request({"type": "http"}, receive), lane.run("a", work), cancel)
        )
        assert await loop.run_in_executor(None, begun.wait, ENOUGH_S)
        if how == "the client leaves":
            left.set()
        else:
            waiting.cancel()
        with pytest.raises(ClientLeft if how == "the client leaves" else asyncio.CancelledError):
            await waiting
        assert cancel.ended
        ended.set()
        lane.close()

    asyncio.run(scene())

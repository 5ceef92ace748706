"""Requests answered by the real engine at the instants at which they came: the check of a rehearsal."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phasewise.cluster.simulated.simulated_requests import Arrival, Life
from phasewise.serving.engine.messages import Failure, Submit
from phasewise.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import OpenEngine


def replayed(
    opened: OpenEngine,
    arrivals: Sequence[Arrival],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Life]:
    """The life of each request. Prompts are of random tokens, answers as long as they were.

    No HTTP and no other process has a part in it. WorkflowError where one of them fails.
    """
    rng, engine = random.Random(0), opened.engine
    requests = [_request(arrival, rng, engine.vocabulary.size) for arrival in arrivals]
    lives = {request.request_id: Life(arrival) for request, arrival in zip(requests, arrivals, strict=True)}
    waiting = list(zip(requests, arrivals, strict=True))[::-1]
    start_s = clock()
    while waiting or engine.has_work:
        while waiting and waiting[-1][1].at_s <= clock() - start_s:
            engine.submit(waiting.pop()[0])
        if not engine.has_work:
            sleep(max(0.0, waiting[-1][1].at_s - (clock() - start_s)))
            continue
        outs = engine.step().outs
        now_s = clock() - start_s
        for out in outs:
            if isinstance(out, Failure):
                raise WorkflowError(f"request {out.request_id} of the rehearsal failed: {out.error}")
            life = lives[out.request_id]
            if life.first_token_s != life.first_token_s:  # not a number yet
                life.first_token_s = now_s
            if out.finish_reason is not None:
                life.end_s = now_s
    return list(lives.values())


def _request(arrival: Arrival, rng: random.Random, vocabulary: int) -> Submit:
    prompt = tuple(rng.randrange(vocabulary) for _ in range(arrival.prompt_tokens))
    return Submit(f"{arrival.request_id}", prompt, arrival.output_tokens, ignore_eos=True)

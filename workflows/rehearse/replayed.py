"""Requests answered by real engines at the instants at which they came: the check of a rehearsal."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from phasewise.cluster.simulated.simulated_requests import Arrival, Life
from phasewise.serving.engine.messages import Answer, Delivery, Failure, Submit
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.engine.engine_host import OpenHost

LOOK_EVERY_S, LOOK_AT_START_S = 1.0, 0.02


class ReplayedAnswers(NamedTuple):
    """The life of each request, and the tokens of its answer."""

    lives: list[Life]
    answers: list[tuple[int, ...]]


def replayed(open_host: OpenHost, n_vocabulary: int, arrivals: Sequence[Arrival]) -> ReplayedAnswers:
    """Prompts are of random tokens, the same each time; answers are as long as they were.

    No HTTP has a part in it. WorkflowError where a request fails, or what answers is lost.
    """
    rng = random.Random(0)
    requests = [_request(index, arrival, rng, n_vocabulary) for index, arrival in enumerate(arrivals)]
    run = _Run(arrivals)
    host = open_host(run.deliver, run.has_ended.set)
    host.start()
    try:
        while host.state == "starting" and host.is_alive:
            time.sleep(LOOK_AT_START_S)
        start_s = time.monotonic()
        for request, arrival in zip(requests, arrivals, strict=True):
            time.sleep(max(0.0, arrival.at_s - (time.monotonic() - start_s)))
            host.send(request)
        while not run.has_ended.wait(LOOK_EVERY_S):
            if not host.is_alive:
                break
        if run.failure is None and (not host.is_alive or run.n_open):
            raise WorkflowError(f"what answered the rehearsal ended: {host.lost}")
    finally:
        host.stop()
    if run.failure is not None:
        failure = run.failure
        raise WorkflowError(f"request {failure.request_id} of the rehearsal failed: {failure.error}")
    return run.answered(start_s)


class _Run:
    """Deliveries of the host's thread, with their instants."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.has_ended = threading.Event()
        self.failure: Failure | None = None
        self.n_open = len(arrivals)
        self._lives = [Life(arrival) for arrival in arrivals]
        self._answers: list[list[int]] = [[] for _ in arrivals]

    def deliver(self, delivery: Delivery) -> None:
        now_s = time.monotonic()
        for out in delivery.outs:
            if isinstance(out, Failure):
                self.failure = self.failure or out
                self.has_ended.set()
            else:
                self._take(out, now_s)

    def _take(self, out: Answer, now_s: float) -> None:
        index = int(out.request_id)
        life = self._lives[index]
        self._answers[index].extend(token.token_id for token in out.tokens)
        if life.first_token_s != life.first_token_s:  # not a number yet
            life.first_token_s = now_s
        if out.finish_reason is not None:
            life.end_s = now_s
            self.n_open -= 1
            if not self.n_open:
                self.has_ended.set()

    def answered(self, start_s: float) -> ReplayedAnswers:
        for life in self._lives:
            life.first_token_s -= start_s
            life.end_s -= start_s
        return ReplayedAnswers(self._lives, [tuple(answer) for answer in self._answers])


def _request(index: int, arrival: Arrival, rng: random.Random, n_vocabulary: int) -> Submit:
    prompt = tuple(rng.randrange(n_vocabulary) for _ in range(arrival.prompt_tokens))
    return Submit(f"{index}", prompt, arrival.output_tokens, GREEDY, ignore_eos=True)

"""One machine on simulated time, kept busy: each client sends its next request once the last has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.cluster.simulated.simulate import ProductionMachine, Timeline
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.serving.batch import Batch
from phasewise.serving.scheduling.held_prefixes import HeldReport
from phasewise.serving.scheduling.request import Request, SchedulerLimits

Lengths = Iterator[tuple[int, int]]
"""Tokens of prompt and answer, request by request."""


@dataclass
class Sent:
    """A request on its way."""

    request: Request
    at_s: float
    prompt_before: int
    """Tokens of prompts that were not computed when it came, with its own."""
    answers_before: int
    """Tokens that the answers before it had yet to get."""
    first_s: float = math.nan
    end_s: float = math.nan
    n_generated: int = 0
    is_computed: bool = False


class Timed(ProductionMachine):
    """Keeps what each phase has computed, and in what time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.n_tokens = {"prefill": 0, "decode": 0}
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.longest_s = 0.0

    def _end(self, batch: Batch, cost_s: float) -> None:
        self.n_tokens[batch.phase] += batch.n_tokens
        self.seconds[batch.phase] += cost_s
        self.longest_s = max(self.longest_s, cost_s)
        super()._end(batch, cost_s)

    def seconds_of(self, phase: str, n_tokens: int) -> float:
        """At the rate that was measured."""
        return n_tokens * self.seconds[phase] / max(1, self.n_tokens[phase])


class ClosedLoop:
    """`n_clients` requests are in progress at every instant, until `n_requests` have been sent.

    The `Listener` of its machine. Requests are of one API key: first come, first served. at_s: when they are
    sent instead, whoever has ended.
    """

    def __init__(
        self,
        steps: StepTimes,
        n_clients: int,
        n_requests: int,
        lengths: Lengths,
        *,
        tpot_ms: float = 100.0,
        at_s: Sequence[float] | None = None,
        prepare: Callable[[ProductionMachine], None] = lambda _machine: None,
    ) -> None:
        self._lengths = lengths
        self._n_left = n_requests
        self._places = 32
        self.timeline = Timeline()
        self.sent: dict[str, Sent] = {}
        self._going: dict[str, Sent] = {}
        self._made_s: list[float] = []  # of each token of an answer, in order
        limits = SchedulerLimits(4096, max_sequences=self._places, prefix_reuse=False)
        self.machine = Timed(0, steps, limits, 200_000, tpot_ms, self.timeline, self)
        prepare(self.machine)
        self._is_closed = at_s is None
        for when_s in (
            [0.001 * number for number in range(min(n_clients, n_requests))] if at_s is None else at_s
        ):
            self.timeline.at(when_s, self._send)
        self.timeline.run()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers, over the middle of the run: clients come and go together at its ends."""
        made_s = self._made_s
        low, high = made_s[len(made_s) // 4], made_s[-len(made_s) // 4]
        return sum(low < at_s <= high for at_s in made_s) / (high - low)

    @property
    def ttfts_s(self) -> list[float]:
        return [sent.first_s - sent.at_s for sent in self.sent.values()]

    @property
    def most_by_work(self) -> float:
        """The longest wait for a first token, by the work that lay before it at the rates of this run. The
        step that was under way and its own last one, which are no shorter than they are, do not count."""
        steps_s = 2 * self.machine.longest_s
        return max(
            (sent.first_s - sent.at_s - steps_s)
            / (
                self.machine.seconds_of("prefill", sent.prompt_before)
                + self.machine.seconds_of("decode", sent.answers_before)
            )
            for sent in self.sent.values()
        )

    def prompt_step_begins(self, request_id: str) -> None: ...

    def prompt_computed(self, request_id: str) -> None:
        self._going[request_id].is_computed = True

    def block_granted(self, request_id: str) -> None: ...

    def told(self, index: int, token_s: float, report: HeldReport | None) -> None: ...

    def token_made(self, request_id: str, n_generated: int, *, is_last: bool) -> None:
        sent = self._going[request_id]
        sent.n_generated = n_generated
        self._made_s.append(self.timeline.now_s)
        if n_generated == 1:
            sent.first_s = self.timeline.now_s
        if is_last:
            sent.end_s = self.timeline.now_s
            del self._going[request_id]
            if self._is_closed:
                self.timeline.at(self.timeline.now_s, self._send)

    def _send(self) -> None:
        if self._n_left == 0:
            return
        self._n_left -= 1
        n_prompt, n_answer = next(self._lengths)
        name = str(len(self.sent))
        request = Request(name, range(n_prompt), n_answer)  # type: ignore[arg-type]
        going = self._going.values()
        prompts = sum(len(sent.request.prompt_token_ids) for sent in going if not sent.is_computed)
        answers = sum(sent.request.max_tokens - sent.n_generated for sent in going)
        sent = Sent(request, self.timeline.now_s, prompts + n_prompt, answers)
        self.sent[name] = self._going[name] = sent
        self.machine.submit(request)

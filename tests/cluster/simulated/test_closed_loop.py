"""More clients never get less, whatever steps take: the scheduler and its pacing on simulated time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.simulated.simulate import ProductionMachine, Timeline
from phasewise.cluster.simulated.steps import Curve, StepTimes
from phasewise.serving.batch import Batch
from phasewise.serving.scheduling.held_prefixes import HeldReport
from phasewise.serving.scheduling.request import Request, SchedulerLimits
from tests.support.tiers import examples

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


CLIENTS = (2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CLIFF = [0.0185, 0.0149, 0.0173, 0.070, 0.0734, 0.077, 0.0812, 0.110, 0.1397]
"""Of a 1.07 B file in Q4_K_M on two cores: six rows take four times what four take."""


def steps_of(decode_s: list[float], fixed_s: float, token_s: float) -> StepTimes:
    prefill = Curve([(0, fixed_s), (512, fixed_s + 512 * token_s)])
    return StepTimes(
        prefill, Curve([(0, 0.0), (1, 0.0)]), Curve(list(zip(map(float, ROWS), decode_s, strict=True)))
    )


def loops(steps: StepTimes, lengths: tuple[int, int], tpot_ms: float = 100.0) -> list[ClosedLoop]:
    return [ClosedLoop(steps, n, max(40, 6 * n), itertools.repeat(lengths), tpot_ms=tpot_ms) for n in CLIENTS]


def assert_more_clients_get_no_less(closed_loops: list[ClosedLoop], least: float) -> None:
    rates = [loop.tokens_per_s for loop in closed_loops]
    for index, rate in enumerate(rates[1:], 1):
        assert rate >= least * max(rates[:index]), dict(zip(CLIENTS, rates, strict=True))
    waits = {n: loop.most_by_work for n, loop in zip(CLIENTS, closed_loops, strict=True)}
    assert max(waits.values()) <= 1.3, waits


@pytest.mark.many
@pytest.mark.parametrize("lengths", [(128, 48), (512, 32), (64, 200)])
def test_a_cliff_between_four_rows_and_six_costs_no_client_anything(lengths: tuple[int, int]) -> None:
    closed_loops = loops(steps_of(CLIFF, 0.05, 0.0034), lengths)

    assert_more_clients_get_no_less(closed_loops, 0.95)


def test_where_the_promise_is_out_of_reach_throughput_is_that_of_a_looser_one() -> None:
    """A promise that cannot be kept costs nothing either: crumbs of prompts would."""
    steps = steps_of([1.4 * decode_s for decode_s in CLIFF], 0.06, 0.0034)
    strict, loose = (loops(steps, (128, 48), tpot_ms)[-2:] for tpot_ms in (100.0, 1000.0))

    for strict_loop, other in zip(strict, loose, strict=True):
        assert strict_loop.tokens_per_s >= 0.9 * other.tokens_per_s
        assert median(strict_loop.ttfts_s) <= 1.3 * median(other.ttfts_s)


@pytest.mark.slow
@examples(10)
@given(
    first_s=st.floats(0.005, 0.06),
    factors=st.lists(st.sampled_from([0.7, 1.0, 1.05, 1.3, 1.6, 2.0, 3.0, 4.0]), min_size=8, max_size=8),
    token_s=st.floats(0.0005, 0.005),
    lengths=st.sampled_from([(128, 48), (32, 128), (300, 30)]),
)
def test_more_clients_get_no_less_whatever_steps_take(
    first_s: float, factors: list[float], token_s: float, lengths: tuple[int, int]
) -> None:
    """Cliffs, plateaus, and steps that are faster with more rows. Trying others costs a little.

    A row takes at most four times as long in a step of many as alone.
    """
    drawn_s = itertools.accumulate(factors, lambda before, factor: before * factor, initial=first_s)
    decode_s = [min(step_s, 4 * rows * first_s) for step_s, rows in zip(drawn_s, ROWS, strict=True)]

    assert_more_clients_get_no_less(loops(steps_of(decode_s, 0.0, token_s), lengths), 0.85)

"""Steps of two pools, timed in the pools themselves: processes, sockets and hand-overs have their part.

The prompt pool always has a prompt to compute, and the token pool some answers. A step counts from the end of
the one before it to its own end, so that what an instance does between two steps is in it, and what the front
takes of their cores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count, cycle, islice
from queue import SimpleQueue
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from phasewise.cluster.simulated.recorded_steps import TimedStep
from phasewise.serving.engine.messages import Answer, Delivery, Failure, StepStats, Submit
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.rehearse.replayed import LOOK_AT_START_S
from phasewise.workflows.serve.pools import SPLIT_ABOVE_TOKENS

if TYPE_CHECKING:
    from phasewise.serving.engine.engine_host import EngineHost, OpenHost
    from phasewise.serving.engine.engine_size import EngineSize


class _Group(NamedTuple):
    """Answers to prompts so short that the token pool computes them too; they begin together."""

    sequences: int
    n_prompt: int


GROUPS = (
    *(_Group(1, 32), _Group(12, 64), _Group(4, 16), _Group(24, 40), _Group(2, 64), _Group(8, 16)),
    *(_Group(16, 40), _Group(32, 40), _Group(1, 64), _Group(6, 64)),
)
"""Groups that are timed, those that tell most first."""

N_ANSWER = 32
LEAST_GROUPS = 3
REPEATS = 5
LONG_PROMPTS = (160, 512, 96, 256, 1200)
"""Prompts of the prompt pool, one after another."""

AHEAD = 2
"""Prompts that it is given at once: one is computed, and the next waits."""


class TimedPools(NamedTuple):
    """Steps of either pool, both being equal halves, and the time of a hand-over."""

    steps: Sequence[TimedStep]
    hand_over_s: float


def timed_pools(
    open_host: OpenHost, size: EngineSize, n_vocabulary: int, is_over: Callable[[], bool] = lambda: False
) -> TimedPools:
    """size: of an instance. is_over: asked before each group of answers after the first few.

    WorkflowError where a request fails, or an instance is lost.
    """
    context, slots = size.limits.context_length, size.kv.slots
    longest = [n for n in LONG_PROMPTS if SPLIT_ABOVE_TOKENS < n < context]
    groups = [
        group
        for group in GROUPS
        if group.sequences <= size.limits.max_sequences
        and group.sequences * (group.n_prompt + N_ANSWER) <= slots // 2
        and group.n_prompt + N_ANSWER <= context
    ]
    if not longest or not groups:
        raise WorkflowError(f"a context of {context} tokens, and room for {slots}, are too little for pools")
    seen: SimpleQueue[_Seen | None] = SimpleQueue()
    host = open_host(
        lambda delivery: seen.put(_Seen(time.perf_counter_ns(), delivery)), lambda: seen.put(None)
    )
    host.start()
    try:
        while host.state == "starting" and host.is_alive:
            time.sleep(LOOK_AT_START_S)
        timing = _Timing(host, seen, n_vocabulary, longest)
        for n_done, group in enumerate(REPEATS * groups):
            if n_done >= min(LEAST_GROUPS, len(groups)) and is_over():
                break
            for _ in range(REPEATS):
                if timing.answer(group):
                    break
        return timing.timed()
    finally:
        host.stop()


class _Seen(NamedTuple):
    """A delivery, and when the front had it."""

    at_ns: int
    delivery: Delivery


class _Timing:
    """Requests in both pools, and what their deliveries tell of steps."""

    def __init__(
        self,
        host: EngineHost,
        seen: SimpleQueue[_Seen | None],
        n_vocabulary: int,
        longest: Sequence[int],
    ) -> None:
        self._host = host
        self._seen = seen
        self._n_vocabulary = n_vocabulary
        self._rng = random.Random(0)
        self._names = count()
        self._lengths = cycle(longest)
        self._long: dict[str, int] = {}
        """Tokens of the prompts in the prompt pool that are not answered yet, by name."""
        self._open: set[str] = set()
        """Answers of the group that have not ended."""
        self._steps: list[TimedStep] = []
        self._computed_ns: dict[str, int] = {}
        self._first_ns: dict[str, int] = {}
        self._prompt_ended_ns: int | None = None
        self._step_ended_ns: int | None = None
        self._n_decoded = 0

    def answer(self, group: _Group) -> bool:
        """Until all of it is answered. False: its answers never ran all at once, so no step tells of it."""
        n_before = len(self._steps)
        self._step_ended_ns, self._n_decoded = None, 0
        self._open = {self._send(group.n_prompt, N_ANSWER) for _ in range(group.sequences)}
        while self._open:
            for n_tokens in islice(self._lengths, max(0, AHEAD - len(self._long))):
                self._long[self._send(n_tokens, 1)] = n_tokens
            seen = self._seen.get()
            if seen is None:
                raise WorkflowError(f"the pools that were timed ended: {self._host.lost}")
            self._take(seen, group)
        return any(
            step.phase == "decode" and step.sequences == group.sequences for step in self._steps[n_before:]
        )

    def timed(self) -> TimedPools:
        """All that was seen. WorkflowError: no prompt went from pool to pool."""
        both = self._computed_ns.keys() & self._first_ns.keys()
        if not both:
            raise WorkflowError("no prompt was handed over in the time that there was")
        beyond = [max(0, self._first_ns[name] - self._computed_ns[name]) for name in sorted(both)]
        return TimedPools(self._steps, median(beyond) / 1e9)

    def _send(self, n_tokens: int, n_answer: int) -> str:
        name = str(next(self._names))
        prompt = tuple(self._rng.randrange(self._n_vocabulary) for _ in range(n_tokens))
        self._host.send(Submit(name, prompt, n_answer, GREEDY, ignore_eos=True))
        return name

    def _take(self, seen: _Seen, group: _Group) -> None:
        stats, answers = seen.delivery.stats, list[Answer]()
        for out in seen.delivery.outs:
            if isinstance(out, Failure):
                raise WorkflowError(f"a request to pools that were timed failed: {out.error}")
            answers.append(out)
        if stats is not None and stats.phase == "prefill":
            self._prefill(seen, stats)
        own = [answer for answer in answers if answer.request_id in self._open]
        if own:
            self._decode(own, stats, group)
        for answer in answers:
            if answer.request_id in self._long:
                self._first_ns[answer.request_id] = seen.at_ns
                del self._long[answer.request_id]
            elif answer.finish_reason is not None:
                self._open.discard(answer.request_id)

    def _prefill(self, seen: _Seen, stats: StepStats) -> None:
        """A step of the prompt pool counts from the one before, for the next prompt was there; of the token
        pool, whose steps before were of other answers, by its own clock."""
        progress = seen.delivery.progress
        if not progress:  # the answer was heard of before the prompt was
            self._prompt_ended_ns = None
            return
        if not any(prompt.request_id in self._long for prompt in progress):
            self._steps.append(TimedStep("prefill", stats.n_tokens, 1, 0, stats.duration_ns / 1e9))
            return
        began_ns, self._prompt_ended_ns = self._prompt_ended_ns, seen.at_ns
        for prompt in progress:
            if prompt.n_computed == prompt.n_prompt:
                self._computed_ns[prompt.request_id] = seen.at_ns
        if began_ns is not None and stats.n_sequences == 1:
            n_before = progress[0].n_computed - stats.n_tokens
            seconds = (seen.at_ns - began_ns) / 1e9
            self._steps.append(TimedStep("prefill", stats.n_tokens, 1, n_before, seconds))

    def _decode(self, own: Sequence[Answer], stats: StepStats | None, group: _Group) -> None:
        """A step that follows one of all answers is counted; the first of them is that of their prompts."""
        began_ns, self._step_ended_ns = self._step_ended_ns, max(answer.at_ns for answer in own)
        if stats is None or stats.phase != "decode" or stats.n_sequences != group.sequences:
            self._n_decoded = 0
            return
        if began_ns is not None:
            seconds = (self._step_ended_ns - began_ns) / 1e9
            context = group.n_prompt + own[0].n_generated - 1
            self._steps.append(TimedStep("decode", 1, group.sequences, context, seconds, self._n_decoded))
        self._n_decoded += 1

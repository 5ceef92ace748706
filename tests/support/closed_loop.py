"""One machine on simulated time, kept busy: each client sends its next request once the last has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from phasewise.cluster.machines import EngineSettings, ProductionMachine
from phasewise.cluster.steps import StepTimes
from phasewise.cluster.timeline import Timeline
from phasewise.serving.request import Request

Lengths = Iterator[tuple[int, int]]
"""Tokens of prompt and answer, request by request."""


@dataclass
class Sent:
    """A request on its way."""

    request: Request
    at_s: float
    work_before_s: float
    """What the requests before it and its own prompt take, done one phase after the other."""
    first_s: float | None = None
    end_s: float | None = None
    n_generated: int = 0
    n_left: int = field(default=0)
    """Prompt tokens that are not computed yet."""


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
        self._steps = steps
        self._lengths = lengths
        self._n_left = n_requests
        self._places = 32
        self.timeline = Timeline()
        self.sent: dict[str, Sent] = {}
        self._going: dict[str, Sent] = {}
        settings = EngineSettings(200_000, 4096, max_sequences=self._places, tpot_ms=tpot_ms)
        self.machine = ProductionMachine(0, steps, settings, self.timeline, self)
        prepare(self.machine)
        self._is_closed = at_s is None
        for when_s in [0.001 * at for at in range(min(n_clients, n_requests))] if at_s is None else at_s:
            self.timeline.at(when_s, self._send)
        self.timeline.run()

    @property
    def tokens_per_s(self) -> float:
        """Of answers, over the middle of the run: clients come and go together at its ends."""
        ends = sorted(one.end_s or 0.0 for one in self.sent.values())
        low, high = ends[len(ends) // 4], ends[-len(ends) // 4]
        counted = [one for one in self.sent.values() if low < (one.end_s or 0.0) <= high]
        return sum(one.request.max_tokens for one in counted) / (high - low)

    @property
    def ttfts_s(self) -> list[float]:
        return [(one.first_s or 0.0) - one.at_s for one in self.sent.values()]

    @property
    def tpots_s(self) -> list[float]:
        return [
            ((one.end_s or 0.0) - (one.first_s or 0.0)) / (one.request.max_tokens - 1)
            for one in self.sent.values()
            if one.request.max_tokens > 1
        ]

    @property
    def most_by_work(self) -> float:
        """The longest wait for a first token, by the work that lay before it."""
        return max(((one.first_s or 0.0) - one.at_s) / one.work_before_s for one in self.sent.values())

    def prompt_step_begins(self, request_id: str) -> None: ...

    def prompt_computed(self, request_id: str) -> None:
        self._going[request_id].n_left = 0

    def block_granted(self, request_id: str) -> None: ...

    def token_made(self, request_id: str, n_generated: int, *, is_last: bool) -> None:
        one = self._going[request_id]
        one.n_generated = n_generated
        if n_generated == 1:
            one.first_s = self.timeline.now_s
        if is_last:
            one.end_s = self.timeline.now_s
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
        one = Sent(request, self.timeline.now_s, self._work_s(n_prompt), n_left=n_prompt)
        self.sent[name] = self._going[name] = one
        self.machine.submit(request)

    def _work_s(self, n_prompt: int) -> float:
        """Of all that is here, and a prompt: prompts in steps of 512, then answers, all places full."""
        n_tokens = sum(one.n_left for one in self._going.values()) + n_prompt
        whole, rest = divmod(n_tokens, 512)
        work_s = whole * self._steps.prefill_s(512) + (self._steps.prefill_s(rest) if rest else 0.0)
        left = sorted(one.request.max_tokens - one.n_generated for one in self._going.values())
        while left:
            batch, left = left[: self._places], left[self._places :]
            done = 0
            for at, n_left in enumerate(batch):
                work_s += (n_left - done) * self._decode_s(len(batch) - at)
                done = n_left
        return work_s

    def _decode_s(self, n_rows: int) -> float:
        return self._steps.decode_s(n_rows, 0)

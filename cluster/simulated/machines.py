"""A machine that runs the production scheduler, its KV pool and its pacing on simulated time.

Nothing here decides anything that the engine would decide: it does what `serving.engine.engine.Engine.step`
does
with stand-ins for tokens, and moves the clock by what the step-time model says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from phasewise.cluster.simulated.steps import PromptPart, StepTimes
from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import DEFAULT_POLICY, open_pool
from phasewise.serving.scheduling.held_prefixes import HeldPrefixes, HeldReport
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS, Pacing
from phasewise.serving.scheduling.request import Request, SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler

REFRESH_S = 0.5
"""Simulated seconds between two times that a pool learns."""

TOKEN = 0
"""The id that stands for every token of an answer."""


Action = Callable[[], None]


class Timeline:
    """A clock in seconds that only events move: equal instants run in the order they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, at_s: float, action: Action) -> None:
        """Run `action` at `at_s`, which must not lie in the past."""
        if at_s < self.now_s:
            raise ValueError(f"an event at {at_s} s would lie before now, {self.now_s} s")
        self._serial += 1
        heappush(self._heap, (at_s, self._serial, action))

    def run(self) -> None:
        """Run every event, and those that they schedule, to the last."""
        heap = self._heap
        while heap:
            self.now_s, _, action = heappop(heap)
            action()


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a machine's engine, as `phasewise serve` has them."""

    limits: SchedulerLimits
    kv_slots: int
    tpot_ms: float = DEFAULT_TPOT_MS
    tells_prefixes: bool = False


class Listener(Protocol):
    """Hears of events of a machine's requests, at the simulated instant at which they happen."""

    def prompt_step_begins(self, request_id: str) -> None:
        """A step begins that computes a part of the request's prompt, or of what a preemption undid."""

    def prompt_computed(self, request_id: str) -> None:
        """All of the request's prompt is computed."""

    def token_made(self, request_id: str, n_generated: int, *, is_last: bool) -> None: ...

    def block_granted(self, request_id: str) -> None:
        """A request that was expected has a block."""

    def told(self, index: int, token_s: float, report: HeldReport | None) -> None:
        """A machine tells its pace, and changes of the prefixes that it holds, as instances do."""


class ProductionMachine:
    """A machine with one engine. `submit`, `expect`, `arrived` and `acknowledge` come from outside."""

    def __init__(
        self,
        index: int,
        steps: StepTimes,
        settings: EngineSettings,
        timeline: Timeline,
        listener: Listener,
    ) -> None:
        """Make an idle machine. The prefixes that it holds are told where `settings.tells_prefixes`."""
        self.index = index
        self.busy_s = 0.0
        self.occupancy_s: dict[int, float] = defaultdict(float)
        """Seconds that steps took, by the tokens of the step."""
        self._steps = steps
        self._timeline = timeline
        self._listener = listener
        limits = settings.limits
        pool_settings = PoolSettings(longest_request=limits.context_length)
        pool = open_pool(DEFAULT_POLICY, settings.kv_slots, pool_settings)
        self.scheduler = Scheduler(pool, limits)
        self._held = HeldPrefixes(self.scheduler, "") if settings.tells_prefixes else None
        self._pacing = Pacing(round(settings.tpot_ms * 1e6), limits.max_batch_tokens)
        self._is_computing = False
        self._granted: set[str] = set()
        self._refreshed_s = 0.0
        self._since_prefill: int | None = None
        """Decode steps since the last prefill step; None: there was none."""

    def submit(self, request: Request) -> None:
        """Queue a request. RequestError if it can never run here."""
        self.scheduler.add(request)
        self._wake()

    def expect(self, request: Request) -> None:
        """Queue a request whose prompt is computed elsewhere. RequestError if it can never run here."""
        self.scheduler.expect(request)
        self._wake()

    def arrived(self, request_id: str) -> None:
        """Note that keys and values of an expected request are here: its first token is sampled."""
        self._granted.discard(request_id)
        out = self.scheduler.arrived(request_id, TOKEN)
        assert out is not None, f"{request_id} was aborted"
        self._listener.token_made(request_id, out.n_generated, is_last=out.finish_reason is not None)
        self._wake()

    def acknowledge(self, request_id: str) -> None:
        """Note that a request that was handed over has arrived elsewhere."""
        self.scheduler.acknowledge(request_id)
        self._wake()

    def _wake(self) -> None:
        if not self._is_computing:
            self._step()

    def _step(self) -> None:
        scheduler = self.scheduler
        paced = self._pacing.pace(scheduler.n_answering, is_all_shadow=scheduler.is_all_shadow)
        batch = scheduler.next_batch(*paced)
        if batch is None:
            self.scheduler.take_copies()
            self._tell_granted()
            return
        self._is_computing = True
        now_s = self._timeline.now_s
        if batch.phase == "prefill":
            for name in batch.request_ids:
                self._listener.prompt_step_begins(name)
        self._tell_granted()
        cost_s = self._cost_s(batch)
        self._timeline.at(now_s + cost_s, lambda: self._end(batch, cost_s))

    def _cost_s(self, batch: Batch) -> float:
        if batch.phase == "prefill":
            return self._steps.prompts_s(
                PromptPart(len(piece.token_ids), piece.start) for piece in batch.slices
            )
        context = sum(piece.start + 1 for piece in batch.slices)
        return self._steps.decode_s(len(batch.slices), context, self._since_prefill)

    def _end(self, batch: Batch, cost_s: float) -> None:
        self._is_computing = False
        self.busy_s += cost_s
        self.occupancy_s[batch.n_tokens] += cost_s
        runs = [[TOKEN] for piece in batch.slices if piece.wants_logits]
        outs = self.scheduler.commit_runs(batch, runs)
        self._pacing.observe(batch.phase, batch.n_tokens, round(cost_s * 1e9), batch.n_in_shadow)
        if batch.phase == "prefill":
            self._since_prefill = 0
        elif self._since_prefill is not None:
            self._since_prefill += 1
        self._tell()
        if batch.phase == "prefill":
            for name, piece in zip(batch.request_ids, batch.slices, strict=True):
                if piece.wants_logits:
                    self._listener.prompt_computed(name)
        for out in outs:
            self._listener.token_made(out.request_id, out.n_generated, is_last=out.finish_reason is not None)
        if self._timeline.now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._timeline.now_s
            self.scheduler.pool.refresh()
        self._wake()

    def _tell(self) -> None:
        report = None if self._held is None else self._held.report()
        self._listener.told(self.index, self._pacing.best_token_ns / 1e9, report)

    def _tell_granted(self) -> None:
        for request_id in [name for name in self.scheduler.expected if name not in self._granted]:
            self._granted.add(request_id)
            self._listener.block_granted(request_id)

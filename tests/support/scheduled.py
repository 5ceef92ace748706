"""A scheduler by itself: how to make one, and how to run it while it is held to its laws."""

from __future__ import annotations

from collections.abc import Callable

from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import POLICIES as _BY_NAME
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.scheduling.request import Request, SchedulerLimits, TokenOut
from phasewise.serving.scheduling.scheduler import Scheduler
from tests.support.restless_pool import RestlessPool

POLICIES = (*_BY_NAME, "restless")


def make(
    policy: str = "odma",
    *,
    n_slots: int = 1008,
    context: int = 500,
    tokens: int = 32,
    sequences: int = 4,
    max_waiting: int | None = None,
) -> Scheduler:
    return Scheduler(
        any_pool(policy, n_slots, context), SchedulerLimits(context, tokens, sequences, max_waiting)
    )


def any_pool(policy: str, n_slots: int, context: int) -> KvPool:
    if policy == "restless":
        return RestlessPool(n_slots)
    return open_pool(policy, n_slots, PoolSettings(longest_request=context))


def request(name: str, n_prompt: int = 5, max_tokens: int = 3, stop: int | None = None) -> Request:
    """A prompt that begins like no other."""
    stops = frozenset() if stop is None else frozenset({stop})
    first = 1000 * (1 + sum(name.encode()))
    return Request(name, tuple(range(first, first + n_prompt)), max_tokens, stops)


def turn(scheduler: Scheduler, token_id: int = 1) -> tuple[Batch | None, list[TokenOut]]:
    batch = scheduler.next_batch()
    outs = [] if batch is None else scheduler.commit(batch, [token_id] * batch.n_logits)
    scheduler.check()
    return batch, outs


class Turns:
    """Runs a scheduler, and checks after every step that each token of an answer came once, and in order."""

    def __init__(
        self, scheduler: Scheduler, choose: Callable[[str, int], int] = lambda _name, index: index
    ) -> None:
        self.scheduler = scheduler
        self.choose = choose
        self.got: dict[str, int] = {}
        self.ended: list[str] = []
        self.n_steps = 0

    def take(self, chunk_tokens: int | None = None) -> Batch | None:
        """One step. The answer's token at an index is what `choose` says."""
        batch = self.scheduler.next_batch(chunk_tokens)
        if batch is None:
            return None
        self.n_steps += 1
        wanting = [
            name for name, piece in zip(batch.request_ids, batch.slices, strict=True) if piece.wants_logits
        ]
        chosen = [self.choose(name, self.got.get(name, 0)) for name in wanting]
        for out in self.scheduler.commit(batch, chosen):
            assert out.n_generated == self.got.get(out.request_id, 0) + 1
            self.got[out.request_id] = out.n_generated
            if out.finish_reason is not None:
                self.ended.append(out.request_id)
        self.scheduler.check()
        return batch

    def run(self, most_steps: int = 20_000) -> None:
        """To the end of every request."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            assert self.take() is not None, "there is work, but nothing runs"
        raise AssertionError(f"still working after {most_steps} steps")

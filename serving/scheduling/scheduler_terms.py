"""Inputs and outputs of the scheduler. No policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import KvPool
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.waiting_line import WaitingLine

MOST_PREEMPTIONS = 3
"""After this many preemptions a request is preempted for the oldest one only, and only once more."""

DEFAULT_BATCH_TOKENS = 2048
"""Splitwise's knee: more tokens per prefill batch no longer raise throughput."""
DEFAULT_SEQUENCES = 32
"""Answers computed at the same time."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`context_length`: positions the model has. `max_waiting`: the queue's end; None for an endless one."""

    context_length: int
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    max_waiting: int | None = None
    prefix_reuse: bool = True


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the start. They never fall."""

    preemptions: int = 0
    prefix_hits: int = 0
    prefix_tokens_reused: int = 0
    phase_switches: int = 0


class Flight(NamedTuple):
    """A batch that is being computed."""

    batch: Batch
    sequences: tuple[LiveSequence, ...]
    """Sequences of the batch's slices, in order."""
    moved: frozenset[str]
    """Requests, also of other batches, whose keys and values it copies."""


class DraftRoom(NamedTuple):
    """A sequence of a decode batch, and the most drafts that its slice may carry."""

    sequence: LiveSequence
    most: int


class SchedulerError(AssertionError):
    """The scheduler was misused or broke its own law: a bug, never a user's mistake."""


def check_laws(
    pool: KvPool, running: Sequence[LiveSequence], lines: Sequence[WaitingLine], live: Collection[str]
) -> None:
    """SchedulerError, with the numbers, where the pool's law is broken, others than running requests own
    slots, or a request is in two places or in none."""
    pool.check()
    placements = {sequence.request_id: sequence.placement for sequence in running}
    owned = pool.placements()
    if owned != placements:
        raise SchedulerError(f"the pool says {owned}, running requests say {placements}")
    ages = [sequence.age for sequence in running]
    if ages != sorted(ages):
        raise SchedulerError(f"running requests of ages {ages} are not in order")
    for line in lines:
        if len(line) != len(list(line)):
            raise SchedulerError(f"{counted(len(line), 'request')} wait, but {list(line)} do")
    waiting = [sequence for line in lines for sequence in line]
    names = sorted(sequence.request_id for sequence in (*running, *waiting))
    if names != sorted(live):
        raise SchedulerError(f"{sorted(live)} live, {names} run or wait")
    for sequence in running:
        _check_running(sequence, pool.n_slots)


def _check_running(sequence: LiveSequence, pool_slots: int) -> None:
    name, placement = sequence.request_id, sequence.placement
    assert placement is not None
    for counts in (
        (0, sequence.n_computed, sequence.n_tokens, sequence.request.most_tokens),
        (0, sequence.n_computed, placement.n_slots, pool_slots),
        (0, sequence.n_preempted, MOST_PREEMPTIONS + 1),
    ):
        if list(counts) != sorted(counts):
            raise SchedulerError(f"{name}: {counts} of {sequence} do not ascend")
    if (sequence.awaits_kv or sequence.is_restored) and not (sequence.is_pinned and sequence.n_computed == 0):
        raise SchedulerError(f"{sequence} waits for keys and values in a block that is not kept for them")

"""Invariants of the scheduler between two steps, whatever came and went."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phasewise._words import counted
from phasewise.serving.pools.contract import KvPool
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.scheduler_terms import MOST_PREEMPTIONS, SchedulerError
from phasewise.serving.scheduling.waiting_line import WaitingLine


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

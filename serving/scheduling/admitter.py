"""Admission of requests: the next to come in, and those that give way for it (decisions 0039, 0072, 0098)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from phasewise.serving.pools.contract import Grant, KvPool
from phasewise.serving.scheduling.admission import demand_of, held_in_vain, is_held, next_to_admit
from phasewise.serving.scheduling.client_shares import ClientShares
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.scheduler_terms import SchedulerLimits
from phasewise.serving.scheduling.step_choice import running_of
from phasewise.serving.scheduling.waiting_line import WaitingLine

Place: TypeAlias = Callable[[LiveSequence, Grant], None]
Preempt: TypeAlias = Callable[[LiveSequence], None]


class Admitter:
    """One scheduler's admission. running: its requests, by age, which it changes. lines: of those that wait,
    interactive ones first.
    """

    def __init__(
        self,
        pool: KvPool,
        limits: SchedulerLimits,
        running: Sequence[LiveSequence],
        lines: tuple[WaitingLine, WaitingLine],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._running = running
        self._waiting, self._shadow_waiting = lines

    def admit(self, place: Place, preempt: Preempt) -> None:
        """Let in requests while there is room. place: gives a block; preempt: takes it back."""
        while len(self._waiting):
            shares = self.shares(in_shadow=False)
            running = self._own(in_shadow=False)
            sequence, is_due = next_to_admit(self._waiting, running, shares)
            if sequence is None:
                return
            while not self._has_place(self._own(in_shadow=False)):
                if not (is_due and self._gives_way(shares, preempt, shares.giver_of_place())):
                    return
            demand = demand_of(sequence)
            takes_slots = shares.has_nothing(sequence.request.client) and demand.held_tokens <= shares.slots
            while (grant := self._pool.reserve(sequence.request_id, demand)) is None:
                if self.shadow_gives_way(preempt):
                    continue
                giver = shares.giver_of_slots() if takes_slots else None
                if giver is None and not sequence.request.prefill_only:
                    giver = held_in_vain(self._own(in_shadow=False))
                if not self._gives_way(shares, preempt, giver):
                    return
            place(sequence, grant)
        self._admit_in_shadow(place)

    def _admit_in_shadow(self, place: Place) -> None:
        """Into the room that is left; clients of which nothing runs come first."""
        while len(self._shadow_waiting):
            running = self._own(in_shadow=True)
            sequence, _ = next_to_admit(self._shadow_waiting, running, self.shares(in_shadow=True))
            if sequence is None or not self._has_place(running):
                return
            grant = self._pool.reserve(sequence.request_id, demand_of(sequence))
            if grant is None:
                return
            place(sequence, grant)

    def shadow_gives_way(self, preempt: Preempt) -> bool:
        """Preempt the youngest request in shadow for one that is not. False: there is none."""
        for sequence in reversed(self._own(in_shadow=True)):
            if not sequence.is_pinned:
                preempt(sequence)
                return True
        return False

    def _own(self, *, in_shadow: bool) -> list[LiveSequence]:
        return running_of(self._running, in_shadow=in_shadow)

    def line_of(self, sequence: LiveSequence) -> WaitingLine:
        """The line in which it waits."""
        return self._shadow_waiting if sequence.request.in_shadow else self._waiting

    def _has_place(self, running: Sequence[LiveSequence]) -> bool:
        """A prompt that waits for its hand-over holds none: others may wait for one that waits.

        running: all of its kind. Shadows have places of their own, so that whoever comes takes rows of steps
        from them, and what they have computed only for want of slots.
        """
        return len(running) - sum(map(is_held, running)) < self._limits.max_sequences

    def shares(self, *, in_shadow: bool) -> ClientShares:
        """Equal parts of places and slots for the clients that run or wait."""
        waiting = (self._shadow_waiting if in_shadow else self._waiting).clients
        running = self._own(in_shadow=in_shadow)
        return ClientShares(self._limits.max_sequences, self._pool.n_slots, running, waiting)

    def _gives_way(self, shares: ClientShares, preempt: Preempt, giver: LiveSequence | None) -> bool:
        """Preempted for another client's share, which is not counted against it. False: there is none."""
        if giver is None:
            return False
        shares.gave_way(giver)
        preempt(giver)
        return True

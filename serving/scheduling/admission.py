"""Choices of admission, preemption and step members: the next request to admit, the one to preempt, the
sequences to compute. `scheduler` carries the choices out, and its docstring has the policy. A step serves
interactive requests first; requests in shadow (those of batches) get the room that `ShadowRoom` leaves, and
all of the step where nothing else can be computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.errors import RequestError, check_context
from phasewise.serving.pools.contract import Demand, Grant
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.scheduling.pacing import ShadowRoom
from phasewise.serving.scheduling.request import (
    MOST_PREEMPTIONS,
    LiveSequence,
    Request,
    SchedulerError,
    SchedulerLimits,
)
from phasewise.serving.scheduling.sequence_states import SequenceStates
from phasewise.serving.scheduling.waiting_line import ClientShares, WaitingLine
from phasewise.tuner.plans import Phase

LEAST_TOKENS = 16
"""Prompt tokens that a client's share of a step has at least: one panel of keys and values."""
FEW_TOKENS = 64
"""Prompt tokens per client in a step where another client's prompts end: enough to use the weights well."""


class PrefillTurns:
    """Round-robin order of the clients that have prompts to compute."""

    def __init__(self) -> None:
        self._order: list[str] = []

    def divide(
        self, sequences: Iterable[LiveSequence], room: int, starts: Callable[[LiveSequence], bool]
    ) -> dict[LiveSequence, int]:
        """Divide the `room` prompt tokens of the next prefill step among the sequences; those that get none
        are left out. `sequences`: sequences with pending prompt tokens, by age. `starts`: called with a
        sequence before its first tokens are computed; False: the sequence cannot start in this step."""
        queues: dict[str, list[LiveSequence]] = {}
        for sequence in sequences:
            queues.setdefault(sequence.request.client, []).append(sequence)
        self._order = [client for client in self._order if client in queues]
        self._order += [client for client in queues if client not in self._order]
        parts: dict[LiveSequence, int] = {}
        if not queues:
            return parts
        served: list[str] = []
        part = max(LEAST_TOKENS, room // len(queues))
        wanted = [sum(sequence.n_pending for sequence in queue) for queue in queues.values()]
        ending = [n_tokens for n_tokens in wanted if n_tokens <= part]
        if ending and max(wanted) > part:
            part = max(FEW_TOKENS, *ending)
            room = min(room, len(queues) * part)
        for most in (part, room) if len(queues) > 1 else (room,):
            for client in self._order:
                n_tokens = _fill(queues[client], min(most, room), parts, starts)
                room -= n_tokens
                if n_tokens and client not in served:
                    served.append(client)
        self._order = [client for client in self._order if client not in served] + served
        return parts


def _fill(
    queue: Iterable[LiveSequence],
    most: int,
    parts: dict[LiveSequence, int],
    starts: Callable[[LiveSequence], bool],
) -> int:
    """Give up to `most` tokens to one client's sequences, in their order, and return the number given."""
    left = most
    for sequence in queue:
        if left == 0:
            break
        if not (sequence in parts or starts(sequence)):
            continue
        n_tokens = min(sequence.n_pending - parts.get(sequence, 0), left)
        if n_tokens:
            parts[sequence] = parts.get(sequence, 0) + n_tokens
            left -= n_tokens
    return most - left


class RequestLane:
    """Requests of one kind, interactive ones or those in shadow: those that wait, those that own a KV block,
    and the turns of their prompts."""

    def __init__(self) -> None:
        self.waiting = WaitingLine()
        self.running: list[LiveSequence] = []  # by age
        self.turns = PrefillTurns()

    @property
    def requests(self) -> list[LiveSequence]:
        """All requests: running ones by age, then waiting ones."""
        return [*self.running, *self.waiting]

    def answering(self, most_rows: int | None) -> list[LiveSequence]:
        """Up to `most_rows` sequences that wait for a token, those whose last is longest ago; None: all."""
        answering = [sequence for sequence in self.running if not sequence.is_prefilling]
        if most_rows is None or most_rows >= len(answering):
            return answering
        chosen = set(sorted(answering, key=lambda sequence: sequence.turn)[:most_rows])
        return [sequence for sequence in answering if sequence in chosen]

    @property
    def computes(self) -> bool:
        """True if any sequence has tokens that can be computed now."""
        return any(
            sequence.n_pending and not (sequence.awaits_kv or sequence.is_restored)
            for sequence in self.running
        )

    def shares(self, limits: SchedulerLimits, n_slots: int) -> ClientShares:
        """Equal shares of places (running sequences) and slots for each client that runs or waits."""
        return ClientShares(limits.max_sequences, n_slots, self.running, self.waiting.clients)


class RequestLanes(NamedTuple):
    """The lanes of a scheduler."""

    own: RequestLane
    """Interactive requests."""
    shadow: RequestLane

    def of(self, sequence: LiveSequence) -> RequestLane:
        return self.shadow if sequence.request.in_shadow else self.own

    @property
    def running(self) -> list[LiveSequence]:
        return [*self.own.running, *self.shadow.running]

    def answers_in_step(
        self, most_rows: int | None, room: ShadowRoom, most_sequences: int
    ) -> list[LiveSequence]:
        """The sequences of the next decode step. `most_rows`: most interactive answers; None: all."""
        if not self.own.computes:
            return self.shadow.answering(most_rows)
        answers = self.own.answering(most_rows)
        if not answers:  # prompts wait, which a step of shadows alone would hold up
            return []
        rows = most_sequences - len(answers)
        return answers + self.shadow.answering(rows if room.rows is None else min(rows, room.rows))

    def prompts_in_step(
        self, n_tokens: int, room: ShadowRoom, starts: Callable[[LiveSequence], bool]
    ) -> dict[LiveSequence, int]:
        """Divide the next prefill step, all in shadow or none. `n_tokens`: its most tokens."""
        for lane in self:
            prompts = [sequence for sequence in lane.running if sequence.can_prefill]
            if lane is self.shadow and room.chunk_tokens is not None and self.own.computes:
                n_tokens = min(n_tokens, room.chunk_tokens)
            if prompts and n_tokens:
                return lane.turns.divide(prompts, n_tokens, starts)
        return {}


def batch_of(
    phase: Phase,
    parts: Sequence[tuple[LiveSequence, tuple[int, ...]]],
    copies: Sequence[KvCopy],
    states: SequenceStates | None,
) -> Batch:
    """Build the batch of a step from sequences and their tokens. `states`: assigns the state copies that the
    step makes; None: the step makes none."""
    slices = []
    for sequence, token_ids in parts:
        assert sequence.placement is not None, f"{sequence} waits"
        base, _, table, ring, state = sequence.placement
        slices.append(
            SequenceSlice(
                token_ids,
                sequence.n_computed,
                base,
                len(token_ids) == sequence.n_pending,
                table,
                ring=ring,
                adapter=sequence.request.adapter,
                state=state or 0,
                keeps=() if states is None else states.keeps(sequence, len(token_ids)),
            )
        )
    names = tuple(sequence.request_id for sequence, _ in parts)
    n_in_shadow = sum(sequence.request.in_shadow for sequence, _ in parts)
    return Batch(phase, tuple(slices), names, tuple(copies), n_in_shadow)


def refuse_impossible(request: Request, limits: SchedulerLimits, pool: KvPool) -> None:
    """Raise RequestError for a request that can never run: no prompt, no answer, or too long a context."""
    if not request.prompt_token_ids:
        raise RequestError("the prompt has no tokens", "prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
    room = min(limits.context_length, pool.n_slots)
    whose = "" if room == limits.context_length else " here (the KV cache holds no more)"
    check_context(room, len(request.prompt_token_ids), request.max_tokens, whose)


def next_to_admit(
    waiting: WaitingLine, running: Sequence[LiveSequence], shares: ClientShares
) -> tuple[LiveSequence | None, bool]:
    """Choose the request to admit next, and tell whether running requests may be preempted for it. Preemption
    is allowed if the client runs nothing or holds less than its share; without such a client the head of the
    line is next. If computed prompts are held with no instance to take them (`held_in_vain`), a request that
    is answered here comes first."""
    if held_in_vain(running) is not None:
        for sequence in waiting:
            if not (sequence.request.prefill_only or _must_become_oldest(sequence, waiting, running)):
                return sequence, False
    heads = [sequence for sequence in waiting.heads if not _must_become_oldest(sequence, waiting, running)]
    for sequence in heads:
        if shares.has_nothing(sequence.request.client):
            return sequence, True
    for sequence in heads:
        if shares.allows(sequence, demand_of(sequence).held_tokens):
            return sequence, True
    return (heads[0] if heads else None), False


def _must_become_oldest(
    sequence: LiveSequence, waiting: WaitingLine, running: Sequence[LiveSequence]
) -> bool:
    if sequence.n_preempted <= MOST_PREEMPTIONS:
        return False
    is_behind_running = bool(running) and running[0].age < sequence.age
    return is_behind_running or waiting.is_behind_older(sequence)


def last_to_come(
    growing: LiveSequence, running: Sequence[LiveSequence], shares: ClientShares
) -> LiveSequence | None:
    """Choose the sequence to preempt so that `growing`, or an older sequence, gets room: the youngest of
    clients that hold more than their share of slots, else the youngest. None: only pinned sequences are left.
    """
    is_oldest = running[0] is growing
    greedy = [sequence for sequence in running[1:] if shares.takes_too_much(sequence.request.client)]
    for other in (*reversed(greedy), *reversed(running)):
        if other is growing:
            break
        if not other.is_pinned and (is_oldest or other.n_preempted < MOST_PREEMPTIONS):
            return other
    return None if is_oldest else growing


def held_in_vain(running: Sequence[LiveSequence]) -> LiveSequence | None:
    """The youngest prompt that waits for a hand-over while nothing can be computed; None: there is none."""
    if any(sequence.n_pending and not sequence.awaits_kv for sequence in running):
        return None
    held = (sequence for sequence in reversed(running) if is_held(sequence) and not sequence.is_pinned)
    return next(held, None)


def demand_of(sequence: LiveSequence) -> Demand:
    """KV slots that a sequence needs in order to run."""
    return sequence.demand(in_full=sequence.n_preempted >= MOST_PREEMPTIONS)


def is_held(sequence: LiveSequence) -> bool:
    """True if the sequence is a computed prompt that waits for its hand-over to another instance."""
    return sequence.request.prefill_only and not sequence.n_pending


class Admitter:
    """Admits waiting requests. `place`: gives a sequence its KV block; `preempt`: takes it back."""

    def __init__(
        self,
        pool: KvPool,
        limits: SchedulerLimits,
        lanes: RequestLanes,
        place: Callable[[LiveSequence, Grant], None],
        preempt: Callable[[LiveSequence], None],
    ) -> None:
        self._pool, self._limits, self._lanes = pool, limits, lanes
        self._place, self._preempt = place, preempt

    def admit(self) -> None:
        """Admit waiting requests while there is room; background ones (in shadow) to what others leave."""
        own = self._lanes.own
        while len(own.waiting):
            shares = own.shares(self._limits, self._pool.n_slots)
            sequence, is_due = next_to_admit(own.waiting, own.running, shares)
            if sequence is None:
                return
            while not self._has_place(own):
                if not (is_due and self._gives_way(shares, shares.giver_of_place())):
                    return
            demand = demand_of(sequence)
            takes_slots = shares.has_nothing(sequence.request.client) and demand.held_tokens <= shares.slots
            while (grant := self._pool.reserve(sequence.request_id, demand)) is None:
                if self.shadow_gives_way():
                    continue
                giver = shares.giver_of_slots() if takes_slots else None
                if giver is None and not sequence.request.prefill_only:
                    giver = held_in_vain(own.running)
                if not self._gives_way(shares, giver):
                    return
            self._place(sequence, grant)
        shadow = self._lanes.shadow
        while len(shadow.waiting) and self._has_place(shadow):
            shares = shadow.shares(self._limits, self._pool.n_slots)
            sequence, _ = next_to_admit(shadow.waiting, shadow.running, shares)
            if sequence is None:
                return
            grant = self._pool.reserve(sequence.request_id, demand_of(sequence))
            if grant is None:
                return
            self._place(sequence, grant)

    def shadow_gives_way(self) -> bool:
        """Preempt the youngest background request (in shadow). False: there is none that is not pinned."""
        for sequence in reversed(self._lanes.shadow.running):
            if not sequence.is_pinned:
                self._preempt(sequence)
                return True
        return False

    def _has_place(self, lane: RequestLane) -> bool:
        """True if `max_sequences` allows one more. Prompts that are held for a hand-over do not count: they
        could otherwise block the requests that they wait for."""
        return len(lane.running) - sum(map(is_held, lane.running)) < self._limits.max_sequences

    def _gives_way(self, shares: ClientShares, giver: LiveSequence | None) -> bool:
        """Preempt `giver` in favour of another client's share, without counting the preemption against
        `giver`. False: `giver` is None."""
        if giver is None:
            return False
        shares.gave_way(giver)
        self._preempt(giver)
        return True


def check_laws(pool: KvPool, lanes: RequestLanes, live: Collection[str]) -> None:
    """Raise SchedulerError, with the numbers, if slots are owned by anything but the running requests, or if
    a request both runs and waits or does neither. `pool.check` raises the pool's own errors."""
    pool.check()
    placements = {sequence.request_id: sequence.placement for sequence in lanes.running}
    owned = pool.placements()
    if owned != placements:
        raise SchedulerError(f"the pool says {owned}, running requests say {placements}")
    for lane in lanes:
        ages = [sequence.age for sequence in lane.running]
        if ages != sorted(ages):
            raise SchedulerError(f"running requests of ages {ages} are not in order")
        if len(lane.waiting) != len(list(lane.waiting)):
            raise SchedulerError(f"{counted(len(lane.waiting), 'request')} wait, but {[*lane.waiting]} do")
    names = sorted(sequence.request_id for lane in lanes for sequence in lane.requests)
    if names != sorted(live):
        raise SchedulerError(f"{sorted(live)} live, {names} run or wait")
    for sequence in lanes.running:
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

"""Continuous batching. Pure: integers in, a batch out; no clock, no tensors.

A step is either prefill or decode, so that each phase keeps its own plan. While answers run and prompts wait
the phases alternate: one chunk of prompts, whose size `pacing` limits, then one token for each running
answer. Clients take turns at admission (`waiting_line`, decision 0039) and in each chunk (`admission`); a
client's own requests are first come, first served. Clients that hold more than their share of places and
slots give way to a waiting client that holds less (decision 0072). Every other choice is by age: the order of
first admissions.

A request is admitted when the pool has room for its present tokens, not for its longest answer; no request
overtakes the next one. An answer that outgrows its block gets a larger one. If no slots are free the request
admitted last is preempted: it waits again with the answer so far, and its keys and values are computed again
later. A request that was preempted `MOST_PREEMPTIONS` times gets a block for its whole answer, which only the
oldest request can take; after that it runs as the oldest itself. Decision 0021.

A request can be divided between two schedulers. One computes the prompt (`Request.prefill_only`) and holds
its keys and values: `hand_over` pins them while they are sent, `abort` frees them. The other is told to
`expect` the request, pins a block for it, and runs it once everything has `arrived`. A pinned block is
neither moved nor preempted. A request whose prefix a store has (`reads_from`) waits in a pinned block until
it is `restored`.

Requests in shadow (those of batches) are admitted while no other request waits, are preempted first, and
share steps as `ShadowRoom` allows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Tokens

from phasewise._words import counted, plural
from phasewise.serving.batch import Batch, KvCopy
from phasewise.serving.errors import QueueFull
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Grant, Placement
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.scheduling.admission import (
    Admitter,
    RequestLane,
    RequestLanes,
    batch_of,
    check_laws,
    last_to_come,
    refuse_impossible,
)
from phasewise.serving.scheduling.pacing import UNBOUNDED, ShadowRoom
from phasewise.serving.scheduling.prefixes import PrefixIndex, PrefixSource
from phasewise.serving.scheduling.request import (
    MOST_PREEMPTIONS,
    DraftRoom,
    Flight,
    LiveSequence,
    Request,
    SchedulerCounts,
    SchedulerError,
    SchedulerLimits,
    TokenOut,
)
from phasewise.serving.scheduling.sequence_states import FindStored, SequenceStates, StoredBeginnings
from phasewise.tuner.plans import Phase


class Scheduler:
    """Owns every request from `add` to its last token, and the KV pool of all requests."""

    def __init__(self, pool: KvPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.counts = SchedulerCounts()
        self.n_pool_changes = 0
        """Number of calls that changed the pool: a reader of the pool's figures can skip equal counts."""
        self._live: dict[str, LiveSequence] = {}
        self._lanes = RequestLanes(RequestLane(), RequestLane())
        self._admitter = Admitter(pool, limits, self._lanes, self._place, self._preempt)
        self._prefixes = PrefixIndex(pool.n_slots, pool.rings)
        self._states = SequenceStates(pool, self._prefixes, reuses=limits.prefix_reuse)
        self._copies: list[KvCopy] = []  # that the next batch brings, in their order
        self._moved: set[str] = set()  # whom they move
        self._stored: StoredBeginnings | None = None
        self._n_admitted = 0
        self._n_decoded = 0
        self._last_phase: Phase | None = None
        self._in_flight: Flight | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._lanes.own.waiting)

    @property
    def n_clients_waiting(self) -> int:
        """Number of clients with requests that were never admitted."""
        return self._lanes.own.waiting.n_clients

    @property
    def n_running(self) -> int:
        return len(self._lanes.own.running)

    @property
    def n_in_shadow(self) -> int:
        """Number of live background requests (in shadow); these count neither as waiting nor as running."""
        return len(self._lanes.shadow.running) + len(self._lanes.shadow.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def n_prefix_changes(self) -> int:
        """Counter of changes in `held_prefixes`: while it is equal, so is the result."""
        return self._prefixes.n_changes

    def held_prefixes(self) -> Iterator[tuple[PrefixSource, int]]:
        """Sequences whose prefix others can reuse, each with the number of its first tokens that are held."""
        return self._states.held()

    @property
    def n_answering(self) -> int:
        """Number of answers that wait for a token; background ones only if nothing else can be computed."""
        lane = self._lanes.shadow if self.is_all_shadow else self._lanes.own
        return len(lane.answering(None))

    @property
    def is_all_shadow(self) -> bool:
        """True if only background requests (in shadow) have tokens that can be computed now."""
        return not self._lanes.own.computes

    def add(self, request: Request) -> None:
        """Queue a request, or raise why it can never run (RequestError) or cannot wait (QueueFull)."""
        n_waiting = self.n_waiting
        if self.limits.max_waiting is not None and n_waiting >= self.limits.max_waiting:
            are_waiting = f"{counted(n_waiting, 'request')} {plural(n_waiting, 'is', 'are')} waiting"
            raise QueueFull(f"{are_waiting} already; try again later")
        self.requeue(request)

    def expect(self, request: Request) -> None:
        """Queue a request whose prompt another instance computes; raises `add`'s errors. Once it has a block,
        `expected` names it until `arrived` or `abort` is called."""
        self.add(request)
        self._live[request.request_id].awaits_kv = True

    @property
    def expected(self) -> dict[str, Placement]:
        """Blocks into which keys and values of expected requests may be written now, by request id. Empty
        while copies are pending, whose sources may lie in these blocks."""
        if self._copies or (self._in_flight is not None and self._in_flight.batch.copies):
            return {}
        return {
            sequence.request_id: sequence.placement
            for sequence in self._lanes.running
            if sequence.awaits_kv and sequence.placement is not None
        }

    @property
    def awaiting_kv(self) -> tuple[str, ...]:
        """Ids of expected requests that have not arrived, with or without a block."""
        return tuple(name for name, sequence in self._live.items() if sequence.awaits_kv)

    def arrived(self, request_id: str, token_id: int) -> TokenOut | None:
        """Start an expected request whose keys and values are in its block with the first sampled token.
        None: it was aborted. SchedulerError: it was not expected, or has no block yet."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if not sequence.awaits_kv or sequence.placement is None:
            raise SchedulerError(f"{request_id!r} is not expected with a block: {sequence}")
        sequence.awaits_kv, sequence.has_started = False, True
        self._unpin(sequence)
        self._states.arrived(sequence, sequence.placement)
        sequence.n_computed = sequence.n_tokens
        return self._append(sequence, token_id)

    def hand_over(self, request_id: str) -> Placement | None:
        """Pin the block of a `prefill_only` request while its keys and values are sent, and return the block.
        None: the request is gone or was preempted."""
        sequence = self._live.get(request_id)
        if sequence is None or sequence.placement is None or not sequence.has_started:
            return None
        if not sequence.request.prefill_only:
            raise SchedulerError(f"{request_id!r} is answered here")
        self._pin(sequence)
        return sequence.placement

    def reads_from(self, find: FindStored) -> StoredBeginnings:
        """Read prompt prefixes from a store. `find`: tells how many first tokens the store has."""
        assert self.limits.prefix_reuse, "without prefix reuse nothing is taken over"
        self._stored = StoredBeginnings(find, self._prefixes, self._states.copies_along)
        return self._stored

    def restored(self, request_id: str, n_tokens: int) -> None:
        """Record that a store has filled the first `n_tokens` of a request's block; 0: none. A request that
        was aborted meanwhile is ignored."""
        sequence = self._live.get(request_id)
        if sequence is None or not sequence.is_restored:
            return
        sequence.is_restored, sequence.has_started = False, n_tokens > 0
        self._unpin(sequence)
        if n_tokens:
            self._took_over(sequence, n_tokens)
        else:
            self._states.give_up(sequence)

    def placement(self, request_id: str) -> Placement:
        """The placement of a request of the batch being computed."""
        placement = self._live[request_id].placement
        assert placement is not None, f"{request_id!r} waits"
        return placement

    def n_computed(self, request_id: str) -> int:
        """Number of a request's tokens that have keys and values; 0 if it waits or is gone."""
        sequence = self._live.get(request_id)
        return 0 if sequence is None else sequence.n_computed

    def take_copies(self) -> tuple[KvCopy, ...]:
        """Take the copies that no batch carries, to be done at once, after `next_batch` returned None."""
        copies = tuple(self._copies)
        self._copies.clear()
        self._moved.clear()
        return copies

    def requeue(self, request: Request) -> None:
        """Queue a request that was accepted before, even if the waiting line is full."""
        refuse_impossible(request, self.limits, self.pool)
        if request.request_id in self._live:
            raise SchedulerError(f"request {request.request_id!r} is here already")
        sequence = self._live[request.request_id] = LiveSequence(request, generated=list(request.given))
        if request.given:  # its client waits for the next token: it comes in as if preempted here
            sequence.admission = self._next_admission()
            self._lanes.of(sequence).waiting.rejoin(sequence)
        else:
            self._lanes.of(sequence).waiting.join(sequence)

    def next_batch(
        self, chunk_tokens: int | None = None, most_rows: int | None = None, shadow: ShadowRoom = UNBOUNDED
    ) -> Batch | None:
        """The batch to compute now; None: nothing can run. Every batch ends in `commit`, `commit_runs` or
        `discard`. `chunk_tokens`: most prompt tokens; 0: a decode step comes first; None: the limits' number.
        `most_rows`: most answers of a decode step; None: all. `shadow`: room of background requests."""
        if self._in_flight is not None:
            raise SchedulerError("the batch before was neither committed nor discarded")
        self._admitter.admit()
        most_tokens = self.limits.max_batch_tokens
        chunk = most_tokens if chunk_tokens is None else max(1, min(chunk_tokens, most_tokens))
        if self._last_phase == "prefill" or chunk_tokens == 0:
            batch = self._decode_batch(most_rows, shadow) or self._prefill_batch(chunk, shadow)
        else:
            batch = self._prefill_batch(chunk, shadow) or self._decode_batch(most_rows, shadow)
        if batch is not None and batch.phase != self._last_phase:
            self.counts.phase_switches += self._last_phase is not None
            self._last_phase = batch.phase
        return batch

    def draft_rooms(self, batch: Batch) -> list[DraftRoom]:
        """For each slice of the decode batch under way, its sequence and the most drafts it may carry. Drafts
        use only slots that the block has already."""
        flight = self._flight_of(batch)
        self._states.share_for_drafts(len(flight.sequences))
        return [DraftRoom(sequence, self._states.room_for_drafts(sequence)) for sequence in flight.sequences]

    def extend(self, batch: Batch, drafts: Tokens[Tokens[int]]) -> Batch:
        """Append drafts to each slice of the decode batch under way, and return the new batch."""
        flight = self._flight_of(batch)
        if batch.phase != "decode":
            raise SchedulerError("only the tokens of answers can be drafted")
        extended = self._states.with_drafts(batch, flight.sequences, drafts)
        self._in_flight = flight._replace(batch=extended)
        return extended

    def commit(self, batch: Batch, token_ids: Tokens[int]) -> list[TokenOut]:
        """Record a computed batch without drafts. `token_ids`: one for each slice that wants logits."""
        return self.commit_runs(batch, [(token_id,) for token_id in token_ids])

    def commit_runs(self, batch: Batch, runs: Tokens[Tokens[int]]) -> list[TokenOut]:
        """Record a computed batch. `runs`: for each slice that wants logits, in order, the accepted drafts
        and the token sampled after them, none after a stop token. Positions of rejected drafts are computed
        again. Runs of `prefill_only` requests are ignored: the answering instance samples from the same
        logits."""
        sequences, self._in_flight = self._flight_of(batch).sequences, None
        sampled = iter(runs)
        outs: list[TokenOut] = []
        for sequence, piece in zip(sequences, batch.slices, strict=True):
            run = next(sampled) if piece.wants_logits else ()
            if sequence.placement is None:  # aborted while its step was computed
                self._states.put_back([piece])
                continue
            if len(run) > 1 + piece.n_drafted:
                raise SchedulerError(
                    f"{counted(len(run), 'token')} sampled after {counted(piece.n_drafted, 'draft')}"
                )
            n_written = sequence.n_computed + len(piece.token_ids)
            sequence.n_computed = n_written - piece.n_drafted
            is_prompt = batch.phase == "prefill"
            n_ready = sequence.n_computed if is_prompt else None
            self._prefixes.advance(sequence.request_id, n_ready, n_written, is_whole=is_prompt and bool(run))
            self._states.go_on(sequence, piece, len(run))
            if run and not sequence.request.prefill_only:
                sequence.n_computed += len(run) - 1
                for token_id in run:
                    if sequence.request_id not in self._live:
                        raise SchedulerError(f"{run} goes on after the end of {sequence}")
                    outs.append(self._append(sequence, token_id))
        return outs

    def discard(self, batch: Batch) -> tuple[str, ...]:
        """Drop the requests of a batch whose step failed, free their slots and return their ids. Other
        requests whose slots the batch was to copy are computed again."""
        flight, self._in_flight = self._flight_of(batch), None
        self._states.put_back(flight.batch.slices)
        dropped = [sequence for sequence in flight.sequences if sequence.placement is not None]
        for sequence in dropped:
            self._states.forget(sequence)  # it is unknown how far the step came
            self._end(sequence, None)
        for sequence in self._lanes.running:
            if sequence.request_id in flight.moved:
                self._states.forget(sequence)
                sequence.begin_again()
        if batch.copies:
            self._states.forget_ended()
        return tuple(sequence.request_id for sequence in dropped)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its slots. False: it has ended or was never here."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, None)
        return sequence is not None

    def finish(self, request_id: str, answer_tokens: int) -> None:
        """End a request whose answer is complete after `answer_tokens`, for a reason that token ids do not
        show. A request that has ended is ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, answer_tokens)

    def clear(self) -> None:
        """Drop every request, including those of a batch under way, and all cached prefixes."""
        if self._in_flight is not None:
            self._states.put_back(self._in_flight.batch.slices)
        self._in_flight = None
        self._copies.clear()
        self._moved.clear()
        for request_id in self.request_ids():
            self.abort(request_id)
        self._states.clear()

    def request_ids(self) -> tuple[str, ...]:
        """Ids of all live requests, those in shadow last: running ones by age, then waiting ones."""
        return tuple(sequence.request_id for lane in self._lanes for sequence in lane.requests)

    def check(self) -> None:
        """Raise SchedulerError or PoolError unless exactly the running requests own slots."""
        check_laws(self.pool, self._lanes, self._live)
        if self.limits.prefix_reuse:
            for sequence in self._lanes.running:
                if sequence.has_started:
                    self._prefixes.check(sequence.request_id, _placed(sequence), sequence.n_computed)

    def _place(self, sequence: LiveSequence, grant: Grant) -> None:
        self._accept(sequence, grant)
        if sequence.awaits_kv:
            self._pin(sequence)
            self._prefixes.overwritten(grant.placement)
        lane = self._lanes.of(sequence)
        lane.waiting.take(sequence)
        if sequence.admission is None:
            sequence.admission = self._next_admission()
        insort(lane.running, sequence, key=lambda running: running.age)

    def _next_admission(self) -> int:
        self._n_admitted += 1
        return self._n_admitted

    def _pin(self, sequence: LiveSequence) -> None:
        self.pool.pin(sequence.request_id)
        sequence.is_pinned = True

    def _unpin(self, sequence: LiveSequence) -> None:
        self.pool.unpin(sequence.request_id)
        sequence.is_pinned = False

    def _accept(self, sequence: LiveSequence, grant: Grant) -> None:
        """Apply a grant: record the new blocks, and queue the copies of keys and values that were moved."""
        self.n_pool_changes += 1
        sequence.placement = grant.placement
        for owner, placement, (source, target, _) in grant.moves:
            mover = self._live[owner]
            mover.placement = placement
            if mover.n_computed:
                self._copies.append(KvCopy(source, target, aligned(mover.n_computed)))
                self._moved.add(owner)
            self._prefixes.moved(owner, placement)
        self._prefixes.moved(sequence.request_id, grant.placement)

    def _decode_batch(self, most_rows: int | None, shadow: ShadowRoom) -> Batch | None:
        decoding = self._lanes.answers_in_step(most_rows, shadow, self.limits.max_sequences)
        self._n_decoded += 1
        for sequence in decoding:
            if sequence.placement is not None and sequence.n_tokens > sequence.placement.n_slots:
                self._grow(sequence)
        going_on = [
            (sequence, tuple(sequence.generated[-1:]))
            for sequence in decoding
            if sequence.placement is not None and sequence.n_tokens <= sequence.placement.n_slots
        ]
        for sequence, _ in going_on:
            sequence.turn = self._n_decoded
        return self._fly("decode", going_on) if going_on else None

    def _grow(self, sequence: LiveSequence) -> None:
        """Grow a request's block for its next token. If no slots are free, preempt requests, the newest
        first, perhaps this one; if all others are pinned, the block stays as it is."""
        while sequence.placement is not None:
            grant = self.pool.grow(sequence.request_id, sequence.n_tokens)
            if grant is not None:
                self._accept(sequence, grant)
                return
            lane, in_shadow = self._lanes.of(sequence), sequence.request.in_shadow
            if not in_shadow and self._admitter.shadow_gives_way():
                continue
            last = last_to_come(sequence, lane.running, lane.shares(self.limits, self.pool.n_slots))
            if last is None and in_shadow and self._lanes.own.running:
                last = sequence  # the others hold what it wants
            if last is None and not any(holder.is_pinned for holder in self._lanes.running):
                raise SchedulerError(f"the pool has no room for {sequence} alone: {self.pool.stats()}")
            if last is None:
                return
            last.n_preempted += not in_shadow or last.n_preempted < MOST_PREEMPTIONS
            self._preempt(last)

    def _preempt(self, sequence: LiveSequence) -> None:
        self.counts.preemptions += 1
        self._leave_pool(sequence, None)
        self._lanes.of(sequence).waiting.rejoin(sequence)

    def _prefill_batch(self, room: int, shadow: ShadowRoom) -> Batch | None:
        parts = self._lanes.prompts_in_step(room, shadow, self._start)
        pieces = [
            (sequence, sequence.pending_ids(parts[sequence]))
            for sequence in sorted(parts, key=lambda sequence: sequence.age)
        ]
        return self._fly("prefill", pieces) if pieces else None

    def _start(self, sequence: LiveSequence) -> bool:
        """Begin a request's block with keys and values reused from others. False: wait, because others are
        about to compute more of them or a store is being read."""
        if sequence.has_started:
            return True
        brought = self._states.take_over(sequence, _placed(sequence))
        if brought is None:
            return False
        n_tokens, needed = brought
        stored = self._stored if sequence.request.takes_over else None
        if stored is not None and stored.is_wanted(sequence, n_tokens):
            self._pin(sequence)
            return False
        if n_tokens:
            self._copies += needed
            self._took_over(sequence, n_tokens)
        sequence.has_started = True
        return True

    def _took_over(self, sequence: LiveSequence, n_tokens: int) -> None:
        sequence.n_computed = n_tokens
        if not sequence.generated:
            sequence.n_reused = n_tokens
        self._states.took_over(sequence.request_id, n_tokens)
        self.counts.prefix_hits += n_tokens > 0
        self.counts.prefix_tokens_reused += n_tokens

    def _fly(self, phase: Phase, parts: list[tuple[LiveSequence, tuple[int, ...]]]) -> Batch:
        batch = batch_of(phase, parts, self._copies, self._states if phase == "prefill" else None)
        self._copies.clear()
        sequences = tuple(sequence for sequence, _ in parts)
        self._in_flight = Flight(batch, sequences, frozenset(self._moved))
        self._moved.clear()
        return batch

    def _flight_of(self, batch: Batch) -> Flight:
        flight = self._in_flight
        if flight is None or batch is not flight.batch:
            raise SchedulerError("only the batch that next_batch or extend gave last is under way")
        return flight

    def _append(self, sequence: LiveSequence, token_id: int) -> TokenOut:
        sequence.generated.append(token_id)
        reason = sequence.finish_reason()
        if reason is not None:
            self._end(sequence, len(sequence.generated))
        return TokenOut(sequence.request_id, token_id, len(sequence.generated), reason, sequence.n_reused)

    def _end(self, sequence: LiveSequence, answer_tokens: int | None) -> None:
        del self._live[sequence.request_id]
        if sequence.placement is None:
            self._lanes.of(sequence).waiting.remove(sequence)
        else:
            self._leave_pool(sequence, answer_tokens)

    def _leave_pool(self, sequence: LiveSequence, answer_tokens: int | None) -> None:
        is_computed = self._in_flight is None or sequence not in self._in_flight.sequences
        self._states.leave(sequence, is_computed=is_computed)
        self.pool.release(sequence.request_id, answer_tokens)
        self.n_pool_changes += 1
        self._lanes.of(sequence).running.remove(sequence)
        sequence.placement, sequence.is_pinned = None, False
        sequence.begin_again()


def _placed(sequence: LiveSequence) -> Placement:
    assert sequence.placement is not None, f"{sequence} waits"
    return sequence.placement

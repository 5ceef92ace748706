"""Continuous batching, first come first served. Pure: integers in, a batch out; no clock, no tensors.

A step is of one phase, so that each phase keeps its own plan. Prompts are computed in chunks of at most
`max_batch_tokens`, several prompts to a batch; between two chunks every running answer gets one token, so a
long prompt delays the others by one chunk at most. A request is admitted only when its whole KV range (prompt
+ max_tokens) is free, and nobody overtakes the head of the queue: no preemption, no starvation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from phasewise.serving.batch import Batch, Phase, SequenceSlice
from phasewise.serving.blocks import BlockPool
from phasewise.serving.errors import ContextLengthExceeded, QueueFull, RequestError
from phasewise.serving.request import Request, RunningSequence, TokenOut


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`context_length`: positions the model has. `max_waiting`: the queue's end; None for an endless one."""

    context_length: int
    max_batch_tokens: int = 2048  # Splitwise's knee: more tokens per prefill batch no longer raise throughput
    max_sequences: int = 32
    max_waiting: int | None = None


class SchedulerError(AssertionError):
    """The scheduler was misused or broke its own law: a bug, never a user's mistake."""


class Scheduler:
    """Owns every request between `add` and its last token, and the KV pool they live in."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self._waiting: deque[Request] = deque()
        self._running: dict[str, RunningSequence] = {}  # in order of admission
        self._last_phase: Phase = "decode"
        self._in_flight: Batch | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request, or raise why it can never run (RequestError) or cannot wait (QueueFull)."""
        self._refuse_impossible(request)
        if self.limits.max_waiting is not None and len(self._waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting already; try again later")
        self._waiting.append(request)

    def next_batch(self) -> Batch | None:
        """What to compute now, or None when nothing can run. Every batch ends in `commit` or `discard`."""
        if self._in_flight is not None:
            raise SchedulerError("the batch before was neither committed nor discarded")
        self._admit()
        prefilling = [one for one in self._running.values() if one.is_prefilling]
        decoding = [one for one in self._running.values() if not one.is_prefilling]
        if decoding and (not prefilling or self._last_phase == "prefill"):
            self._in_flight = _batch("decode", [(one, 1) for one in decoding])
        elif prefilling:
            self._in_flight = _batch("prefill", self._chunks(prefilling))
        if self._in_flight is not None:
            self._last_phase = self._in_flight.phase
        return self._in_flight

    def commit(self, batch: Batch, token_ids: Tokens[int]) -> list[TokenOut]:
        """Record a computed batch. `token_ids`: one sampled token per slice that wants logits, in order."""
        if batch is not self._in_flight:
            raise SchedulerError("only the batch that next_batch gave last can be committed")
        self._in_flight = None
        sampled = iter(token_ids)
        outs = []
        for request_id, piece in zip(batch.request_ids, batch.slices, strict=True):
            token_id = next(sampled) if piece.wants_logits else None
            sequence = self._running.get(request_id)
            if sequence is None:  # aborted while its step was computed
                continue
            sequence.n_computed += len(piece.token_ids)
            if token_id is not None:
                outs.append(self._append(sequence, token_id))
        return outs

    def discard(self, batch: Batch) -> tuple[str, ...]:
        """The step of `batch` failed: its requests are dropped, their slots freed. Returns who they were."""
        self._in_flight = None
        return tuple(request_id for request_id in batch.request_ids if self.abort(request_id))

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its slots at once. False if it has ended or was never here."""
        if self._running.pop(request_id, None) is not None:
            self.pool.release(request_id)
            return True
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def clear(self) -> None:
        """Drop every request, also those of a batch that is neither committed nor discarded."""
        self._in_flight = None
        for request_id in self.request_ids():
            self.abort(request_id)

    def request_ids(self) -> tuple[str, ...]:
        """All requests that have not ended: running ones first."""
        return (*self._running, *(request.request_id for request in self._waiting))

    def check(self) -> None:
        """Raise, with the numbers, unless the pool keeps its law and the running requests alone own slots."""
        self.pool.check()
        owned = {owner: block.length for owner, block in self.pool.owners().items()}
        needed = {name: sequence.request.n_slots for name, sequence in self._running.items()}
        if owned != needed:
            raise SchedulerError(f"slots owned {owned} are not the slots that running requests need {needed}")
        for name, sequence in self._running.items():
            counts = (0, sequence.n_computed, sequence.n_tokens, sequence.slots.length)
            if list(counts) != sorted(counts):
                raise SchedulerError(f"{name}: (0, computed, known, slots) = {counts} do not ascend")

    def _refuse_impossible(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
        room = min(self.limits.context_length, self.pool.n_slots)
        if request.n_slots > room:
            whose = "model's context" if room == self.limits.context_length else "KV cache"
            raise ContextLengthExceeded(
                f"the {whose} holds {room} tokens, but {request.n_slots} are asked for: "
                f"{len(request.prompt_token_ids)} in the prompt and {request.max_tokens} for the answer",
                "prompt",
            )
        if request.request_id in self._running or any(
            request.request_id == other.request_id for other in self._waiting
        ):
            raise SchedulerError(f"request {request.request_id!r} is here already")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.max_sequences:
            request = self._waiting[0]
            slots = self.pool.reserve(request.request_id, request.n_slots)
            if slots is None:
                return
            self._running[request.request_id] = RunningSequence(request, slots)
            self._waiting.popleft()

    def _chunks(self, prefilling: list[RunningSequence]) -> Iterator[tuple[RunningSequence, int]]:
        budget = self.limits.max_batch_tokens
        for sequence in prefilling:
            n_tokens = min(sequence.n_pending, budget)
            if n_tokens == 0:
                return
            budget -= n_tokens
            yield sequence, n_tokens

    def _append(self, sequence: RunningSequence, token_id: int) -> TokenOut:
        sequence.generated.append(token_id)
        request_id = sequence.request.request_id
        reason = sequence.finish_reason()
        if reason is not None:
            self.abort(request_id)
        return TokenOut(request_id, token_id, len(sequence.generated) - 1, reason)


def _batch(phase: Phase, parts: Iterable[tuple[RunningSequence, int]]) -> Batch:
    slices, request_ids = [], []
    for sequence, n_tokens in parts:
        slices.append(_slice(sequence, n_tokens))
        request_ids.append(sequence.request.request_id)
    return Batch(phase, tuple(slices), tuple(request_ids))


def _slice(sequence: RunningSequence, n_tokens: int) -> SequenceSlice:
    start = sequence.n_computed
    prompt = sequence.request.prompt_token_ids
    token_ids: Tokens[int] = (
        prompt[start : start + n_tokens] if sequence.is_prefilling else sequence.generated[-1:]
    )
    return SequenceSlice(token_ids, start, sequence.slots.base, wants_logits=n_tokens == sequence.n_pending)

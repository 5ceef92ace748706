"""A request as the scheduler sees it: token ids and counts. No text, no sampling, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import Demand, Estimate, Placement

FinishReason = Literal["stop", "length"]


def space_of(cache_space: str, adapter_hash: str) -> str:
    """The hash of a cache space and an adapter: prompts within it that begin alike have the same keys and
    values."""
    return f"\0{adapter_hash}/{cache_space}" if adapter_hash else cache_space


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Ends at the first token in `stop_token_ids`, or after `max_tokens` tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty where the request ignores them."""
    estimate: Estimate | None = None
    """The expected length of its answer."""
    cache_space: str = ""
    """Keys and values are copied between requests of one space, and never to another."""
    prefill_only: bool = False
    """Its prompt is computed here and its answer elsewhere: what was computed is held for a hand-over."""
    client: str = ""
    """Requests that wait belong to clients, which take turns."""
    takes_over: bool = True
    """False: keys and values of its prompt are all computed, because logits of every token are wanted."""
    in_shadow: bool = False
    """It takes what others leave of steps, places and slots (`pacing.ShadowPacing`)."""
    adapter: int = 0
    """The number of the model's adapter that computes it, from 1 on; 0: the model alone."""
    given: tuple[int, ...] = ()
    """Tokens of its answer that were sampled before it came here; `max_tokens` counts them."""
    turns: tuple[int, ...] = ()
    """Positions of its prompt where turns of the assistant begin at which a later prompt may differ."""

    @property
    def most_tokens(self) -> int:
        """Positions that hold the request to its very end."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A request between its arrival and its last token: it waits, or it runs and owns KV slots. Of its tokens
    (the prompt and the answer so far) the first `n_computed` have keys and values."""

    request: Request
    admission: int | None = None
    """Serial of its first admission: of two that were admitted, the lower one is the older. This is what age
    means here. None: it was never admitted."""
    placement: Placement | None = None
    """None: it waits."""
    n_computed: int = 0
    n_reused: int = 0
    """Tokens of its prompt whose keys and values it took over when it was first placed."""
    generated: list[int] = field(default_factory=list)
    n_preempted: int = 0
    turn: int = 0
    """The decode step that it had a row in last."""
    has_started: bool = False
    """True if anything of it has been computed or copied since it was placed."""
    runs: tuple[int, ...] | None = None
    """`prefixes.chain` of its tokens when it was placed; None: not asked for yet."""
    awaits_kv: bool = False
    """Its prompt is computed elsewhere, and keys and values have not arrived."""
    is_restored: bool = False
    """Keys and values of its beginning are read from a store into its block."""
    has_looked: bool = False
    """True once a store was asked for its beginning, since it was placed."""
    is_pinned: bool = False
    """Keys and values are on their way into its block or out of it: it is neither moved nor preempted."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def age(self) -> int:
        """The age of an admitted request, by its serial of admission."""
        assert self.admission is not None, f"{self} was never admitted"
        return self.admission

    @property
    def n_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def n_pending(self) -> int:
        """Tokens known but not yet computed. The logits after the last of them give the next token."""
        return self.n_tokens - self.n_computed

    @property
    def is_prefilling(self) -> bool:
        """True if more is pending than the token sampled last: a prompt, or what a preemption undid."""
        return not self.generated or self.n_pending > 1

    @property
    def can_prefill(self) -> bool:
        """True if a prefill step has anything to compute for it."""
        return self.is_prefilling and self.n_pending > 0 and not (self.awaits_kv or self.is_restored)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.generated)

    def pending_ids(self, n_tokens: int) -> tuple[int, ...]:
        """The first of the pending tokens."""
        start, prompt = self.n_computed, self.request.prompt_token_ids
        end = start + n_tokens
        if end <= len(prompt):
            return prompt[start:end]
        answer = self.generated[max(0, start - len(prompt)) : end - len(prompt)]
        return (*prompt[start:], *answer)

    def begin_again(self) -> None:
        """Forget what was computed: the request has no keys and values any more."""
        self.n_computed, self.has_started, self.runs = 0, False, None
        self.is_restored = self.has_looked = False

    def demand(self, *, in_full: bool) -> Demand:
        """The slots that it needs of the pool to run now, or `in_full`: to its very end."""
        most = self.request.most_tokens
        held = most if in_full else self.n_tokens
        return Demand(held, most, len(self.request.prompt_token_ids), self.request.estimate)

    def finish_reason(self) -> FinishReason | None:
        """The reason that it ends with the token sampled last; None while it goes on."""
        if self.generated and self.generated[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.generated) >= self.request.max_tokens else None


class TokenOut(NamedTuple):
    """One new token of one request. The request holds nothing any more once `finish_reason` is set."""

    request_id: str
    token_id: int
    n_generated: int
    """Tokens of the answer so far, with this one."""
    finish_reason: FinishReason | None
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""


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

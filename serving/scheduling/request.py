"""Requests as the scheduler sees them: token ids and counts. No text, no sampling, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phasewise.serving.batch import Batch
from phasewise.serving.pools.contract import Demand, Estimate, Placement

FinishReason = Literal["stop", "length"]


def space_of(cache_space: str, adapter_hash: str) -> str:
    """Prefix-cache space of a cache space and an adapter: equal prefixes have equal keys and values."""
    return f"\0{adapter_hash}/{cache_space}" if adapter_hash else cache_space


@dataclass(frozen=True, slots=True)
class Request:
    """A request, which ends at the first token in `stop_token_ids` or after `max_tokens` tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty where the request ignores them."""
    estimate: Estimate | None = None
    """Expected length of the answer."""
    cache_space: str = ""
    """Prefix-cache space: keys and values are copied between requests of one space only."""
    prefill_only: bool = False
    """True if only the prompt is computed here, to be handed over to the instance that answers."""
    client: str = ""
    """Client that sent the request; waiting clients take turns."""
    takes_over: bool = True
    """False: the whole prompt is computed without prefix reuse, because logits of every token are wanted."""
    in_shadow: bool = False
    """True if the request only gets what others leave of steps, places and slots (`pacing.ShadowPacing`)."""
    adapter: int = 0
    """Number of the model's adapter that computes the request, from 1 on; 0: the base model."""
    given: tuple[int, ...] = ()
    """Answer tokens that were sampled before the request came here; `max_tokens` counts them."""
    turns: tuple[int, ...] = ()
    """Prompt positions where assistant turns begin: a later prompt may differ from there on."""

    @property
    def most_tokens(self) -> int:
        """Length of prompt and longest answer together."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A request between its arrival and its last token: it waits, or runs and owns KV slots. The first
    `n_computed` of its tokens (prompt and answer so far) have keys and values."""

    request: Request
    admission: int | None = None
    """Serial number of the first admission, its age: lower is older. None: never admitted."""
    placement: Placement | None = None
    """The sequence's KV block; None: the sequence waits."""
    n_computed: int = 0
    n_reused: int = 0
    """Prompt tokens whose keys and values were reused when the sequence was first placed."""
    generated: list[int] = field(default_factory=list)
    n_preempted: int = 0
    turn: int = 0
    """Number of the last decode step in which the sequence had a row."""
    has_started: bool = False
    """True if anything of the sequence was computed or copied since it was placed."""
    runs: tuple[int, ...] | None = None
    """`prefixes.chain` of the sequence's tokens when it was placed; None: not computed yet."""
    awaits_kv: bool = False
    """True while the prompt is computed elsewhere and its keys and values have not arrived."""
    is_restored: bool = False
    """True while keys and values of the sequence's prefix are read from a store into its block."""
    has_looked: bool = False
    """True if a store was asked for the sequence's prefix since it was placed."""
    is_pinned: bool = False
    """True while keys and values enter or leave the block, which must neither move nor be preempted."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def age(self) -> int:
        """Serial number of the first admission; lower is older."""
        assert self.admission is not None, f"{self} was never admitted"
        return self.admission

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def n_pending(self) -> int:
        """Number of tokens not yet computed. The logits after the last one give the next token."""
        return self.n_tokens - self.n_computed

    @property
    def is_prefilling(self) -> bool:
        """True if more than the last sampled token is pending, as of a prompt or after a preemption."""
        return not self.generated or self.n_pending > 1

    @property
    def can_prefill(self) -> bool:
        """True if a prefill step can compute tokens of this sequence."""
        return self.is_prefilling and self.n_pending > 0 and not (self.awaits_kv or self.is_restored)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.generated)

    def pending_ids(self, n_tokens: int) -> tuple[int, ...]:
        """The first `n_tokens` of the pending tokens."""
        start, prompt = self.n_computed, self.request.prompt_token_ids
        end = start + n_tokens
        if end <= len(prompt):
            return prompt[start:end]
        answer = self.generated[max(0, start - len(prompt)) : end - len(prompt)]
        return (*prompt[start:], *answer)

    def begin_again(self) -> None:
        """Forget all computed keys and values of the sequence."""
        self.n_computed, self.has_started, self.runs = 0, False, None
        self.is_restored = self.has_looked = False

    def demand(self, *, in_full: bool) -> Demand:
        """KV slots that the sequence needs to run now, or `in_full`: to its longest possible end."""
        most = self.request.most_tokens
        held = most if in_full else self.n_tokens
        return Demand(held, most, len(self.request.prompt_token_ids), self.request.estimate)

    def finish_reason(self) -> FinishReason | None:
        """The reason why the sequence ends with the last sampled token; None: it goes on."""
        if self.generated and self.generated[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.generated) >= self.request.max_tokens else None


class TokenOut(NamedTuple):
    """One new token of one request. A request with a `finish_reason` has ended and holds no slots."""

    request_id: str
    token_id: int
    n_generated: int
    """Number of answer tokens so far, this one included."""
    finish_reason: FinishReason | None
    n_reused: int = 0
    """Number of prompt tokens whose keys and values were reused."""


MOST_PREEMPTIONS = 3
"""Preemptions after which a request is preempted only for the oldest one, and only once more."""

DEFAULT_BATCH_TOKENS = 2048
"""Most prompt tokens in a prefill batch. Splitwise's knee: more no longer raise throughput."""
DEFAULT_SEQUENCES = 32
"""Most answers computed at the same time."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`context_length`: positions that the model has. `max_waiting`: most waiting requests; None: any."""

    context_length: int
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    max_waiting: int | None = None
    prefix_reuse: bool = True


@dataclass(slots=True)
class SchedulerCounts:
    """Counters since the start; none ever falls."""

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
    """Ids of requests, also of other batches, whose keys and values the batch copies to another block."""


class DraftRoom(NamedTuple):
    """A sequence of a decode batch, and the most draft tokens that its slice may carry."""

    sequence: LiveSequence
    most: int


class SchedulerError(AssertionError):
    """The scheduler was misused or broke its own law: a bug, never a user's mistake."""

"""A request as the scheduler sees it: token ids and counts. No text, no sampling, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phasewise.serving.blocks import SlotRange

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked. Ends at the first token in `stop_token_ids`, or after `max_tokens` tokens."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty where the request ignores them."""

    @property
    def n_slots(self) -> int:
        """KV slots that hold the request to its very end."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(slots=True)
class RunningSequence:
    """A request that owns KV slots. The first `n_computed` of its tokens have keys and values there."""

    request: Request
    slots: SlotRange
    n_computed: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.request.prompt_token_ids) + len(self.generated)

    @property
    def n_pending(self) -> int:
        """Tokens known but not yet computed: the rest of the prompt, or the token sampled last."""
        return self.n_tokens - self.n_computed

    @property
    def is_prefilling(self) -> bool:
        return not self.generated

    def finish_reason(self) -> FinishReason | None:
        """Why this sequence ends with the token sampled last; None while it goes on."""
        if self.generated and self.generated[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.generated) >= self.request.max_tokens else None


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One new token of one request. The request holds nothing any more once `finish_reason` is set."""

    request_id: str
    token_id: int
    index: int
    """0 for the first token of the answer."""
    finish_reason: FinishReason | None

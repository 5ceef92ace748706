"""The sequences of a step that a model or a head drafts token by token, and what came of their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from phasewise.serving.batch import SequenceSlice
from phasewise.serving.drafts.agreement import Agreement
from phasewise.serving.drafts.contract import NO_DRAFT, Draft
from phasewise.serving.sampling.sampling import FloatVector, Sampler
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence


class DraftState:
    """The newest draft of one request. agreement: rates of right drafts, by their place in a draft."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.draft: tuple[int, ...] = ()
        self.drafted_at = 0
        """Tokens that the sequence had when `draft` was made."""

    def settle(self, sequence: LiveSequence) -> int:
        """Note the outcome of the draft before: the number of its tokens that came."""
        came_after = sequence.generated[self.drafted_at - len(sequence.request.prompt_token_ids) :]
        n_right = 0
        for drafted, came in zip(self.draft, came_after, strict=False):
            self.agreement.saw(n_right, right=drafted == came)
            if drafted != came:
                break
            n_right += 1
        self.draft = ()
        return n_right


State = TypeVar("State", bound=DraftState)


class DraftedRow(Generic[State]):
    """A sequence that is being drafted. state: what is kept of its request between steps."""

    def __init__(self, state: State, piece: SequenceSlice, room: DraftRoom, sampler: Sampler) -> None:
        self.state = state
        self.piece = piece
        self.room = room
        self.token_ids: list[int] = []
        self._sampler = sampler
        self._chances: list[FloatVector] = []

    @property
    def sequence(self) -> LiveSequence:
        return self.room.sequence

    def rate(self, index: int) -> float:
        """The share of its drafts at this place that were right."""
        return self.state.agreement.rate(index)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """The sequence's tokens [start, end)."""
        n_prompt = len(self.sequence.request.prompt_token_ids)
        if start >= n_prompt:
            return self.sequence.generated[start - n_prompt : end - n_prompt]
        return self.sequence.token_ids[start:end]

    def propose(self, logits: FloatVector, rng: np.random.Generator) -> None:
        """One more token."""
        token_id, chances = self._sampler.propose(logits, len(self.token_ids), rng)
        self.token_ids.append(token_id)
        if chances is not None:
            self._chances.append(chances)

    def finish(self) -> Draft:
        """The draft, which `state` settles in the next step."""
        if not self.token_ids:
            return NO_DRAFT
        self.state.draft = tuple(self.token_ids)
        self.state.drafted_at = self.sequence.n_tokens
        return Draft(self.state.draft, tuple(self._chances))

"""Drafters for tests: one that knows the answers and says them as often as it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.contract import MOST_DRAFTED, NO_DRAFT, Draft
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.request import DraftRoom


class GuessingDrafter:
    """Drafts of random lengths, each token right with probability `right`. answers: token ids by request."""

    def __init__(
        self, answers: Mapping[str, Sequence[int]], right: float, vocab_size: int, seed: int = 0
    ) -> None:
        self.answers = answers
        self.right = right
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)
        self.asked: set[str] = set()
        self.n_drafted = 0

    def observe(self, batch: Batch, duration_ns: int) -> None:
        assert batch.n_tokens >= 1
        assert duration_ns >= 0

    def computed(self, batch: Batch) -> None:
        assert batch.phase == "prefill"

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        assert len(rooms) == len(samplers) == len(batch.slices)
        drafts = [self._guess(room) for room in rooms]
        self.n_drafted += sum(len(draft.token_ids) for draft in drafts)
        return drafts

    def ended(self, request_id: str) -> None:
        self.asked.discard(request_id)

    def lost(self) -> None:
        self.asked.clear()

    def _guess(self, room: DraftRoom) -> Draft:
        sequence, most = room
        self.asked.add(sequence.request_id)
        assert most >= 0
        if most == 0:
            return NO_DRAFT
        n_next = int(self.rng.integers(0, min(most, MOST_DRAFTED) + 1))
        done = len(sequence.generated)
        coming = list(self.answers[sequence.request_id][done : done + n_next])
        guesses = [
            token if self.rng.random() < self.right else int(self.rng.integers(self.vocab_size))
            for token in coming
        ]
        return Draft(tuple(guesses))

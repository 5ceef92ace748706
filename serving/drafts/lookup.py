"""Drafts by lookup: what followed where the sequence ended like this before. They cost next to nothing.

Whether the expected token came is seen at every token, drafted or not, so that rates are known while drafts
do not pay, and drafting begins again when the text begins to repeat itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.agreement import Agreement
from phasewise.serving.drafts.contract import MOST_DRAFTED, NO_DRAFT, Draft, DraftMemory
from phasewise.serving.drafts.lengths import choose_lengths, fixed_lengths
from phasewise.serving.drafts.repeats import MOST_MATCHED, Repeats
from phasewise.serving.drafts.step_costs import StepCosts
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.scheduler_terms import DraftRoom

_FIRST_RATES = (0.25, 0.4, 0.55, 0.7, 0.8, 0.9)
_KIND_FROM = (2, 3, 4, 6, 10, 18)  # tokens of a match from which on it is of a kind
_KIND_OF = [
    max(0, sum(n >= least for least in _KIND_FROM) - 1) for n in range(MOST_MATCHED + MOST_DRAFTED + 1)
]
_LEAST_CHANCE = 0.02  # of a draft and all before it, for it to be thought of


class RequestLookup:
    """Index of one request's tokens as far as they were read, and how often it was like its own past."""

    def __init__(self, agreement: Agreement) -> None:
        self.repeats = Repeats()
        self.agreement = agreement

    @property
    def n_matched(self) -> int:
        """Tokens of the match at the end; 0: there is none."""
        return self.repeats.n_matched

    def read(self, sequence: LiveSequence) -> None:
        """Take the tokens that are new of it."""
        repeats = self.repeats
        n_prompt = len(sequence.request.prompt_token_ids)
        if len(repeats) == 0:
            repeats.extend(sequence.token_ids)
            return
        for token_id in sequence.generated[len(repeats) - n_prompt :]:
            if repeats.n_matched:  # after no match nothing was expected
                self.agreement.saw(_KIND_OF[repeats.n_matched], right=token_id == repeats.expected)
            repeats.push(token_id)

    def chances(self, most: int) -> list[float]:
        """Chances of the next drafts, each with all before it."""
        chance, chances, n_matched = 1.0, [], self.n_matched
        if n_matched:
            for n in range(n_matched, n_matched + min(most, MOST_DRAFTED)):
                chance *= self.agreement.rate(_KIND_OF[n])
                if chance < _LEAST_CHANCE:
                    break
                chances.append(chance)
        return chances

    def following(self, most: int) -> tuple[int, ...]:
        """That many drafts."""
        return self.repeats.following(most)


class LookupDrafter(DraftMemory[RequestLookup]):
    """A Drafter without a model. `most_rows`: of one step. n_tokens: as `DraftSource.n_tokens`."""

    def __init__(self, costs: StepCosts, most_rows: int, n_tokens: int | None = None) -> None:
        agreement = Agreement(_FIRST_RATES)
        super().__init__(costs, lambda _request_id: RequestLookup(agreement.of_request()))
        self._most_rows = most_rows
        self._n_tokens = n_tokens

    def computed(self, batch: Batch) -> None:
        """Nothing is computed of prompts."""

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        """As Drafter.draft."""
        requests = [self._read(room.sequence) for room in rooms]
        return [
            Draft(request.following(n)) if n else NO_DRAFT
            for request, n in zip(requests, self._lengths(requests, rooms), strict=True)
        ]

    def _lengths(self, requests: Sequence[RequestLookup], rooms: Sequence[DraftRoom]) -> list[int]:
        if len(rooms) >= self._most_rows:
            return [0] * len(rooms)
        pairs = list(zip(requests, rooms, strict=True))
        if self._n_tokens is not None:
            most = [room.most if request.n_matched else 0 for request, room in pairs]
            return fixed_lengths(most, self._n_tokens, self._most_rows)
        if not self._costs.is_known:
            return [0] * len(rooms)
        chances = [request.chances(room.most) for request, room in pairs]
        most_rows = min(self._most_rows, self._costs.most_rows)
        return choose_lengths(chances, self._costs.cost_ns, most_rows)

    def _read(self, sequence: LiveSequence) -> RequestLookup:
        request = self._of(sequence.request_id)
        request.read(sequence)
        return request

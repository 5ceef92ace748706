"""Drafts by lookup: the tokens that followed an earlier place where the sequence ended as it ends now, at
next to no cost. Each new token is compared with the expected one, drafted or not, so that rates are known
while drafts do not pay, and drafting begins again when the text begins to repeat itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.contract import MOST_DRAFTED, NO_DRAFT, Agreement, Draft, DraftMemory, StepCosts
from phasewise.serving.drafts.gain import choose_lengths, fixed_lengths
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence

_ORDERS = (6, 2)
"""n of the n-grams that are looked up, the longest first."""

MOST_MATCHED = 32
"""Largest counted length of a match, in tokens."""


class Repeats:
    """Index of one sequence's tokens. Finds an earlier place that ended as the sequence ends now, the longest
    match of two n-gram tables, whose next tokens may follow again (Saxena 2023)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _ORDERS)
        self._next: int | None = None  # index of the token that followed the match
        self._matched = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_matched(self) -> int:
        """Length of the match in tokens, at most MOST_MATCHED; 0: there is no match."""
        return self._matched

    @property
    def expected(self) -> int | None:
        """The token that followed the match; None: there is no match."""
        return None if self._next is None else self._tokens[self._next]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add new tokens, and look up a match for the last one alone."""
        *first, last = token_ids
        tokens = self._tokens
        for token_id in first:
            tokens.append(token_id)
            self._enter()
        self._next, self._matched = None, 0
        self.push(last)

    def push(self, token_id: int) -> None:
        """Add one token. The match goes on if the token was expected; a longer match takes its place."""
        if self._next is not None and self._tokens[self._next] == token_id:
            self._next += 1
            self._matched = min(self._matched + 1, MOST_MATCHED)
        else:
            self._next, self._matched = None, 0
        self._tokens.append(token_id)
        if self._matched < _ORDERS[0]:
            self._look_up()
        self._enter()

    def following(self, most: int) -> tuple[int, ...]:
        """The `most` tokens that followed the match, () without one; a match at the end repeats itself."""
        start, tokens = self._next, self._tokens
        if start is None:
            return ()
        continuation = tokens[start : start + most]
        period = len(continuation)
        while len(continuation) < most:
            continuation.append(continuation[len(continuation) - period])
        return tuple(continuation)

    def _look_up(self) -> None:
        for order, after in zip(_ORDERS, self._after, strict=True):
            place = after.get(tuple(self._tokens[-order:]))
            if place is not None:
                matched = self._common(place)
                if matched > self._matched:
                    self._next, self._matched = place, matched
                return

    def _common(self, place: int) -> int:
        """Length of the common end of the tokens before `place` and of all tokens, at most MOST_MATCHED."""
        tokens, end = self._tokens, len(self._tokens)
        n = 0
        while n < min(place, MOST_MATCHED) and tokens[place - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

    def _enter(self) -> None:
        end = len(self._tokens)
        for order, after in zip(_ORDERS, self._after, strict=True):
            if end >= order:
                after[tuple(self._tokens[end - order :])] = end


_FIRST_RATES = (0.25, 0.4, 0.55, 0.7, 0.8, 0.9)
_KIND_FROM = (2, 3, 4, 6, 10, 18)  # tokens of a match from which on it is of a kind
_KIND_OF = [
    max(0, sum(n >= least for least in _KIND_FROM) - 1) for n in range(MOST_MATCHED + MOST_DRAFTED + 1)
]
_LEAST_CHANCE = 0.02  # of a draft and all before it, for it to be thought of


class RequestLookup:
    """Index of one request's tokens as far as they were read, and rates at which expected tokens came."""

    def __init__(self, agreement: Agreement) -> None:
        self.repeats = Repeats()
        self.agreement = agreement

    @property
    def n_matched(self) -> int:
        """Length of the match at the end, in tokens; 0: there is no match."""
        return self.repeats.n_matched

    def read(self, sequence: LiveSequence) -> None:
        """Add the sequence's new tokens to the index, and note which of them were expected."""
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
        """Probabilities of the next drafts, each that the draft and all before it are right."""
        chance, chances, n_matched = 1.0, [], self.n_matched
        if n_matched:
            for n in range(n_matched, n_matched + min(most, MOST_DRAFTED)):
                chance *= self.agreement.rate(_KIND_OF[n])
                if chance < _LEAST_CHANCE:
                    break
                chances.append(chance)
        return chances

    def following(self, most: int) -> tuple[int, ...]:
        return self.repeats.following(most)


class LookupDrafter(DraftMemory[RequestLookup]):
    """A Drafter by lookup. `most_rows`: rows of one step. `n_tokens`: as `DraftSource.n_tokens`."""

    def __init__(self, costs: StepCosts, most_rows: int, n_tokens: int | None = None) -> None:
        agreement = Agreement(_FIRST_RATES)
        super().__init__(costs, lambda _request_id: RequestLookup(agreement.of_request()))
        self._most_rows = most_rows
        self._n_tokens = n_tokens

    def computed(self, batch: Batch) -> None:
        """Do nothing: `draft` reads the prompts."""

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
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

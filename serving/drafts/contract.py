"""The contract between the engine and a source of drafts, and what a draft is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phasewise.serving.batch import Batch
from phasewise.serving.drafts.step_costs import StepCosts
from phasewise.serving.sampling.sampling import FloatVector, Sampler
from phasewise.serving.scheduling.request import DraftRoom

MOST_DRAFTED = 15
"""Drafts of one sequence in one step: with the token before them 16 rows."""


class Draft(NamedTuple):
    """Tokens that an answer may go on with."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[FloatVector, ...] = ()
    """For each token, the probabilities [vocab] that it was drawn from, where it was drawn by chance."""


NO_DRAFT = Draft()


Known = TypeVar("Known")


class DraftMemory(Generic[Known]):
    """A Drafter's costs, and what it knows of each request. `begun`: knowledge of a new one, by its id."""

    def __init__(self, costs: StepCosts, begun: Callable[[str], Known]) -> None:
        self._costs = costs
        self._begun = begun
        self._known: dict[str, Known] = {}

    def observe(self, batch: Batch, duration_ns: int) -> None:
        """As Drafter.observe."""
        self._costs.observe(batch.n_tokens, duration_ns)

    def ended(self, request_id: str) -> None:
        """As Drafter.ended."""
        self._known.pop(request_id, None)

    def lost(self) -> None:
        """As Drafter.lost."""
        self._known.clear()

    def _of(self, request_id: str) -> Known:
        if request_id not in self._known:
            self._known[request_id] = self._begun(request_id)
        return self._known[request_id]


class Drafter(Protocol):
    """A source of drafts. It reads of a sequence what it has not read yet; one thread calls all of it."""

    def observe(self, batch: Batch, duration_ns: int) -> None:
        """Note how long a decode step took, its drafts included and the time of drafting left out."""
        ...

    def computed(self, batch: Batch) -> None:
        """Note that a prefill batch was computed, its copies included."""
        ...

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        """For each slice of a decode batch a draft of at most its room; none where none pays."""
        ...

    def ended(self, request_id: str) -> None:
        """Forget what is known of a request. One that is not known is no mistake."""
        ...

    def lost(self) -> None:
        """Keys and values are lost: forget every request."""
        ...

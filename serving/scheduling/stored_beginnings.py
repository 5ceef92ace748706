"""Beginnings of prompts that a store outside has: requests that wait for theirs, and what it may take.

Integers only: the store is a function that is asked how much of a prompt it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from phasewise.serving.pools.contract import Placement
from phasewise.serving.pools.state_places import KeptCopy
from phasewise.serving.scheduling.prefixes import Computed, PrefixIndex
from phasewise.serving.scheduling.request import LiveSequence

LEAST_RESTORED_TOKENS = 128
"""The store is read where it has so many tokens more than memory has."""

FindStored = Callable[[tuple[int, ...], str], int]
"""The number of the first of these tokens that the store has, for requests of this space."""


CopiesAlong = Callable[[Computed], tuple[KeptCopy, ...]]


class WantedBeginning(NamedTuple):
    """A request whose beginning may be read into its block, which stays where it is."""

    request_id: str
    token_ids: tuple[int, ...]
    space: str
    placement: Placement


class StoredBeginnings:
    """Asks a store for the beginnings of a scheduler's prompts. copies_along: of states of a sequence; None:
    there are none.
    """

    def __init__(
        self, find: FindStored, prefixes: PrefixIndex, copies_along: CopiesAlong | None = None
    ) -> None:
        self._find = find
        self._copies_along = copies_along
        self._computed: list[Computed] = []
        self._wanted: list[LiveSequence] = []
        prefixes.report_to(self._computed)

    def is_wanted(self, sequence: LiveSequence, n_ready: int) -> bool:
        """True if the store has so much more than `n_ready` that it is worth a wait. It is asked once."""
        if sequence.has_looked:
            return False
        n_stored = self._find(sequence.token_ids, sequence.request.cache_space)
        sequence.has_looked, sequence.is_restored = True, n_stored - n_ready >= LEAST_RESTORED_TOKENS
        if sequence.is_restored:
            self._wanted.append(sequence)
        return sequence.is_restored

    def take_wanted(self) -> list[WantedBeginning]:
        """Requests that wait since it was asked last. For when no copies are to be done: their sources may
        lie in a block that has a new owner."""
        wanted = [
            WantedBeginning(
                waiting.request_id, waiting.token_ids, waiting.request.cache_space, waiting.placement
            )
            for waiting in self._wanted
            if waiting.is_restored and waiting.placement is not None
        ]
        self._wanted.clear()
        return wanted

    def take_computed(self) -> list[Computed]:
        """Prompts that became whole and sequences that ended since it was asked last."""
        computed = list(self._computed)
        self._computed.clear()
        if self._copies_along is not None:
            for sequence in computed:
                sequence.states = self._copies_along(sequence)
        return computed

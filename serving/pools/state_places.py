"""Places for states of constant size, which some layers keep for each sequence in place of keys and values. A
place is free, belongs to a request, is set aside for a copy in the step under way, or holds a kept copy. Kept
copies give way to requests. Integers only."""

from __future__ import annotations

from collections.abc import Callable

from phasewise._words import counted


class StatesError(AssertionError):
    """Places were misused or have lost count: a bug, never a user's mistake."""


class StatePlaces:
    """Places for states, and the use of each. `first_slot`: number of the first place."""

    def __init__(self, n_places: int, first_slot: int) -> None:
        self.n_places = n_places
        self.first_slot = first_slot
        self.give_way: Callable[[], int] | None = None
        """Chooses and forgets a kept copy, and returns its place; None: no copies are kept."""
        self._free = list(range(n_places - 1, -1, -1))
        self._owned: dict[str, int] = {}
        self._set_aside: set[int] = set()
        self._kept: set[int] = set()

    @property
    def n_spare(self) -> int:
        """Number of places that can be set aside now."""
        return len(self._free) + len(self._kept)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def give(self, owner: str) -> int | None:
        """Give `owner` a place; None: requests have them all."""
        place = self._take()
        if place is not None:
            self._owned[owner] = place
        return place

    def place_of(self, owner: str) -> int:
        return self._owned[owner]

    def return_of(self, owner: str) -> None:
        """Free the place of an ended request, unless its state is kept there."""
        place = self._owned.pop(owner, None)
        if place is not None:
            self._free.append(place)

    def set_aside(self) -> int:
        """Set a place aside for a copy. StatesError: none is spare."""
        place = self._take()
        if place is None:
            raise StatesError("no place for a copy of a state is spare")
        self._set_aside.add(place)
        return place

    def keep(self, place: int) -> None:
        """Keep the copy that a step has written to a place set aside, until the place is needed."""
        self._set_aside.remove(place)
        self._kept.add(place)

    def keep_of(self, owner: str) -> int:
        """Keep the state of `owner`, until its place is needed; the request then has no place."""
        place = self._owned.pop(owner)
        self._kept.add(place)
        return place

    def swap(self, owner: str, place: int) -> None:
        """Let a copy that was set aside be the state of `owner`, and free the place of the state before."""
        self._set_aside.remove(place)
        self._free.append(self._owned[owner])
        self._owned[owner] = place

    def put_back(self, place: int) -> None:
        """Free a place that was set aside and is not needed."""
        self._set_aside.remove(place)
        self._free.append(place)

    def free(self, place: int) -> None:
        """Free the place of a kept copy."""
        self._kept.remove(place)
        self._free.append(place)

    def check(self) -> None:
        """Raise StatesError unless every place has exactly one use."""
        places = [*self._free, *self._owned.values(), *self._set_aside, *self._kept]
        if sorted(places) != list(range(self.n_places)):
            raise StatesError(f"of {counted(self.n_places, 'place')} for states: {sorted(places)}")

    def _take(self) -> int | None:
        if not self._free and self._kept and self.give_way is not None:
            self.free(self.give_way())
        return self._free.pop() if self._free else None

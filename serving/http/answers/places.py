"""The answers that give up their places, when all places are taken and another client asks for one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """An answer of which nothing has been computed or sent yet."""

    @property
    def owner(self) -> str:
        """The client that asked for it."""
        ...

    @property
    def n_places(self) -> int:
        """Its choices: each holds one place."""
        ...


Answer = TypeVar("Answer", bound=Waiting)


def displaced(
    n_missing: int, owner: str, n_new: int, held: Mapping[str, int], waiting: Sequence[Answer]
) -> list[Answer]:
    """Answers that must end so that `owner` gets `n_new` places, `n_missing` of which are taken.

    Each is the newest that waits of the client which then holds most places. Only a client that holds more
    than `owner` will hold gives way. Empty where that frees too few: then none gives way.

    held: places of each client, computed and waiting. waiting: in order of arrival.
    """
    left = dict(held)
    queues: dict[str, list[Answer]] = {}
    for answer in waiting:
        queues.setdefault(answer.owner, []).append(answer)
    chosen: list[Answer] = []
    while n_missing > 0:
        largest = max(queues, key=lambda client: left[client], default=owner)
        if left.get(largest, 0) <= left.get(owner, 0) + n_new:
            return []
        newest = queues[largest].pop()
        if not queues[largest]:
            del queues[largest]
        left[largest] -= newest.n_places
        n_missing -= newest.n_places
        chosen.append(newest)
    return chosen

"""Fair sharing: a client's share of what runs, and who gives way for it. Pure.

Each of the n clients that run or wait has a share: places // n of the places for running requests, at least
one, and slots // n of the KV slots. A client may hold more until another one waits that holds less than its
share of places, or of which nothing runs: then the youngest request of the client that holds most gives way,
as for want of KV slots. A client keeps its oldest request whatever it holds, so that it always gets on, and
no two clients take the same slots from each other again and again. Decision 0072.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from phasewise.serving.scheduling.request import LiveSequence


class ClientShares:
    """Shares of this moment. running: by age. waiting: clients whose requests wait."""

    def __init__(
        self, places: int, slots: int, running: Sequence[LiveSequence], waiting: Collection[str]
    ) -> None:
        self._running = list(running)
        clients = {sequence.request.client for sequence in running}.union(waiting)
        n_clients = max(1, len(clients))
        self.places = max(1, places // n_clients)
        self.slots = slots // n_clients
        self._places = dict.fromkeys(clients, 0)
        self._slots = dict.fromkeys(clients, 0)
        for sequence in running:
            self._count(sequence, 1)

    def gave_way(self, sequence: LiveSequence) -> None:
        """It is about to leave its block."""
        self._running.remove(sequence)
        self._count(sequence, -1)

    def has_nothing(self, client: str) -> bool:
        """True if nothing runs of it."""
        return self._places[client] == 0

    def allows(self, sequence: LiveSequence, n_slots: int) -> bool:
        """True if its client holds no more than its share with this request, which wants `n_slots`."""
        client = sequence.request.client
        return self._places[client] < self.places and self._slots[client] + n_slots <= self.slots

    def giver_of_place(self) -> LiveSequence | None:
        """The request that gives way for a place; None: no client holds more than its share."""
        return self._youngest(self._greediest(self._places, self.places))

    def giver_of_slots(self) -> LiveSequence | None:
        """The request that gives way for slots; None: no client holds more than its share."""
        return self._youngest(self._greediest(self._slots, self.slots))

    def takes_too_much(self, client: str) -> bool:
        """True if it holds more slots than its share, beside other clients."""
        return len(self._slots) > 1 and self._slots[client] > self.slots

    def _greediest(self, held: dict[str, int], share: int) -> Iterable[str]:
        """Clients that hold more than their share, those that hold most before others."""
        return sorted((client for client in held if held[client] > share), key=lambda client: -held[client])

    def _youngest(self, clients: Iterable[str]) -> LiveSequence | None:
        for client in clients:
            own = [sequence for sequence in self._running if sequence.request.client == client]
            for sequence in reversed(own[1:]):
                if not sequence.is_pinned:
                    return sequence
        return None

    def _count(self, sequence: LiveSequence, sign: int) -> None:
        assert sequence.placement is not None
        self._places[sequence.request.client] += sign
        self._slots[sequence.request.client] += sign * sequence.placement.n_slots

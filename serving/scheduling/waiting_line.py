"""Admission queue: requests that wait for KV slots, and which of them is next. Pure: no clock, no pool."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import takewhile

from phasewise.serving.scheduling.client_turns import ClientTurns
from phasewise.serving.scheduling.request import LiveSequence
from phasewise.serving.scheduling.waiting_orders import WaitingOrder, first_come


class WaitingLine:
    """Requests that were preempted come first, the oldest before the others. Behind them clients take turns.

    A request with k requests of its own client before it, and n other clients, waits for at most
    k + (k + 1) * n requests that were never admitted, however many each of the others has sent, unless its
    client is passed over because it holds its share of what runs (`client_shares`).
    Of requests of one client alone `order` chooses the next, and one that it passes over counts by whom.
    """

    def __init__(self, order: WaitingOrder = first_come) -> None:
        self._order = order
        self._preempted: list[LiveSequence] = []
        self._turns: ClientTurns[LiveSequence] = ClientTurns()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._turns)

    def __iter__(self) -> Iterator[LiveSequence]:
        """Preempted ones by age, then client by client."""
        yield from self._preempted
        yield from self._turns

    @property
    def n_clients(self) -> int:
        """Clients with requests that were never admitted."""
        return len(self._turns.clients)

    @property
    def clients(self) -> set[str]:
        """Clients with requests here, of both kinds."""
        return {sequence.request.client for sequence in self._preempted}.union(self._turns.clients)

    @property
    def heads(self) -> Iterator[LiveSequence]:
        """The request of each client that is next among its own, in the order of their turns."""
        seen = set()
        for sequence in self._preempted:
            if sequence.request.client not in seen:
                seen.add(sequence.request.client)
                yield sequence
        for client in self._turns.clients:
            if client not in seen:
                yield self._order(self._turns.queue(client))

    def is_behind_older(self, sequence: LiveSequence) -> bool:
        """True if a request that was preempted is older."""
        return bool(self._preempted) and self._preempted[0].age < sequence.age

    def join(self, sequence: LiveSequence) -> None:
        """A request that was never admitted, behind all others of its client."""
        self._turns.join(sequence.request.client, sequence)

    def rejoin(self, sequence: LiveSequence) -> None:
        """A request that was preempted."""
        insort(self._preempted, sequence, key=lambda preempted: preempted.age)

    def take(self, sequence: LiveSequence) -> None:
        """Remove a request that is admitted: its client's turn is over."""
        if sequence.admission is not None:
            self._preempted.remove(sequence)
            return
        client = sequence.request.client
        for older in takewhile(lambda queued: queued is not sequence, self._turns.queue(client)):
            older.n_overtaken += 1
        self._turns.take_item(client, sequence)

    def remove(self, sequence: LiveSequence) -> None:
        """A request that ends while it waits; its client keeps its place. ValueError: it does not wait."""
        if sequence.admission is not None:
            self._preempted.remove(sequence)
        else:
            self._turns.remove(sequence.request.client, sequence)

"""Admission queue: requests that wait for KV slots, and which of them is next. Pure: no clock, no pool."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from typing import Generic, TypeVar

from phasewise.serving.scheduling.request import LiveSequence

Item = TypeVar("Item")


class ClientTurns(Generic[Item]):
    """Round-robin queue of clients, each with a queue in order of arrival. The client at the head gives one
    item and goes to the end: an item with k of its client before it waits for at most k + 1 of each other."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        self._n_items = 0

    def __len__(self) -> int:
        return self._n_items

    def __iter__(self) -> Iterator[Item]:
        """Items client by client, in the order of the clients' turns."""
        for queue in self._queues.values():
            yield from queue

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients that have items, in the order of their turns."""
        return tuple(self._queues)

    @property
    def longest(self) -> str | None:
        """The client with the most items; None: there are no items."""
        return max(self._queues, key=self.count, default=None)

    def count(self, client: str) -> int:
        return len(self._queues.get(client, ()))

    def head(self, client: str | None = None) -> Item:
        """The item that `take` gives next (client None: of the next client). IndexError: there is none."""
        return self._queues[self._next(client)][0]

    def join(self, client: str, item: Item) -> None:
        """Append an item behind all others of its client."""
        self._queues.setdefault(client, deque()).append(item)
        self._n_items += 1

    def take(self, client: str | None = None) -> Item:
        """Take the first item of `client` (None: of the next), whose turn ends. IndexError: there is none."""
        client = self._next(client)
        item = self._queues[client].popleft()
        self._queues.move_to_end(client)
        self._took(client)
        return item

    def take_item(self, client: str, item: Item) -> None:
        """Remove any item of `client`, whose turn is then over. ValueError: the item is not in the queue."""
        self.remove(client, item)
        if client in self._queues:
            self._queues.move_to_end(client)

    def take_last(self, client: str) -> Item:
        """Remove and return the newest item of `client`, which keeps its turn. IndexError: there is none."""
        item = self._queues[self._next(client)].pop()
        self._took(client)
        return item

    def remove(self, client: str, item: Item) -> None:
        """Remove an item; `client` keeps its turn. ValueError: the item is not in the queue."""
        if client not in self._queues:
            raise ValueError(f"{item} does not wait")
        self._queues[client].remove(item)
        self._took(client)

    def _next(self, client: str | None) -> str:
        if client is None:
            client = next(iter(self._queues), "")
        if client not in self._queues:
            raise IndexError("nothing waits")
        return client

    def _took(self, client: str) -> None:
        self._n_items -= 1
        if not self._queues[client]:
            del self._queues[client]


class ClientShares:
    """Each client's equal share of places (running sequences) and slots now, and what it holds. `running`:
    sequences by age. `waiting`: clients with waiting requests."""

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
        """Stop counting a sequence that is about to give its block back."""
        self._running.remove(sequence)
        self._count(sequence, -1)

    def has_nothing(self, client: str) -> bool:
        return self._places[client] == 0

    def allows(self, sequence: LiveSequence, n_slots: int) -> bool:
        """True if the sequence's client stays within its shares with `n_slots` more."""
        client = sequence.request.client
        return self._places[client] < self.places and self._slots[client] + n_slots <= self.slots

    def giver_of_place(self) -> LiveSequence | None:
        """The sequence to preempt for a place; None: no client holds more than its share."""
        return self._giver(self._places, self.places)

    def giver_of_slots(self) -> LiveSequence | None:
        """The sequence to preempt for slots; None: no client holds more than its share."""
        return self._giver(self._slots, self.slots)

    def takes_too_much(self, client: str) -> bool:
        """True if the client holds more slots than its share while there are other clients."""
        return len(self._slots) > 1 and self._slots[client] > self.slots

    def _giver(self, held: dict[str, int], share: int) -> LiveSequence | None:
        """A client's youngest sequence, not its only one; clients with most beyond `share` come first."""
        greedy = [client for client in held if held[client] > share]
        for client in sorted(greedy, key=lambda client: -held[client]):
            own = [sequence for sequence in self._running if sequence.request.client == client]
            for sequence in reversed(own[1:]):
                if not sequence.is_pinned:
                    return sequence
        return None

    def _count(self, sequence: LiveSequence, sign: int) -> None:
        assert sequence.placement is not None
        self._places[sequence.request.client] += sign
        self._slots[sequence.request.client] += sign * sequence.placement.n_slots


class WaitingLine:
    """Line of waiting requests: preempted ones first, by age; behind them clients take turns. A request with
    k requests of its own client before it, and n other clients, waits for at most k + (k + 1) * n
    never-admitted requests, unless its client is passed over because it holds its share. One client's own
    requests are first come, first served."""

    def __init__(self) -> None:
        self._preempted: list[LiveSequence] = []
        self._turns: ClientTurns[LiveSequence] = ClientTurns()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._turns)

    def __iter__(self) -> Iterator[LiveSequence]:
        """Preempted requests by age, then the others client by client."""
        yield from self._preempted
        yield from self._turns

    @property
    def n_clients(self) -> int:
        """Number of clients with requests that were never admitted."""
        return len(self._turns.clients)

    @property
    def clients(self) -> set[str]:
        """Clients with waiting requests, preempted or never admitted."""
        return {sequence.request.client for sequence in self._preempted}.union(self._turns.clients)

    @property
    def heads(self) -> Iterator[LiveSequence]:
        """The next request of each client, in the order of their turns."""
        seen = set()
        for sequence in self._preempted:
            if sequence.request.client not in seen:
                seen.add(sequence.request.client)
                yield sequence
        for client in self._turns.clients:
            if client not in seen:
                yield self._turns.head(client)

    def is_behind_older(self, sequence: LiveSequence) -> bool:
        """True if an older request waits that was preempted."""
        return bool(self._preempted) and self._preempted[0].age < sequence.age

    def join(self, sequence: LiveSequence) -> None:
        """Append a request that was never admitted behind all others of its client."""
        self._turns.join(sequence.request.client, sequence)

    def rejoin(self, sequence: LiveSequence) -> None:
        """Add a request that was preempted."""
        insort(self._preempted, sequence, key=lambda preempted: preempted.age)

    def take(self, sequence: LiveSequence) -> None:
        """Remove a request that is being admitted; the client's turn is then over."""
        if sequence.admission is not None:
            self._preempted.remove(sequence)
            return
        self._turns.take_item(sequence.request.client, sequence)

    def remove(self, sequence: LiveSequence) -> None:
        """Remove an ended request; its client keeps its turn. ValueError: it does not wait."""
        if sequence.admission is not None:
            self._preempted.remove(sequence)
        else:
            self._turns.remove(sequence.request.client, sequence)

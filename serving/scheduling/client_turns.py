"""Fair queueing (round robin): a queue for each client, of which one item at a time is taken. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ClientTurns(Generic[Item]):
    """Each client has a queue in order of arrival. The client at the head gives one item and goes to the end,
    so an item with k of its own client before it waits for at most k + 1 of each other client, however many
    they sent.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        self._n_items = 0

    def __len__(self) -> int:
        return self._n_items

    def __iter__(self) -> Iterator[Item]:
        """Client by client, in the order of their turns."""
        for queue in self._queues.values():
            yield from queue

    @property
    def clients(self) -> tuple[str, ...]:
        """Clients with items here, in the order of their turns."""
        return tuple(self._queues)

    @property
    def longest(self) -> str | None:
        """The client with most items; None: there are none."""
        return max(self._queues, key=self.count, default=None)

    def count(self, client: str) -> int:
        """Items of one client."""
        return len(self._queues.get(client, ()))

    def head(self, client: str | None = None) -> Item:
        """The item that `take` gives next. IndexError: there is none."""
        return self._queues[self._next(client)][0]

    def queue(self, client: str) -> Sequence[Item]:
        """The items of a client that has some, in the order of arrival."""
        return self._queues[client]

    def join(self, client: str, item: Item) -> None:
        """Behind all others of its client."""
        self._queues.setdefault(client, deque()).append(item)
        self._n_items += 1

    def take(self, client: str | None = None) -> Item:
        """Remove the head of `client` (None: of the next), whose turn is over. IndexError: there is none."""
        client = self._next(client)
        item = self._queues[client].popleft()
        self._queues.move_to_end(client)
        self._took(client)
        return item

    def take_item(self, client: str, item: Item) -> None:
        """Remove any item of `client`, whose turn is over. ValueError: it is not here."""
        self.remove(client, item)
        if client in self._queues:
            self._queues.move_to_end(client)

    def take_last(self, client: str) -> Item:
        """Remove a client's newest item; the client keeps its place. IndexError: there is none."""
        item = self._queues[self._next(client)].pop()
        self._took(client)
        return item

    def remove(self, client: str, item: Item) -> None:
        """Remove an item that is no longer wanted; its client keeps its place. ValueError: it is not here."""
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

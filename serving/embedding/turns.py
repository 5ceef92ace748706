"""The queue of one device. Clients take turns, an input each. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """An input that a client wants computed."""

    @property
    def owner(self) -> str: ...


Item = TypeVar("Item", bound=Owned)


class InputTurns(Generic[Item]):
    """A queue in which inputs that wait again come first. Behind them each client has a queue, and the
    queues take turns: an input with k of its own client before it waits for at most k + 1 of each other
    client, however many they sent.
    """

    def __init__(self) -> None:
        self._again: deque[Item] = deque()
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._again or self._queues)

    def __iter__(self) -> Iterator[Item]:
        yield from self._again
        for queue in self._queues.values():
            yield from queue

    @property
    def head(self) -> Item:
        """The input that `take` gives next. IndexError: nothing waits."""
        if self._again:
            return self._again[0]
        if not self._queues:
            raise IndexError("nothing waits")
        return next(iter(self._queues.values()))[0]

    def join(self, one: Item) -> None:
        """Behind all others of its client."""
        self._queues.setdefault(one.owner, deque()).append(one)

    def rejoin(self, one: Item) -> None:
        """Before everything."""
        self._again.appendleft(one)

    def take(self) -> Item:
        """Remove the head; its client's turn is over. IndexError: nothing waits."""
        if self._again:
            return self._again.popleft()
        if not self._queues:
            raise IndexError("nothing waits")
        owner, queue = self._queues.popitem(last=False)
        one = queue.popleft()
        if queue:
            self._queues[owner] = queue
        return one

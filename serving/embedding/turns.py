"""The queue of one device. Clients take turns, an input each. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from phasewise.serving.scheduling.waiting_line import ClientTurns


class Owned(Protocol):
    """An input that a client wants computed."""

    @property
    def owner(self) -> str: ...


Item = TypeVar("Item", bound=Owned)


class InputTurns(Generic[Item]):
    """A queue in which inputs that wait again come first. Behind them clients take turns."""

    def __init__(self) -> None:
        self._again: deque[Item] = deque()
        self._turns: ClientTurns[Item] = ClientTurns()

    def __bool__(self) -> bool:
        return bool(self._again or self._turns)

    def __iter__(self) -> Iterator[Item]:
        yield from self._again
        yield from self._turns

    @property
    def head(self) -> Item:
        """The input that `take` gives next. IndexError: nothing waits."""
        return self._again[0] if self._again else self._turns.head()

    def join(self, owned: Item) -> None:
        """Behind all others of its client."""
        self._turns.join(owned.owner, owned)

    def rejoin(self, owned: Item) -> None:
        """Before everything."""
        self._again.appendleft(owned)

    def take(self) -> Item:
        """Remove the head; its client's turn is over. IndexError: nothing waits."""
        return self._again.popleft() if self._again else self._turns.take()

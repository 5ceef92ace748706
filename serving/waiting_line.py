"""Requests that wait for KV slots, and which of them is next. Pure: no clock, no pool."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator

from phasewise.serving.request import LiveSequence


class WaitingLine:
    """Requests that were preempted come first, the oldest before the others. Behind them clients take turns.

    Each client has a queue in order of arrival. The client at the head gives one request and goes to the end,
    so a request with k requests of its own client before it, and n other clients, waits for at most
    k + (k + 1) * n requests that were never admitted, however many each of the others has sent.
    Requests of one client alone are first come, first served.
    """

    def __init__(self) -> None:
        self._preempted: list[LiveSequence] = []
        self._queues: OrderedDict[str, deque[LiveSequence]] = OrderedDict()
        self._n_queued = 0

    def __len__(self) -> int:
        return len(self._preempted) + self._n_queued

    def __iter__(self) -> Iterator[LiveSequence]:
        """Preempted ones by age, then client by client."""
        yield from self._preempted
        for queue in self._queues.values():
            yield from queue

    @property
    def n_clients(self) -> int:
        """Clients with requests that were never admitted."""
        return len(self._queues)

    @property
    def head(self) -> LiveSequence | None:
        """The request that is next, the same one until it is removed or one that was preempted comes."""
        if self._preempted:
            return self._preempted[0]
        return next(iter(self._queues.values()))[0] if self._queues else None

    def join(self, sequence: LiveSequence) -> None:
        """A request that was never admitted, behind all others of its client."""
        self._queues.setdefault(sequence.request.client, deque()).append(sequence)
        self._n_queued += 1

    def rejoin(self, sequence: LiveSequence) -> None:
        """A request that was preempted."""
        insort(self._preempted, sequence, key=lambda one: one.age)

    def take(self) -> LiveSequence:
        """Remove the head: it is admitted, and its client's turn is over. IndexError: the line is empty."""
        if self._preempted:
            return self._preempted.pop(0)
        if not self._queues:
            raise IndexError("no request waits")
        client, queue = self._queues.popitem(last=False)
        sequence = queue.popleft()
        self._n_queued -= 1
        if queue:
            self._queues[client] = queue
        return sequence

    def remove(self, sequence: LiveSequence) -> None:
        """A request that ends while it waits; its client keeps its place. ValueError: it does not wait."""
        if sequence.admission is not None:
            self._preempted.remove(sequence)
            return
        client = sequence.request.client
        queue = self._queues.get(client)
        if queue is None:
            raise ValueError(f"{sequence} does not wait")
        queue.remove(sequence)
        self._n_queued -= 1
        if not queue:
            del self._queues[client]

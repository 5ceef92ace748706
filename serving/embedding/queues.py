"""The queue manager, WindVE's Algorithm 1: chooses the device of an input, for any number of devices.

A device's queue holds the inputs that are not yet answered, waiting or computed. Devices of lower rank
(accelerators) are filled first, then those of the next rank (CPU instances); an input that no device can hold
is refused. Within a rank the emptiest device is next. With one accelerator and one CPU this is the paper's
algorithm; without CPU queues it is the paper's without its heterogeneous switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Depth:
    """The most that a queue holds. The paper's depths count inputs; load depends on their length (Fig. 5)."""

    inputs: int
    tokens: int

    def __add__(self, other: Depth) -> Depth:
        return Depth(self.inputs + other.inputs, self.tokens + other.tokens)

    def __sub__(self, other: Depth) -> Depth:
        return Depth(self.inputs - other.inputs, self.tokens - other.tokens)

    def scaled(self, share: float) -> Depth:
        """This share of the depth, at least one input and one token."""
        return Depth(max(1, int(self.inputs * share)), max(1, int(self.tokens * share)))


UNLIMITED = Depth(1 << 30, 1 << 40)
CPU_RANK = 1


@dataclass(slots=True)
class DeviceQueue:
    """The share of one device in the inputs in progress."""

    name: str
    rank: int
    depth: Depth
    is_up: bool = True
    """True if the device's worker is running. Where no device's is, inputs wait for a restart."""
    is_gone: bool = False
    """True if the device's worker will not be started again."""
    share: float = 1.0
    """The part of the depth that may be used now (`lane`)."""
    batch_s: float = 0.0
    """A batch's measured seconds beside its tokens."""
    inputs: int = 0
    tokens: int = 0

    @property
    def is_accelerator(self) -> bool:
        return self.rank < CPU_RANK

    def has_room(self, tokens: int) -> bool:
        """True if the queue has room for one more input of `tokens` tokens; an empty queue takes any."""
        if self.is_gone:
            return False
        if self.inputs == 0:
            return True
        fits = self.inputs + 1 <= self.depth.inputs * self.share
        return fits and self.tokens + tokens <= self.depth.tokens * self.share

    @property
    def usable(self) -> Depth:
        """The depth that may be used now."""
        return self.depth.scaled(self.share)

    @property
    def load(self) -> float:
        """The share of the depth that is taken."""
        return max(self.inputs / self.depth.inputs, self.tokens / self.depth.tokens)


@dataclass
class QueueManager:
    """Places inputs on devices until they are answered. `check` holds after every call."""

    queues: Sequence[DeviceQueue]

    def place(self, sizes: Sequence[int], *, is_owed: bool = False) -> list[int] | None:
        """A device for each input of a request, by the inputs' tokens; None: busy, and nothing is placed. A
        request is placed whole or not at all. A request larger than all depths together is placed on idle
        devices only. `is_owed`: where the depths are full, the request is placed beyond them on the least
        loaded devices."""
        places: list[int] = []
        for tokens in sizes:
            index = self._device_for(tokens)
            if index is None:
                break
            self._take(index, tokens)
            places.append(index)
        if len(places) == len(sizes):
            return places
        for index, tokens in zip(places, sizes, strict=False):
            self.release(index, tokens)
        if (self.inputs == 0 or is_owed) and not all(queue.is_gone for queue in self.queues):
            return self._spread(sizes)
        return None

    def release(self, index: int, tokens: int) -> None:
        """Free the room of an input that has been answered or is no longer wanted."""
        queue = self.queues[index]
        queue.inputs -= 1
        queue.tokens -= tokens
        self.check()

    def move(self, index: int, tokens: int) -> int | None:
        """Move an input off a device that is down; return the new device, or None where the input stays."""
        target = self._device_for(tokens)
        if target is None or target == index or not self.queues[target].is_up:
            return None
        self.release(index, tokens)
        self._take(target, tokens)
        return target

    def holds(self, wanted: Depth, n_clients: int) -> bool:
        """True if `wanted` is at most one client's equal share of all depths."""
        depths = [queue.depth for queue in self.queues if not queue.is_gone]
        return wanted.inputs * n_clients <= sum(
            depth.inputs for depth in depths
        ) and wanted.tokens * n_clients <= sum(depth.tokens for depth in depths)

    @property
    def inputs(self) -> int:
        """The number of inputs that are placed and not yet answered."""
        return sum(queue.inputs for queue in self.queues)

    @property
    def tokens(self) -> int:
        return sum(queue.tokens for queue in self.queues)

    def check(self) -> None:
        """Assert that no queue holds a negative number of inputs or tokens."""
        for queue in self.queues:
            assert queue.inputs >= 0, f"{queue.name} holds {queue.inputs} inputs"
            assert queue.tokens >= 0, f"{queue.name} holds {queue.tokens} tokens"

    def _device_for(self, tokens: int) -> int | None:
        """The emptiest device with room within the lowest rank that has room; None: no device has."""
        any_up = any(queue.is_up for queue in self.queues)
        candidates = [
            (queue.rank, queue.load, index)
            for index, queue in enumerate(self.queues)
            if queue.has_room(tokens) and queue.is_up == any_up
        ]
        return min(candidates)[2] if candidates else None

    def _take(self, index: int, tokens: int) -> None:
        self.queues[index].inputs += 1
        self.queues[index].tokens += tokens

    def _spread(self, sizes: Sequence[int]) -> list[int]:
        """Place every input on the least loaded device, beyond its depth."""
        up = [index for index, queue in enumerate(self.queues) if queue.is_up]
        usable = up or [index for index, queue in enumerate(self.queues) if not queue.is_gone]
        places = []
        for tokens in sizes:
            emptiest = min(usable, key=lambda index: self.queues[index].load)
            self._take(emptiest, tokens)
            places.append(emptiest)
        return places

"""A modelled device, t(C) = alpha C + beta, behind the real queues on a simulated clock: for machines that
are not here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.serving.embedding.depth import LatencyLine
from phasewise.serving.embedding.queues import Depth, DeviceQueue, QueueManager


@dataclass(frozen=True)
class ModelledDevice:
    """`line`: by inputs of the length that is simulated."""

    name: str
    rank: int
    line: LatencyLine
    depth: int


@dataclass(frozen=True)
class SimulatedOutcome:
    """Seconds from arrival to answer of what was accepted, in order of answers; and how much was refused."""

    latencies_s: tuple[float, ...]
    refused: int
    by_device: dict[str, int]

    @property
    def longest_s(self) -> float:
        return max(self.latencies_s, default=0.0)


def simulate(
    devices: Sequence[ModelledDevice], arrivals_s: Sequence[float], tokens: int = 75
) -> SimulatedOutcome:
    """Arrivals (ascending) through the production queues; a device computes all that waits for it as one
    batch.
    """
    manager = QueueManager(
        [
            DeviceQueue(device.name, device.rank, Depth(device.depth, device.depth * tokens))
            for device in devices
        ]
    )
    waiting: list[deque[float]] = [deque() for _ in devices]
    busy: list[list[float]] = [[] for _ in devices]
    ends: list[tuple[float, int]] = []
    latencies: list[float] = []
    by_device = {device.name: 0 for device in devices}
    refused = 0

    def begin(index: int, now_s: float) -> None:
        if busy[index] or not waiting[index]:
            return
        busy[index] = list(waiting[index])
        waiting[index].clear()
        heapq.heappush(ends, (now_s + devices[index].line.seconds(len(busy[index])), index))

    def finish(until_s: float) -> None:
        while ends and ends[0][0] <= until_s:
            now_s, index = heapq.heappop(ends)
            for arrived_s in busy[index]:
                latencies.append(now_s - arrived_s)
                manager.release(index, tokens)
            by_device[devices[index].name] += len(busy[index])
            busy[index] = []
            begin(index, now_s)

    last = 0
    while last < len(arrivals_s):
        now_s = arrivals_s[last]
        finish(now_s)
        while (
            last < len(arrivals_s) and arrivals_s[last] == now_s
        ):  # queries that come together are one batch
            places = manager.place([tokens])
            if places is None:
                refused += 1
            else:
                waiting[places[0]].append(now_s)
            last += 1
        for index in range(len(devices)):
            begin(index, now_s)
    finish(float("inf"))
    return SimulatedOutcome(tuple(latencies), refused, by_device)


def largest_concurrency(devices: Sequence[ModelledDevice], slo_s: float, most: int = 4096) -> int:
    """The most queries at once of which none is refused and all are answered within the SLO (the paper's
    metric).
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        outcome = simulate(devices, [0.0] * middle)
        if outcome.refused == 0 and outcome.longest_s <= slo_s + 1e-9:
            low = middle
        else:
            high = middle - 1
    return low

"""A day of embedding queries, sent in minutes: the figures of each of its parts, and how busy CPUs were."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from phasewise.loadtest.arrivals import RequestPace
from phasewise.loadtest.embed import EmbedClient, EmbedFigures, figures, open_loop
from phasewise.tuner.config.day import DayCurve

STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Fields of a line of CPU times: idle, and idle while a disk is waited for."""


@dataclass(frozen=True)
class DayPart:
    """One part of the day. `begin_h`: hours since midnight; `rate`: queries/s that the curve has."""

    begin_h: float
    rate: float
    figures: EmbedFigures
    cpu_share: float | None
    """Busy time of all CPUs of this machine; None where the server is elsewhere, or no time has passed."""


class CpuTimes:
    """Busy and whole times of this machine's CPUs, as Linux counts them. None where it does not."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._last = self._read()

    def share(self) -> float | None:
        """The share that was busy since the last call."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last[1] <= before[1]:
            return None
        return (self._last[0] - before[0]) / (self._last[1] - before[1])

    def _read(self) -> tuple[int, int] | None:
        try:
            with open(self._stat, encoding="ascii") as file:
                times = [int(text) for text in file.readline().split()[1:9]]  # guests are within user times
        except (OSError, ValueError):
            return None
        whole = sum(times)
        return whole - sum(times[index] for index in _IDLE), whole


async def day_of_load(
    client: EmbedClient,
    texts: Sequence[str],
    curve: DayCurve,
    instants_s: Sequence[float],
    day_s: float,
    slo_s: float | None = None,
) -> list[DayPart]:
    """Send `texts`, a request's at each instant; the parts of the day in order."""
    sent, shares = await asyncio.gather(
        open_loop(client, texts, RequestPace(None, instants_s=instants_s), 0),
        _cpu_shares(client.target.base, len(curve.rates), day_s),
    )
    part_s = day_s / len(curve.rates)
    parts = [curve.part_of(instant_s, day_s) for instant_s in instants_s]
    return [
        DayPart(
            24.0 * index / len(curve.rates),
            rate,
            figures([got for got, part in zip(sent[0], parts, strict=True) if part == index], part_s, slo_s),
            shares[index],
        )
        for index, rate in enumerate(curve.rates)
    ]


async def _cpu_shares(base: str, n_parts: int, day_s: float) -> list[float | None]:
    if urlsplit(base).hostname not in ("127.0.0.1", "::1", "localhost"):
        return [None] * n_parts
    began, times, shares = time.perf_counter(), CpuTimes(), list[float | None]()
    for part in range(1, n_parts + 1):
        await asyncio.sleep(max(0.0, began + part * day_s / n_parts - time.perf_counter()))
        shares.append(times.share())
    return shares

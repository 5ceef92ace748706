"""Times a cell by the fastest of a peer's settings."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from .cells import Cell, Setting

TRIAL_NS = 4_000_000
TRIALS = 4
LONG_NS = 20_000_000
"""A product that takes longer is tried once: a short disturbance hardly changes its time."""


class PeerTimer:
    """Prepares a cell and times the fastest of the peer's settings for it."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def prepare(self, cell: Cell) -> dict[str, Any]:
        self.best: Setting | None = None
        gc.collect()
        self.cell, self.next = cell, 0
        best_ns = float("inf")
        for setting in self.peer.settings(cell):
            ns = self._trial(setting)
            if ns < best_ns:
                self.best, best_ns = setting, ns
        assert self.best is not None
        return {"setting": self.best.name, "ns": round(best_ns), "error": self._error(self.best)}

    def time(self, calls: int) -> dict[str, Any]:
        assert self.best is not None
        runs = max(1, round(calls / self.best.products))
        return {"ns": self._run(self.best, runs), "products": runs * self.best.products}

    def _trial(self, setting: Setting) -> float:
        """Nanoseconds a product: every weight touched once, then the best of a few short timings."""
        first_runs = -(-self.cell.copies // setting.products)
        once_ns = self._run(setting, first_runs)
        trials = TRIALS if once_ns < LONG_NS * first_runs * setting.products else 1
        runs = max(1, round(TRIAL_NS * self.cell.copies / once_ns / setting.products))
        return min(self._run(setting, runs) for _ in range(trials)) / (runs * setting.products)

    def _run(self, setting: Setting, runs: int) -> int:
        copies, run = self.cell.copies, setting.run
        numbers = [(self.next + i) % copies for i in range(runs)]
        self.next = (self.next + runs) % copies
        started_ns = time.perf_counter_ns()
        for number in numbers:
            run(number)
        return time.perf_counter_ns() - started_ns

    def _error(self, setting: Setting) -> float:
        expected = self.cell.x()[0] @ self.cell.weight().T
        computed = setting.row(setting.run(0))
        return float(np.abs(computed - expected).max() / np.abs(expected).max())

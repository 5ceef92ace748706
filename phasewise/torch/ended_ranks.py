"""A thread that notices when this rank waits for one whose process has ended."""

from __future__ import annotations

import os
import select
import threading

from phasewise.cython_kernels._native import Exchange

LOOK_MS = 100
"""Between two looks at whether an ended rank is missed."""


class EndedRanks:
    """Fails the exchange once this rank waits for one whose process has ended.

    A rank that ends after its last collective fails nothing: it is missed only by a rank that has come to
    more barriers than it. Where the system has no descriptors of processes, the group's timeout ends waits.
    """

    def __init__(self, exchange: Exchange, rank: int, pids: list[int]) -> None:
        self._exchange = exchange
        self._rank = rank
        self._stop: int | None = os.eventfd(0)
        self._watched: dict[int, int] = {}
        self.ranks: list[int] = []
        for other, pid in enumerate(pids):
            if pid != os.getpid():
                self._watch_process(other, pid)
        self._thread = threading.Thread(target=self._watch, name="phasewise-ended-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Any number of times."""
        if self._stop is None:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for descriptor in (self._stop, *self._watched):
            os.close(descriptor)
        self._stop = None

    def _watch_process(self, rank: int, pid: int) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            self.ranks.append(rank)
        except (OSError, AttributeError):
            pass  # no such call here

    def _watch(self) -> None:
        stop, waiting = self._stop, select.poll()
        assert stop is not None
        for descriptor in (stop, *self._watched):
            waiting.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in waiting.poll(LOOK_MS if self.ranks else None):
                if descriptor == stop:
                    return
                self.ranks.append(self._watched[descriptor])
                waiting.unregister(descriptor)
            own = self._exchange.arrivals(self._rank)
            if any(self._exchange.arrivals(rank) < own for rank in self.ranks):
                self._exchange.fail()
                return

"""The progress of a load: one line that changes in place on a terminal, and nothing elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from phasewise.cli.status_line import StatusLine, status_line
from phasewise.loadtest.outcome import RequestOutcome


class LoadProgress:
    """An observer that counts outcomes."""

    def __init__(self, n_requests: int, status: StatusLine) -> None:
        self._n_requests = n_requests
        self._status = status
        self._n_done = 0
        self._n_failed = 0

    def __call__(self, outcome: RequestOutcome) -> bool:
        """Count an outcome; False, since this observer never stops a load."""
        self._n_done += 1
        self._n_failed += outcome.failure is not None
        self._status.show(self._line)
        return False

    def _line(self) -> str:
        failed = f", {self._n_failed} failed" if self._n_failed else ""
        return f"{self._n_done} of {self._n_requests} answered{failed}"


@contextmanager
def load_progress(n_requests: int) -> Iterator[LoadProgress]:
    """An observer of `n_requests` outcomes; its line is removed at the end."""
    with status_line(line_every_s=math.inf) as status:
        yield LoadProgress(n_requests, status)

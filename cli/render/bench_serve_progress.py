"""The progress of a load: one line that changes in place on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from phasewise.loadtest.outcome import RequestOutcome

if TYPE_CHECKING:
    from rich.live import Live

REDRAW_EVERY_S = 0.5
"""Drawing uses the client's core, which the server under test may want."""


class LoadProgress:
    """An observer that counts outcomes within `with`; the line is removed afterwards."""

    def __init__(self, n_requests: int) -> None:
        self._n_requests = n_requests
        self._n_done = 0
        self._n_failed = 0
        self._drawn_s = 0.0
        self._live: Live | None = None

    def __enter__(self) -> LoadProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, outcome: RequestOutcome) -> bool:
        """Count an outcome; False, since this observer never stops a load."""
        self._n_done += 1
        self._n_failed += outcome.failure is not None
        now_s = time.monotonic()
        if self._live is not None and now_s - self._drawn_s >= REDRAW_EVERY_S:
            self._drawn_s = now_s
            failed = f", {self._n_failed} failed" if self._n_failed else ""
            self._live.update(f"{self._n_done} of {self._n_requests} answered{failed}", refresh=True)
        return False

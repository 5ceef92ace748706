"""How far a load is: a line that changes in place on a terminal, and none elsewhere."""

from __future__ import annotations

import sys
import time

from phasewise.cli.bench_serve_outcome import Outcome

REDRAW_EVERY_S = 0.5
"""Drawing costs the client's core, which the server may want."""


class Progress:
    """Counts outcomes within `with`; the line is gone afterwards."""

    def __init__(self, n_requests: int) -> None:
        self._n_requests = n_requests
        self._n_done = 0
        self._n_failed = 0
        self._drawn_s = 0.0
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_terminal and self._drawn_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, outcome: Outcome) -> bool:
        """An observer that never stops a load."""
        self._n_done += 1
        self._n_failed += outcome.failure is not None
        now_s = time.monotonic()
        if self._is_terminal and now_s - self._drawn_s >= REDRAW_EVERY_S:
            self._drawn_s = now_s
            failed = f", {self._n_failed} failed" if self._n_failed else ""
            sys.stderr.write(f"\r\x1b[K{self._n_done} of {self._n_requests} answered{failed}")
            sys.stderr.flush()
        return False

"""A thread for work that no token waits for, done now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable

PERIOD_S = 0.5
"""Between two looks. Bounds of buckets are learnt from dozens of answers, which take longer."""


class Maintenance:
    """Calls `chore` every `period_s` until it is closed. Used around whatever the chore belongs to.

    The chore must bear being called from another thread, as `KvPool.refresh` does. Should it fail, it is not
    called again, and the failure is raised by `close`: what it keeps up to date stays as it was.
    """

    def __init__(self, chore: Callable[[], object], period_s: float = PERIOD_S) -> None:
        self._chore = chore
        self._period_s = period_s
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="phasewise-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, and raise what ended it before, if anything did. The second time: nothing."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Maintenance:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self._chore()
            except Exception as failure:  # raised by `close`
                self._failure = failure
                return

"""Ctrl-C always ends what runs, also where Python would drop it.

An exception that is raised while a weak reference's callback, a `__del__` or a function called by C runs goes
nowhere: Python only prints it. Libraries have many such callbacks, and a KeyboardInterrupt may come in any.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from typing import Any

AGAIN_S = 0.002
"""Time after which a dropped interrupt is sent again: the callback has returned, or drops it once more."""

_is_waiting = _thread.allocate_lock()


def _send_again() -> None:
    """Once for all that are dropped meanwhile."""
    if _is_waiting.acquire(blocking=False):
        time.sleep(AGAIN_S)
        _is_waiting.release()
        os.kill(os.getpid(), signal.SIGINT)


def keep_interrupts() -> None:
    """From now on an interrupt that Python drops is sent to this process again. Other errors in callbacks are
    told as before.
    """
    tell = sys.unraisablehook
    if getattr(tell, "keeps_interrupts", False):
        return

    def hook(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            tell(dropped)
            return
        while True:
            try:
                _thread.start_new_thread(_send_again, ())
                return
            except KeyboardInterrupt:  # one more, which is dropped here
                continue
            except RuntimeError:  # the interpreter is ending
                return

    hook.keeps_interrupts = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook

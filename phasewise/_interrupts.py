"""Keep Ctrl-C from being lost: it ends what runs, also where Python would drop it.

An exception that is raised while a weak reference's callback, a `__del__` or a function called by C runs goes
nowhere: Python only prints it. Libraries have many such callbacks, and a KeyboardInterrupt may come in any.
One that comes while Python shuts down would end the process by the signal, whatever its exit code is.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_S = 0.002
"""Seconds after which a dropped interrupt is sent again, perhaps to be dropped once more."""

_is_waiting = _thread.allocate_lock()


def _send_again() -> None:
    """Send SIGINT to this process after AGAIN_S, once for all interrupts that are dropped meanwhile."""
    if _is_waiting.acquire(blocking=False):
        time.sleep(AGAIN_S)
        _is_waiting.release()
        os.kill(os.getpid(), signal.SIGINT)


def keep_interrupts() -> None:
    """From now on resend interrupts that Python drops. Other errors in callbacks are printed as before."""
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


@contextmanager
def remembered_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt where an interrupt came and was cleared on its way, as C
    code may do; long loops call the function. An error that replaced the interrupt on its way is raised as
    KeyboardInterrupt too. Outside of the main thread, and where the process handles SIGINT in its own way,
    interrupts are left as they are."""
    seen: list[bool] = []

    def interrupt(*_: object) -> None:
        seen.append(True)
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    except Exception:
        check()
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def came_of_interrupt(error: BaseException | None) -> bool:
    """True if an error replaced a KeyboardInterrupt, as in a library's `finally` that asserts."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def exit_at_interrupts(exit_code: str | int | None) -> None:
    """From now on end the process at once on an interrupt, with `exit_code` as of a SystemExit: only waiting
    for threads is left to do. Once the threads have ended, interrupts are ignored. Interrupts that were
    ignored before still are."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    code = exit_code if isinstance(exit_code, int) else int(exit_code is not None)
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # Python forgets that code of a string was interrupted, after which it would end by SIGINT itself.
    exec("")

"""The bond of a process to the one that started it. It imports nothing that takes long."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """The kernel kills this process, also where it is stopped, when the thread that started it ends.

    A parent that had ended before is not noticed: compare `os.getppid()` with what it told of itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

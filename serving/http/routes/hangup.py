"""SIGHUP at a server: files that it appends to are opened anew, and its API keys are read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from phasewise.serving.http.routes.middleware import ApiKeys

ReadKeys = Callable[[], tuple[str, ...] | None]
"""All keys, as they are now; None where they cannot be had, which has been told."""


def on_hangup(
    reopened: Iterable[Callable[[], None]], keys: ApiKeys, read: ReadKeys | None
) -> Callable[[], None] | None:
    """The function that SIGHUP calls; None where it has nothing to do. reopened: files, which a call opens
    anew.

    Keys are read on a thread: their file may be far away.
    """
    opens = tuple(reopened)
    if not opens and read is None:
        return None

    in_turn = threading.Lock()

    def hang_up() -> None:
        for reopen in opens:
            reopen()
        if read is not None:
            asked = (keys, read, in_turn)
            threading.Thread(target=_replace, args=asked, name="phasewise-keys", daemon=True).start()

    return hang_up


def _replace(keys: ApiKeys, read: ReadKeys, in_turn: threading.Lock) -> None:
    """One at a time: of two hangups, what the first has read never replaces what the second has."""
    with in_turn:
        now = read()
        if now is not None:
            keys.replace(now)

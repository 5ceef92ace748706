"""SIGHUP at a server: files that it appends to are opened anew, its API keys and certificate read again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from phasewise.serving.http.routes.middleware import ApiKeys

ReadKeys = Callable[[], tuple[str, ...] | None]
"""All keys, as they are now; None where they cannot be had, which has been told."""


def on_hangup(
    reopened: Iterable[Callable[[], None]],
    keys: ApiKeys,
    read: ReadKeys | None,
    read_tls: Callable[[], None] | None = None,
) -> Callable[[], None] | None:
    """The function that SIGHUP calls; None where it has nothing to do. reopened: files, which a call opens
    anew. read_tls: reads the certificate and its key again.

    Files are read on a thread: they may be far away.
    """
    opens = tuple(reopened)
    if not opens and read is None and read_tls is None:
        return None

    in_turn = threading.Lock()

    def hang_up() -> None:
        for reopen in opens:
            reopen()
        if read is not None or read_tls is not None:
            asked = (keys, read, read_tls, in_turn)
            threading.Thread(target=_replace, args=asked, name="phasewise-keys", daemon=True).start()

    return hang_up


def _replace(
    keys: ApiKeys, read: ReadKeys | None, read_tls: Callable[[], None] | None, in_turn: threading.Lock
) -> None:
    """One at a time: of two hangups, what the first has read never replaces what the second has."""
    with in_turn:
        if read_tls is not None:
            read_tls()
        if read is not None and (now := read()) is not None:
            keys.replace(now)

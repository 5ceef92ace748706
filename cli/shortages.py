"""Errors of threads and of logs that come of a system without memory, threads or files: a line each."""

from __future__ import annotations

import logging
import sys
import threading

from phasewise.cli.present import note
from phasewise.serving.errors import shortage_of


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """As logging without a handler, but for shortages: of those a traceback tells nothing."""

    def format(self, record: logging.LogRecord) -> str:
        shortage = shortage_of(record.exc_info[1]) if record.exc_info else None
        if shortage is None:
            return super().format(record)
        said = record.getMessage().splitlines() or [record.name]
        return f"phasewise: {said[0]}: {shortage}"

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    shortage = shortage_of(ended.exc_value)
    if shortage is None:
        threading.__excepthook__(ended)
    else:
        note(f"phasewise: {ended.thread.name if ended.thread else 'a thread'}: {shortage}")


def tell_shortages_in_one_line() -> None:
    """From now on, in this process."""
    threading.excepthook = _thread_ended
    handler = _ToStderr()
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)

"""The status line of a command: it changes in place on a terminal, and is printed now and then elsewhere, and
where NO_COLOR asks for plain text. No thread draws it: a thread would take a core from what is timed."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phasewise.cli.present import note, printable

if TYPE_CHECKING:
    from rich.live import Live

LINE_EVERY_S = 10.0
"""Seconds between two status lines off a terminal."""

REDRAW_EVERY_S = 0.5


class StatusLine:
    """The status line of a command. live: the terminal's changing line, None off a terminal. every_s: least
    seconds between two lines."""

    def __init__(self, live: Live | None, every_s: float) -> None:
        self._live = live
        self._every_s = every_s
        self._shown_s = -math.inf

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._live is None:
            note(line)
            return
        from rich.text import Text

        self._live.console.print(Text(printable(line)), soft_wrap=True)

    def show(self, line: Callable[[], str]) -> None:
        """Show the state by now; `line` is called only when it is time for a new line."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._every_s or self._every_s == math.inf:
            return
        self._shown_s = now_s
        if self._live is None:
            note(line())
            return
        from rich.text import Text

        text = Text(printable(line()), overflow="ellipsis", no_wrap=True)
        self._live.update(text, refresh=True)


@contextmanager
def status_line(line_every_s: float = LINE_EVERY_S) -> Iterator[StatusLine]:
    """Yield a status line on stderr, and remove it at the end. line_every_s: seconds between lines off a
    terminal; infinite for none."""
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        yield StatusLine(None, line_every_s)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield StatusLine(live, REDRAW_EVERY_S)

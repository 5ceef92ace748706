"""The bar that shows on a terminal how much of a long prompt is computed."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from phasewise._words import counted, number
from phasewise.cli.status_line import StatusLine, status_line

if TYPE_CHECKING:
    from phasewise.serving.engine.messages import Progress

_WIDTH = 24


class PromptBar:
    """A line on stderr from the first step of a prompt to its last; nothing off a terminal."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._line: StatusLine | None = None

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    def show(self, progress: Progress | None) -> None:
        """The prompt by now; None: its answer has begun, and the bar goes."""
        if progress is None or not sys.stderr.isatty():
            self._end()
            return
        if self._line is None:
            self._line = self._stack.enter_context(status_line(float("inf")))
        self._line.show(lambda: bar_text(progress))

    def _end(self) -> None:
        self._line = None
        self._stack.close()


def bar_text(progress: Progress) -> str:
    """The bar, the tokens, and the time that is left at the rate so far."""
    n_full = _WIDTH * progress.n_computed // progress.n_prompt
    n_done, n_left = progress.n_computed - progress.n_cached, progress.n_prompt - progress.n_computed
    left_s = progress.took_ns / 1e9 * n_left / max(1, n_done)
    bar = "#" * n_full + "." * (_WIDTH - n_full)
    of_all = f"{progress.n_computed} of {counted(progress.n_prompt, 'token')}"
    return f"prompt [{bar}] {of_all}, {number(round(left_s))} s left"

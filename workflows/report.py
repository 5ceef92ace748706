"""The callback by which a workflow tells its caller one line of progress or a remark."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]
"""Callback that is given one line of text, without a newline at its end."""


def silent(line: str) -> None:
    """Drop the line: for callers that do not want to be told."""

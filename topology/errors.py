"""Errors that are raised while a machine's description is read."""

from __future__ import annotations

from typing import ClassVar


class TopologyError(Exception):
    """A machine cannot be read. The message names the source, what is wrong and what to do."""

    exit_code: ClassVar[int] = 1

"""Rows that name their owner: left out of what is pushed, whatever their owner called a model."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from phasewise._words import counted
from phasewise.kerneldb.fields import flattened
from phasewise.kerneldb.records import StoredRow
from phasewise.workflows.report import Report

LEAST_CHARS = 3
"""Shorter names are parts of too many words."""


def words_of_owner() -> frozenset[str]:
    """This host's name, the user's, and the folders of both, in small letters."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    home = os.environ.get("HOME") or ""
    host = platform.node()
    words = {user, home, Path(home).name, host, host.split(".")[0], os.environ.get("HOSTNAME") or ""}
    return frozenset(word.lower() for word in words if len(word) >= LEAST_CHARS)


class PrivateWords:
    """Leaves out rows whose names hold a word of their owner, or a path, and says how many."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._words = words_of_owner()
        self._left_out = 0

    def without(self, group: Iterable[StoredRow]) -> list[StoredRow]:
        """The rows that may leave."""
        rows = [*group]
        kept = [row for row in rows if not self._is_private(row)]
        self._left_out += len(rows) - len(kept)
        return kept

    def _is_private(self, row: StoredRow) -> bool:
        fields = flattened(row)
        return any(
            fields[name].startswith(("/", "~", "."))
            or any(word in fields[name].lower() for word in self._words)
            for name in row.kind.private
        )

    def close(self) -> None:
        """Say what stayed here."""
        if self._left_out:
            self._report(
                f"{counted(self._left_out, 'row')} stayed here: the name of a model or kernel holds this "
                "host's, this user's or a path"
            )

"""Beginnings of prompts that one engine wrote to its folder: the newest of them, as far as they are there.

What another server wrote to the same folder is found when a prompt asks for it, and is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

MOST_KEPT = 64
"""Sequences that are remembered."""


@dataclass(slots=True, eq=False)
class KeptBeginning:
    """The first `n_tokens` of these can be read."""

    token_ids: tuple[int, ...]
    space: str
    n_tokens: int


class KeptBeginnings:
    """n_stored: the number of the first of these tokens that the folder has. `note` and `look_again` are
    called on the writer's thread."""

    def __init__(self, n_stored: Callable[[tuple[int, ...], str], int]) -> None:
        self._n_stored = n_stored
        self._kept: list[KeptBeginning] = []
        self._lock = threading.Lock()
        self.n_changes = 0

    def note(self, token_ids: tuple[int, ...], space: str) -> None:
        """All of it was written, or had been."""
        n_tokens = self._n_stored(token_ids, space)
        with self._lock:
            self._kept = [
                kept
                for kept in self._kept
                if kept.space != space or token_ids[: kept.n_tokens] != kept.token_ids[: kept.n_tokens]
            ]
            self._kept.append(KeptBeginning(token_ids, space, n_tokens))
            del self._kept[:-MOST_KEPT]
            self.n_changes += 1

    def look_again(self) -> None:
        """Something was removed from the folder."""
        for kept in self.now():
            n_tokens = self._n_stored(kept.token_ids, kept.space)
            if n_tokens != kept.n_tokens:
                kept.n_tokens = n_tokens
                self.n_changes += 1

    def now(self) -> list[KeptBeginning]:
        """All of them; any thread may ask."""
        with self._lock:
            return list(self._kept)

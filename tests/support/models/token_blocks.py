"""Token ids of ten thousand lines, kept as one hash for every block of lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

N_LINES = 10_000
BLOCK = 100


def block_hashes(ids_of_lines: Sequence[Sequence[int]]) -> list[str]:
    """A short hash for every BLOCK of lines: it changes with any id and with any border between lines."""
    return [_hash(ids_of_lines[start : start + BLOCK]) for start in range(0, len(ids_of_lines), BLOCK)]


def _hash(block: Sequence[Sequence[int]]) -> str:
    text = "\n".join(" ".join(map(str, ids)) for ids in block)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

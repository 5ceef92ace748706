"""Names of the ways in which weights are stored, for settings that import nothing else."""

from __future__ import annotations

from typing import Literal, get_args

SparseMode = Literal["auto", "always", "never"]
SPARSE_MODES: tuple[SparseMode, ...] = get_args(SparseMode)

PackMode = Literal["keep", "check", "memory"]
"""The place of a packed model. `keep`: in a file of the cache. `check`: the same, and every byte of it is
compared with its checksum at the start. `memory`: in memory alone, and each start packs it."""
PACK_MODES: tuple[PackMode, ...] = get_args(PackMode)

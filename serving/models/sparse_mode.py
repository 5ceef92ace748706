"""Names of the modes of sparse storage, for settings that import nothing else."""

from __future__ import annotations

from typing import Literal, get_args

SparseMode = Literal["auto", "always", "never"]
SPARSE_MODES: tuple[SparseMode, ...] = get_args(SparseMode)

"""By which arithmetic an encoder's products run where nothing was tuned.

An encoder multiplies many rows at a time, so that arithmetic bounds it, not the bytes of weights. Where
there is a tile unit, weights of eight and four bits are therefore widened to bfloat16 for it: a third faster
than integer dot products with quantised rows (benchmarks/notes/0010-embeddings.md), and nearer to float32,
since rows are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasewise.cython_kernels._native import compute_paths
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.schedules import RowRange

TILES = "bf16_tile"
_DENSE = ("f32", "bf16")


class EncoderDefaults:
    """A `ScheduleLookup` without tuned schedules."""

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """Tiles for quantised weights that can have them; else the default of the instruction set."""
        if weight.kind in _DENSE or TILES not in compute_paths(weight.kind, weight.group or 32):
            return None, 1
        return TILES, 1

    def own_path(self, weight: PackedWeight) -> str | None:
        """None: an encoder has one phase."""
        del weight
        return None

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        """None: the kernels' defaults."""
        del weight, max_m
        return ()

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        """None: the kernels' defaults."""
        del kv_format, n, k, max_m
        return ()

"""By which arithmetic an encoder's products run where nothing was tuned.

An encoder multiplies many rows at a time, so that arithmetic bounds it, not the bytes of weights. Weights of
eight and four bits are therefore widened where that is faster than integer dot products with quantised rows:
to bfloat16 for a tile unit, and to float32 on x86 without instructions for integer dot products (VNNI).
Either is nearer to float32 as well, since rows are not quantised (benchmarks/notes/embeddings.md).

Of a few tokens the errors of quantised rows do not average out: inputs of at most SHORT_TOKENS have their
weights widened everywhere (`NEAREST`).

`CANONICAL` is for the same bits on every CPU: the paths of one with integer dots and without dots of 16
bits, inputs of at most SHORT_TOKENS widened to float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import compute_paths
from phasewise.cython_kernels.packing import DENSE_KINDS, PackedWeight
from phasewise.cython_kernels.schedules import ScheduleLookup, canonical_path

SHORT_TOKENS = 8
TILES = "bf16_tile"
WIDENED = "fma"
_WIDE = (TILES, "bf16_dot", WIDENED)
"""Paths that leave rows as they are, the fastest first."""
_WITHOUT_INTEGER_DOTS = ("avx2", "avx512")


@dataclass(frozen=True)
class EncoderDefaults(ScheduleLookup):
    """Nothing is tuned, and one phase.

    widens: quantised weights are, at any cost. is_canonical: by paths that give the same bits on every CPU.
    """

    widens: bool = False
    is_canonical: bool = False

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """The arithmetic of quantised weights, where they are widened; else the default of the instruction
        set.
        """
        if self.is_canonical:
            widens = self.widens and weight.kind not in DENSE_KINDS
            return (WIDENED if widens else canonical_path(weight)), 1
        if weight.kind in DENSE_KINDS:
            return None, 1
        paths = compute_paths(weight.kind, weight.group or 32)
        if TILES in paths:
            return TILES, 1
        if self.widens:
            return next((path for path in _WIDE if path in paths), None), 1
        return (WIDENED if isa.active() in _WITHOUT_INTEGER_DOTS and WIDENED in paths else None), 1


FASTEST = EncoderDefaults()
NEAREST = EncoderDefaults(widens=True)
CANONICAL = EncoderDefaults(is_canonical=True)


def for_short_inputs(defaults: EncoderDefaults, weights: Iterable[PackedWeight]) -> EncoderDefaults | None:
    """The defaults of inputs of at most SHORT_TOKENS; None where they want the arithmetic of others."""
    short = replace(defaults, widens=True)
    differ = any(defaults.arithmetic(weight) != short.arithmetic(weight) for weight in weights)
    return short if differ else None

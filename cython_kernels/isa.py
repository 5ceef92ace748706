"""The instruction set that the kernels use: the highest that this machine runs, or what PHASEWISE_ISA names.

The ladder, by speed: portable, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, avx512_fp16,
amx; on Arm portable, neon, neon_dotprod, neon_bf16_i8mm.
The choice is made once, when the kernels are imported. Rows prepared under one choice are read under that one
only, so a program is rebuilt after a switch; `using` is for tests and benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phasewise.cython_kernels import _native


def usable() -> tuple[str, ...]:
    """The names of the instruction sets that run on this machine, lowest first; never empty."""
    return tuple(_native.isa_usable())


def active() -> str:
    """The name of the instruction set in use."""
    return str(_native.isa_active())


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use the instruction set `name` within the block, for the whole process; IsaError where it does not run
    here."""
    before = active()
    _native.isa_select(name)
    try:
        yield
    finally:
        _native.isa_select(before)

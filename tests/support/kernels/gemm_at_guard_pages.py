"""Run by test_gemm_paths.py in a process of its own: products whose operands all end at an unreadable page.

A read or write past an operand ends the process with SIGSEGV, whatever language did it.
With `before` as its second argument the operands begin right after such a page instead.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from phasewise.cython_kernels import _native, isa, sparse
from phasewise.cython_kernels.packing import PackedWeight
from tests.support.kernels.gemm_reference import FORMATS, make_weight

PAGE = mmap.PAGESIZE
PROT_NONE = 0
LIBC = ctypes.CDLL(None, use_errno=True)
SHAPES = [(1, 1), (16, 32), (17, 33), (48, 64), (50, 97), (80, 160), (130, 576)]
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 40)


def guarded(array: np.ndarray, before: bool) -> np.ndarray:
    """A copy that ends at a page without access rights."""
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    region = mmap.mmap(-1, size + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (start, start + size + PAGE):
        if LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE if before else PAGE + size - array.nbytes
    copy = np.frombuffer(region, dtype=array.dtype, count=array.size, offset=offset).reshape(array.shape)
    copy[...] = array
    return copy


def main(name: str, before: bool) -> None:
    rng = np.random.default_rng(0)
    with isa.using(name):
        for fmt, (n, k) in itertools.product(FORMATS, SHAPES):
            w = make_weight(fmt, n, k, rng)
            stored = [w]
            if sparse.can_be_sparse(w.kind, w.mins is not None):
                stored += [sparse.to_sparse(w), every_bit_set(sparse.to_sparse(w))]
            for w in stored:
                try_all(w, before, rng)
    print("ok")


def every_bit_set(w: PackedWeight) -> PackedWeight:
    """A weight that no check has let through: its masks count more values than there are."""
    return replace(w, values=np.full_like(w.values, 255))


def try_all(w: PackedWeight, before: bool, rng: np.random.Generator) -> None:
    def fence(array: Any) -> Any:
        return None if array is None else guarded(array, before)

    fenced = {name: fence(getattr(w, name)) for name in ("values", "scales", "mins", "offsets")}
    w, n, k = replace(w, **fenced), w.n, w.k
    _native.unpack_row(w, n - 1)
    for path, m in itertools.product(_native.compute_paths(w.kind, w.group), ROWS):
        x = guarded(rng.standard_normal((m, k), dtype=np.float32), before)
        prepared = guarded(_native.prepare_rows(x, w, path), before)
        y = guarded(np.zeros((m, n), np.float32), before)
        tight = _native.default_schedule(w, m, path=path) | {
            "block_k": 64,
            "block_m": 7,
            "prefetch_bytes": 1 << 20,
        }
        for schedule in (None, tight):
            _native.gemm_share(prepared, w, y, schedule=schedule, path=path)
            _native.gemm_share(prepared, w, y, schedule=schedule, add=True, path=path, k_parts=2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "before")

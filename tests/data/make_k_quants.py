"""Blocks of Q4_K and Q6_K by llama.cpp's own search, for tests/workflows/test_k_quants.py.

    python tests/data/make_k_quants.py LIBGGML_BASE    # a shared library of llama.cpp, e.g. libggml-base.so

k_quants.npz: of each drawn matrix (`tests.workflows.test_k_quants.MATRICES`) its blocks, with and without
importance.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.models.reference_models import FIXTURES
from tests.workflows.test_k_quants import BLOCK_BYTES, MATRICES, importance_of, matrix


def blocks(library: ctypes.CDLL, kind: str, rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """uint8 [n, k / 256 * bytes of a block]."""
    count, length = rows.shape
    out = np.empty((count, length // 256 * BLOCK_BYTES[kind]), np.uint8)

    def address(array: np.ndarray | None) -> ctypes.c_void_p | None:
        return None if array is None else ctypes.c_void_p(array.ctypes.data)

    quantize = getattr(library, f"quantize_{kind[:2]}_K")
    quantize(address(rows), address(out), ctypes.c_int64(count), ctypes.c_int64(length), address(importance))
    return out


def main(path: str) -> None:
    library = ctypes.CDLL(path)
    kept = {
        f"{name}/{kind}/{is_weighed}": blocks(
            library, kind, matrix(name), importance_of(name) if is_weighed else None
        )
        for name in MATRICES
        for kind in BLOCK_BYTES
        for is_weighed in (False, True)
    }
    np.savez_compressed(FIXTURES / "k_quants.npz", **kept)


if __name__ == "__main__":
    main(sys.argv[1])

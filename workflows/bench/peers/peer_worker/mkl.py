"""Intel MKL's matrix products."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Cell, Setting, address, bf16


class Mkl:
    """Intel MKL's packed products, through its C interface."""

    formats = ("f32", "bf16")
    ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, PACKED, B_MATRIX = 101, 111, 112, 151, 162

    def __init__(self, threads: int) -> None:
        libraries = sorted((Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
        if not libraries:
            raise ImportError(f"no libmkl_rt in {sys.prefix}/lib")
        self.mkl = ctypes.CDLL(str(libraries[-1]))
        text = ctypes.create_string_buffer(200)
        self.mkl.MKL_Get_Version_String(text, 200)
        self.version = text.value.decode().split("Version ")[-1].split()[0]
        self.mkl.MKL_Set_Num_Threads(threads)

    def settings(self, cell: Cell) -> Iterator[Setting]:
        x, w = cell.x(), cell.weight()
        if cell.format == "bf16":
            x, w = bf16(x), bf16(w)
        y = np.empty((cell.m, cell.n), dtype=np.float32)
        sizes = (ctypes.c_int(cell.m), ctypes.c_int(cell.n), ctypes.c_int(cell.k))
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(0.0)
        depth = ctypes.c_int(cell.k)
        door = "cblas_sgemm" if cell.format == "f32" else "cblas_gemm_bf16bf16f32"
        # where alpha is given
        packing, computing = ((alpha,), ()) if cell.format == "f32" else ((), (alpha,))
        packed = [self._packed(door, (*sizes, *packing), w) for _ in range(cell.copies)]
        compute, pointer = getattr(self.mkl, f"{door}_compute"), address

        def run(i: int) -> np.ndarray:
            compute(self.ROW_MAJOR, self.NO_TRANSPOSE, self.PACKED, *sizes, *computing, pointer(x), depth,
                    pointer(packed[i]), depth, beta, pointer(y), sizes[1])  # fmt: skip
            return y

        yield Setting("packed", run, lambda y: y[0])

    def _packed(self, door: str, arguments: tuple[Any, ...], w: np.ndarray) -> np.ndarray:
        size = getattr(self.mkl, f"{door}_pack_get_size")
        size.restype = ctypes.c_size_t
        room = np.empty(size(self.B_MATRIX, *arguments[:3]), dtype=np.uint8)
        depth = arguments[2]
        getattr(self.mkl, f"{door}_pack")(
            self.ROW_MAJOR, self.B_MATRIX, self.TRANSPOSE, *arguments, address(w), depth, address(room)
        )
        return room

"""OpenBLAS's matrix products."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from .cells import Cell, Setting


class OpenBlas:
    """OpenBLAS as numpy brings it: it packs anew in every call. Weights either way round."""

    formats = ("f32",)

    def __init__(self, threads: int) -> None:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        if "openblas" not in blas["name"]:
            raise ImportError(f"numpy computes with {blas['name']}")
        self.version = blas["version"]
        self.threads = threads

    def settings(self, cell: Cell) -> Iterator[Setting]:
        x, w = cell.x(), cell.weight()
        y = np.empty((cell.m, cell.n), dtype=np.float32)
        rows = [w.copy() for _ in range(cell.copies)]
        np.matmul(x, rows[0].T, out=y)
        pin_threads(self.threads)
        yield Setting("outputs in rows", lambda i: np.matmul(x, rows[i].T, out=y), lambda y: y[0])
        columns = [np.ascontiguousarray(w.T) for _ in range(cell.copies)]
        yield Setting("inputs in rows", lambda i: np.matmul(x, columns[i], out=y), lambda y: y[0])


def pin_threads(threads: int) -> None:
    """One core each for the threads that this process has by now, where the library does not do it."""
    cores = sorted(os.sched_getaffinity(0))
    others = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    if len(cores) == threads and len(others) == threads - 1:
        for core, thread in zip(cores, [os.getpid(), *others], strict=True):
            os.sched_setaffinity(thread, {core})

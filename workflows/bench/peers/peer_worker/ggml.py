"""llama.cpp's matrix products."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Cell, Setting, address


class Ggml:
    """llama.cpp's kernels, out of the libraries of llama-cpp-python: one graph with a product a weight."""

    formats = ("f32", "bf16", "int8", "int4", "int4m")
    TYPES = (("f32", 0), ("bf16", 30), ("int8", 8), ("int4", 2), ("int4m", 3))
    """ggml's own: F32, BF16, Q8_0, Q4_0, Q4_1."""

    def __init__(self, threads: int) -> None:
        llama_cpp = import_module("llama_cpp")
        self.version = f"of llama-cpp-python {llama_cpp.__version__}"
        folder = Path(llama_cpp.__path__[0]) / "lib"
        self.base, self.cpu = (
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
            for name in ("libggml-base.so", "libggml-cpu.so")
        )
        pool = self._call(self.base, "ggml_threadpool_params_default", _GgmlThreads, ctypes.c_int(threads))
        for core in os.sched_getaffinity(0):
            pool.cpumask[core] = True
        pool.strict_cpu = True
        self.backend = self._pointer(self.cpu, "ggml_backend_cpu_init")
        self._call(self.cpu, "ggml_backend_cpu_set_n_threads", None, self.backend, ctypes.c_int(threads))
        self._call(self.cpu, "ggml_backend_cpu_set_threadpool", None, self.backend,
                   self._pointer(self.cpu, "ggml_threadpool_new", ctypes.byref(pool)))  # fmt: skip

    def settings(self, cell: Cell) -> Iterator[Setting]:
        kind = dict(self.TYPES)[cell.format]
        yield self._graph("plain", cell, kind, self._pointer(self.base, "ggml_backend_cpu_buffer_type"))
        if cell.format == "int4":
            repack = self._pointer(self.cpu, "_Z35ggml_backend_cpu_repack_buffer_typev")
            yield self._graph("repacked", cell, kind, repack)

    def _graph(self, name: str, cell: Cell, kind: int, weights_in: ctypes.c_void_p) -> Setting:
        graph = _GgmlGraph(self, cell, kind, weights_in)
        return Setting(name, lambda _: graph.compute(), lambda _: graph.row(), cell.copies)

    def _call(self, library: Any, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.restype = result
        return function(*arguments)

    def _pointer(self, library: Any, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call(library, name, ctypes.c_void_p, *arguments))


class _GgmlThreads(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class _GgmlInit(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _GgmlGraph:
    """Products of one x with every weight, computed one after another; its memory goes with it."""

    def __init__(self, ggml: Ggml, cell: Cell, kind: int, weights_in: ctypes.c_void_p) -> None:
        self.ggml, self.n = ggml, cell.n
        nodes = cell.copies + 8
        self.contexts = [self._context(nodes), self._context(nodes)]
        weights = [self._tensor(self.contexts[0], kind, cell.k, cell.n) for _ in range(cell.copies)]
        x = self._tensor(self.contexts[1], 0, cell.k, cell.m)
        multiply = functools.partial(ggml._pointer, ggml.base, "ggml_mul_mat", self.contexts[1])
        self.results = [multiply(weight, x) for weight in weights]
        self.graph = ggml._pointer(
            ggml.base, "ggml_new_graph_custom", self.contexts[1], ctypes.c_size_t(nodes), ctypes.c_bool(False)
        )
        for y in self.results:
            ggml._call(ggml.base, "ggml_build_forward_expand", None, self.graph, y)
        plain = ggml._pointer(ggml.base, "ggml_backend_cpu_buffer_type")
        self.buffers = [
            ggml._pointer(ggml.base, "ggml_backend_alloc_ctx_tensors_from_buft", context, memory)
            for context, memory in zip(self.contexts, (weights_in, plain), strict=True)
        ]
        self._set(x, cell.x())
        rows = self._quantised(kind, cell.weight())
        for weight in weights:
            self._set(weight, rows)

    def compute(self) -> None:
        ggml = self.ggml
        ggml._call(ggml.base, "ggml_backend_graph_compute", ctypes.c_int, ggml.backend, self.graph)

    def row(self) -> np.ndarray:
        row = np.empty(self.n, dtype=np.float32)
        destination, size = address(row), ctypes.c_size_t(row.nbytes)
        get = self.ggml.base.ggml_backend_tensor_get
        get(self.results[0], destination, ctypes.c_size_t(0), size)
        return row

    def __del__(self) -> None:
        for buffer in self.buffers:
            self.ggml.base.ggml_backend_buffer_free(buffer)
        for context in self.contexts:
            self.ggml.base.ggml_free(context)

    def _context(self, nodes: int) -> ctypes.c_void_p:
        base, call = self.ggml.base, self.ggml._call
        room = 2 * nodes * call(base, "ggml_tensor_overhead", ctypes.c_size_t)
        room += call(
            base, "ggml_graph_overhead_custom", ctypes.c_size_t, ctypes.c_size_t(nodes), ctypes.c_bool()
        )
        return self.ggml._pointer(base, "ggml_init", _GgmlInit(room, None, True))

    def _tensor(self, context: ctypes.c_void_p, kind: int, columns: int, rows: int) -> ctypes.c_void_p:
        sizes = ctypes.c_int64(columns), ctypes.c_int64(rows)
        return self.ggml._pointer(self.ggml.base, "ggml_new_tensor_2d", context, ctypes.c_int(kind), *sizes)

    def _set(self, tensor: ctypes.c_void_p, values: np.ndarray) -> None:
        offset, size = ctypes.c_size_t(0), ctypes.c_size_t(values.nbytes)
        self.ggml.base.ggml_backend_tensor_set(tensor, address(values), offset, size)

    def _quantised(self, kind: int, w: np.ndarray) -> np.ndarray:
        base, (n, k) = self.ggml.base, w.shape
        row_bytes = self.ggml._call(
            base, "ggml_row_size", ctypes.c_size_t, ctypes.c_int(kind), ctypes.c_int64(k)
        )
        rows = np.empty(n * row_bytes, dtype=np.uint8)
        sizes = ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k)
        base.ggml_quantize_chunk(ctypes.c_int(kind), address(w), address(rows), *sizes, None)
        return rows

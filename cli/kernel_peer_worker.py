"""One peer's matrix products, timed on request, in a process of its own.

Run as `python kernel_peer_worker.py PEER 0,1` (cores, one thread each) by an interpreter that has the peer:
nothing of ours is imported here. It says who it is in a line of JSON, then answers one line with one line:

    {"format": "bf16", "n": 576, "k": 576, "m": 8, "copies": 9}  ->  {"setting": ..., "ns": ..., "error": ...}
    {"calls": 20}                                                ->  {"ns": ..., "products": ...}
    anything that the peer cannot do                             ->  {"refused": "why"}

The first prepares y[m, n] = x[m, k] W[n, k]^T over `copies` weights that are taken in turn, so that they come
from memory as a decode step's do, packed as the peer likes them; of the peer's own ways to compute it the
fastest is kept. `ns` is the time of a product, `error` the largest of a row of y against float32, relative
to the largest element of that row.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TRIAL_NS = 4_000_000
TRIALS = 4
LONG_NS = 20_000_000
"""A product that takes longer is tried once: it is long against what disturbs a trial."""
GROUP = 32


@dataclass(frozen=True)
class Cell:
    """What to compute, and over how many weights."""

    format: str
    n: int
    k: int
    m: int
    copies: int

    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.m, self.k), dtype=np.float32)

    def weight(self) -> np.ndarray:
        """Read-only: it is kept for the next cell of the same shape."""
        return random_weight(self.n, self.k)


@functools.lru_cache(maxsize=1)
def random_weight(n: int, k: int) -> np.ndarray:
    weight = np.random.default_rng(2).standard_normal((n, k), dtype=np.float32)
    weight.flags.writeable = False
    return weight


@dataclass(frozen=True)
class Setting:
    """One way in which a peer computes a cell."""

    name: str
    run: Callable[[int], Any]
    """Multiplies with the weight of this number, or with `products` of them at once."""
    row: Callable[[Any], np.ndarray]
    """The first row of y, float32 [n], from what `run(0)` returned."""
    products: int = 1


class Torch:
    """PyTorch: oneDNN and MKL over weights reordered for the batch size, FBGEMM, and its own int4 kernels."""

    formats = ("f32", "bf16", "int8", "int4")

    def __init__(self, threads: int) -> None:
        import torch

        self.torch = torch
        self.kept: tuple[tuple[Any, ...], list[Any]] = ((), [])
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.version = torch.__version__

    def settings(self, cell: Cell) -> Iterator[Setting]:
        make = {"f32": self._float, "bf16": self._float, "int8": self._int8, "int4": self._int4}
        return make[cell.format](cell)

    def _row(self, y: Any) -> np.ndarray:
        row: np.ndarray = y[0].float().numpy()
        return row

    def _clones(self, cell: Cell, w: Any) -> list[Any]:
        """Copies of a weight as it is: they serve every number of rows."""
        key, clones = (cell.format, cell.n, cell.k), self.kept[1]
        if self.kept[0] != key:
            clones = []
        clones += [w.clone() for _ in range(cell.copies - len(clones))]
        self.kept = key, clones
        return clones

    def _float(self, cell: Cell) -> Iterator[Setting]:
        torch = self.torch
        dtype = torch.float32 if cell.format == "f32" else torch.bfloat16
        x, w = torch.from_numpy(cell.x()).to(dtype), torch.from_numpy(cell.weight()).to(dtype)
        linear, reorder = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight
        packed = [reorder(w, cell.m) for _ in range(cell.copies)]
        yield Setting("oneDNN packed", lambda i: linear(x, packed[i], None, "none", [], ""), self._row)
        if cell.format == "f32" and torch.backends.mkl.is_available():
            product, reorder_mkl = torch.ops.mkl._mkl_linear, torch.ops.mkl._mkl_reorder_linear_weight
            packed = [reorder_mkl(w, cell.m) for _ in range(cell.copies)]
            # The weight as it was goes along, and a single row is multiplied with that: it must be cold too.
            plain = self._clones(cell, w)
            yield Setting("MKL packed", lambda i: product(x, packed[i], plain[i], None, cell.m), self._row)
        clones = self._clones(cell, w)
        yield Setting("plain", lambda i: torch.nn.functional.linear(x, clones[i]), self._row)

    def _int8(self, cell: Cell) -> Iterator[Setting]:
        torch = self.torch
        x, w = torch.from_numpy(cell.x()), torch.from_numpy(cell.weight())
        scales = w.abs().amax(1) / 127
        zeros = torch.zeros(cell.n, dtype=torch.long)
        quantised = torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8)

        def dynamic(name: str, packed: list[Any]) -> Setting:
            return Setting(name, lambda i: torch.ops.quantized.linear_dynamic(x, packed[i]), self._row)

        for engine in ("onednn", "fbgemm"):
            if engine in torch.backends.quantized.supported_engines:
                torch.backends.quantized.engine = engine
                packed = [torch.ops.quantized.linear_prepack(quantised, None) for _ in range(cell.copies)]
                yield dynamic(f"{engine} dynamic", packed)
        half, rows, s = x.bfloat16(), quantised.int_repr(), scales.bfloat16()
        packed = [rows.clone() for _ in range(cell.copies)]
        yield Setting("weight only", lambda i: torch._weight_int8pack_mm(half, packed[i], s), self._row)

    def _int4(self, cell: Cell) -> Iterator[Setting]:
        torch = self.torch
        x = torch.from_numpy(cell.x()).bfloat16()
        q, scales = four_bits(cell.weight())
        blocks = torch.from_numpy(scales.T.copy())  # [groups, n]; value = (q - 8) * scale + zero
        with_zeros = torch.stack([blocks, torch.zeros_like(blocks)], dim=2).bfloat16().contiguous()
        rows = torch.from_numpy(q.astype(np.int32))
        pack, product = torch._convert_weight_to_int4pack_for_cpu, torch.ops.aten._weight_int4pack_mm_for_cpu
        packed = [pack(rows, 1) for _ in range(cell.copies)]
        yield Setting("weight only", lambda i: product(x, packed[i], GROUP, with_zeros), self._row)


class Mkl:
    """Intel MKL's packed products, through its C interface."""

    formats = ("f32", "bf16")
    ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, PACKED, B_MATRIX = 101, 111, 112, 151, 162

    def __init__(self, threads: int) -> None:
        found = sorted((Path(sys.prefix) / "lib").glob("libmkl_rt.so*"))
        if not found:
            raise ImportError(f"no libmkl_rt in {sys.prefix}/lib")
        self.mkl = ctypes.CDLL(str(found[-1]))
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
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        depth = ctypes.c_int(cell.k)
        door = "cblas_sgemm" if cell.format == "f32" else "cblas_gemm_bf16bf16f32"
        packing, computing = ((one,), ()) if cell.format == "f32" else ((), (one,))  # where alpha is given
        packed = [self._packed(door, (*sizes, *packing), w) for _ in range(cell.copies)]
        compute, at = getattr(self.mkl, f"{door}_compute"), _address

        def run(i: int) -> np.ndarray:
            compute(self.ROW_MAJOR, self.NO_TRANSPOSE, self.PACKED, *sizes, *computing, at(x), depth,
                    at(packed[i]), depth, zero, at(y), sizes[1])  # fmt: skip
            return y

        yield Setting("packed", run, lambda y: y[0])

    def _packed(self, door: str, arguments: tuple[Any, ...], w: np.ndarray) -> np.ndarray:
        size = getattr(self.mkl, f"{door}_pack_get_size")
        size.restype = ctypes.c_size_t
        room = np.empty(size(self.B_MATRIX, *arguments[:3]), dtype=np.uint8)
        depth = arguments[2]
        getattr(self.mkl, f"{door}_pack")(
            self.ROW_MAJOR, self.B_MATRIX, self.TRANSPOSE, *arguments, _address(w), depth, _address(room)
        )
        return room


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


class OpenVino:
    """OpenVINO: one graph multiplies x with every weight, so that its own cost of a call is shared out."""

    formats = ("f32", "bf16", "int8", "int4")
    MANY_PRODUCTS, FEW_PRODUCTS, FEW_ROWS = 64, 8, 32
    """In a graph, which is long compiled; with more than FEW_ROWS it hardly matters where weights lie."""

    def __init__(self, threads: int) -> None:
        import openvino

        self.ov, self.core = openvino, openvino.Core()
        self.kept: list[np.ndarray] = []
        """Memory that constants only refer to, until they are compiled."""
        self.version = openvino.__version__.split("-")[0]
        self.properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
            "ENABLE_CPU_PINNING": "YES",
        }

    def settings(self, cell: Cell) -> Iterator[Setting]:
        properties = {
            **self.properties,
            "INFERENCE_PRECISION_HINT": "bf16" if cell.format == "bf16" else "f32",
        }
        if cell.format in {"f32", "bf16"}:
            yield self._compiled("graph", cell, properties)
            return
        for group in (GROUP, 128):
            hint = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group)}
            yield self._compiled(f"8-bit rows in groups of {group}", cell, {**properties, **hint})
        hint = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_PRECISION_HINT": "bf16"}
        yield self._compiled("weight only", cell, {**properties, **hint})

    def _compiled(self, name: str, cell: Cell, properties: dict[str, str]) -> Setting:
        ops = self.ov.opset13
        most = self.MANY_PRODUCTS if cell.m <= self.FEW_ROWS else self.FEW_PRODUCTS
        products = min(cell.copies, most)
        x, w = cell.x(), cell.weight().copy()
        rows = ops.parameter(list(x.shape), np.float32)
        results = []
        for number in range(products):
            w[-1, -1] += number  # as below
            results.append(ops.matmul(rows, self._weight(cell.format, w, number), False, True))
        compiled = self.core.compile_model(self.ov.Model(results, [rows]), "CPU", properties)
        self.kept.clear()
        request = compiled.create_infer_request()
        request.set_input_tensor(self.ov.Tensor(x))

        def row(_: Any) -> np.ndarray:
            first: np.ndarray = request.get_output_tensor(0).data[0].copy()
            return first

        return Setting(name, lambda _: request.infer(share_outputs=True), row, products)

    def _weight(self, format: str, w: np.ndarray, number: int) -> Any:
        ops, ov = self.ov.opset13, self.ov
        if format in {"f32", "bf16"}:
            return ops.constant(w)
        if format == "int8":
            q, scales = eight_bits(*w.shape)
            q = q.copy()
            q[-1, -1] = number % 127  # equal weights would be merged
            return ops.multiply(ops.convert(ops.constant(q), np.float32), ops.constant(scales))
        q, scales = four_bits(w)
        shape = [w.shape[0], w.shape[1] // GROUP, GROUP]
        pairs = q.reshape(-1, 2)
        nibbles = pairs[:, 0] | pairs[:, 1] << 4
        self.kept.append(nibbles)
        centred = ops.subtract(
            ops.convert(ops.constant(ov.Tensor(nibbles, shape, ov.Type.u4)), np.float32),
            ops.convert(ops.constant(np.full((1, 1, 1), 8, np.uint8)), np.float32),
        )
        scaled = ops.multiply(centred, ops.constant(scales[..., None]))
        return ops.reshape(scaled, ops.constant(np.array(w.shape, np.int64)), False)


class Ggml:
    """llama.cpp's kernels, out of the libraries of llama-cpp-python: one graph with a product a weight."""

    formats = ("f32", "bf16", "int8", "int4", "int4m")
    TYPES = (("f32", 0), ("bf16", 30), ("int8", 8), ("int4", 2), ("int4m", 3))
    """ggml's own: F32, BF16, Q8_0, Q4_0, Q4_1."""

    def __init__(self, threads: int) -> None:
        import llama_cpp

        self.version = f"of llama-cpp-python {llama_cpp.__version__}"
        folder = Path(llama_cpp.__file__).parent / "lib"
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
        at, size = _address(row), ctypes.c_size_t(row.nbytes)
        get = self.ggml.base.ggml_backend_tensor_get
        get(self.results[0], at, ctypes.c_size_t(0), size)
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
        self.ggml.base.ggml_backend_tensor_set(tensor, _address(values), offset, size)

    def _quantised(self, kind: int, w: np.ndarray) -> np.ndarray:
        base, (n, k) = self.ggml.base, w.shape
        row_bytes = self.ggml._call(
            base, "ggml_row_size", ctypes.c_size_t, ctypes.c_int(kind), ctypes.c_int64(k)
        )
        rows = np.empty(n * row_bytes, dtype=np.uint8)
        sizes = ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k)
        base.ggml_quantize_chunk(ctypes.c_int(kind), _address(w), _address(rows), *sizes, None)
        return rows


class Tvm:
    """TVM: what MetaSchedule found for a product, from the folder that PHASEWISE_TVM_RECORDS names."""

    formats = ("f32",)

    def __init__(self, threads: int) -> None:
        import tvm

        records = os.environ.get("PHASEWISE_TVM_RECORDS")
        if records is None:
            raise ImportError("PHASEWISE_TVM_RECORDS names no folder of tuning records")
        self.tvm, self.records, self.version = tvm, Path(records), tvm.__version__
        self.target = tvm_target(threads)

    def settings(self, cell: Cell) -> Iterator[Setting]:
        from tvm.s_tir.meta_schedule.database import JSONDatabase

        files = (str(self.records / f"database_{name}.json") for name in ("workload", "tuning_record"))
        database = JSONDatabase(*files, allow_missing=False)
        product = self.tvm.IRModule({"main": tvm_product(cell.m, cell.n, cell.k)})
        schedule = database.query_schedule(product, self.target, "main")
        if schedule is None:
            raise LookupError("not among the tuning records")
        multiply = self.tvm.compile(schedule.mod, target=self.target)["main"]
        x, y = (self.tvm.runtime.tensor(a) for a in (cell.x(), np.zeros((cell.m, cell.n), np.float32)))
        columns = np.ascontiguousarray(cell.weight().T)
        packed = [self.tvm.runtime.tensor(columns) for _ in range(cell.copies)]
        yield Setting("MetaSchedule", lambda i: multiply(x, packed[i], y), lambda _: y.numpy()[0])


def tvm_product(m: int, n: int, k: int) -> Any:
    """y[m, n] = x[m, k] W[k, n] in float32, as TVM is told it."""
    from tvm import te

    x, w = te.placeholder((m, k), "float32", "x"), te.placeholder((k, n), "float32", "w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute((m, n), lambda i, j: te.sum(x[i, r] * w[r, j], axis=r), name="y")
    return te.create_prim_func([x, w, y]).with_attr("global_symbol", "main").with_attr("tirx.noalias", True)


def tvm_target(threads: int) -> Any:
    import tvm

    cpu = tvm.target.codegen.llvm_get_system_cpu()
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": threads})


PEERS: dict[str, Callable[[int], Any]] = {
    "torch": Torch,
    "mkl": Mkl,
    "openblas": OpenBlas,
    "openvino": OpenVino,
    "ggml": Ggml,
    "tvm": Tvm,
}


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, as uint16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@functools.lru_cache(maxsize=1)
def eight_bits(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the random weight, kept for the next cell: q int8 [n, k], scales float32 [n, 1], w = q * scale."""
    w = random_weight(n, k)
    scales = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(w / scales).astype(np.int8), scales


def four_bits(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q uint8 [n, k] of 0..15 and scales float32 [n, k / 32], w = (q - 8) * scale."""
    groups = w.reshape(w.shape[0], -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(7)
    return (np.rint(groups / scales[..., None]) + 8).astype(np.uint8).reshape(w.shape), scales


def pin_threads(threads: int) -> None:
    """One core each for the threads that this process has by now, where the library does not do it."""
    cores = sorted(os.sched_getaffinity(0))
    others = [int(name) for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    if len(cores) == threads and len(others) == threads - 1:
        for core, thread in zip(cores, [os.getpid(), *others], strict=True):
            os.sched_setaffinity(thread, {core})


class Bench:
    """The cell that is being timed, by the fastest of the peer's settings."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def prepare(self, cell: Cell) -> dict[str, Any]:
        self.best: Setting | None = None
        gc.collect()
        self.cell, self.next = cell, 0
        best_ns = float("inf")
        for setting in self.peer.settings(cell):
            ns = self._trial(setting)
            if ns < best_ns:
                self.best, best_ns = setting, ns
        assert self.best is not None
        return {"setting": self.best.name, "ns": round(best_ns), "error": self._error(self.best)}

    def time(self, calls: int) -> dict[str, Any]:
        assert self.best is not None
        runs = max(1, round(calls / self.best.products))
        return {"ns": self._run(self.best, runs), "products": runs * self.best.products}

    def _trial(self, setting: Setting) -> float:
        """Nanoseconds a product: every weight touched once, then the best of a few short timings."""
        first_runs = -(-self.cell.copies // setting.products)
        once_ns = self._run(setting, first_runs)
        trials = TRIALS if once_ns < LONG_NS * first_runs * setting.products else 1
        runs = max(1, round(TRIAL_NS * self.cell.copies / once_ns / setting.products))
        return min(self._run(setting, runs) for _ in range(trials)) / (runs * setting.products)

    def _run(self, setting: Setting, runs: int) -> int:
        copies, run = self.cell.copies, setting.run
        numbers = [(self.next + i) % copies for i in range(runs)]
        self.next = (self.next + runs) % copies
        started_ns = time.perf_counter_ns()
        for number in numbers:
            run(number)
        return time.perf_counter_ns() - started_ns

    def _error(self, setting: Setting) -> float:
        expected = self.cell.x()[0] @ self.cell.weight().T
        found = setting.row(setting.run(0))
        return float(np.abs(found - expected).max() / np.abs(expected).max())


def answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """What the peer does not do is part of the answer, whatever its library raises."""
    try:
        return bench.time(request["calls"]) if "calls" in request else bench.prepare(Cell(**request))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    name, cores = sys.argv[1], [int(core) for core in sys.argv[2].split(",")]
    os.sched_setaffinity(0, cores)
    try:
        peer = PEERS[name](len(cores))
    except (ImportError, OSError) as error:
        print(json.dumps({"absent": str(error)}), flush=True)
        return
    print(json.dumps({"peer": name, "version": peer.version, "formats": peer.formats}), flush=True)
    bench = Bench(peer)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(answer(bench, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

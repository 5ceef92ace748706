"""TVM's matrix products."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Cell, Setting


class Tvm:
    """TVM: what MetaSchedule found for a product, from the folder that PHASEWISE_TVM_RECORDS names."""

    formats = ("f32",)

    def __init__(self, threads: int) -> None:
        tvm = import_module("tvm")
        records = os.environ.get("PHASEWISE_TVM_RECORDS")
        if records is None:
            raise ImportError("PHASEWISE_TVM_RECORDS names no folder of tuning records")
        self.tvm, self.records, self.version = tvm, Path(records), tvm.__version__
        self.target = tvm_target(threads)

    def settings(self, cell: Cell) -> Iterator[Setting]:
        database_module = import_module("tvm.s_tir.meta_schedule.database")
        files = (str(self.records / f"database_{name}.json") for name in ("workload", "tuning_record"))
        database = database_module.JSONDatabase(*files, allow_missing=False)
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
    te = import_module("tvm.te")
    x, w = te.placeholder((m, k), "float32", "x"), te.placeholder((k, n), "float32", "w")
    r = te.reduce_axis((0, k), name="r")
    y = te.compute((m, n), lambda i, j: te.sum(x[i, r] * w[r, j], axis=r), name="y")
    return te.create_prim_func([x, w, y]).with_attr("global_symbol", "main").with_attr("tirx.noalias", True)


def tvm_target(threads: int) -> Any:
    tvm = import_module("tvm")
    cpu = tvm.target.codegen.llvm_get_system_cpu()
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": threads})

"""OpenVINO's matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from .cells import GROUP, Cell, Setting, eight_bits, four_bits


class OpenVino:
    """OpenVINO: one graph multiplies x with every weight, so that its own cost of a call is shared out."""

    formats = ("f32", "bf16", "int8", "int4")
    MANY_PRODUCTS, FEW_PRODUCTS, FEW_ROWS = 64, 8, 32
    """In a graph, which is long compiled; with more than FEW_ROWS it hardly matters where weights lie."""

    def __init__(self, threads: int) -> None:
        openvino = self.ov = import_module("openvino")
        self.core = openvino.Core()
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

"""PyTorch's matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from .cells import GROUP, Cell, Setting, four_bits


class Torch:
    """PyTorch: oneDNN and MKL over weights reordered for the batch size, FBGEMM, and its own int4 kernels."""

    formats = ("f32", "bf16", "int8", "int4")

    def __init__(self, threads: int) -> None:
        torch = self.torch = import_module("torch")
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

"""A layer in a program: its tensors by their names, and products that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Linears, Parts, Place, Rows
from phasewise.serving.models.parts.part import Product, Vector


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows as products read them: as they are, or behind a norm."""

    source: Place
    norm: Vector | None = None
    eps: float = 0.0

    def options(self, factor: float = 1.0) -> dict[str, Any]:
        """Options of a product, whose outputs are multiplied by `factor` where there is a norm."""
        if self.norm is None:
            return {"source": "rows"}
        weights = self.norm if factor == 1 else self.norm * np.float32(factor)
        return {"source": "norm", "norm": weights, "eps": self.eps}


@dataclass(frozen=True, slots=True)
class Site:
    """One layer of a model, or what is outside of layers. stem: "layers.3.", or nothing."""

    linears: Linears
    weights: Mapping[str, PackedWeight]
    vectors: Mapping[str, Vector]
    stem: str = ""

    @property
    def program(self) -> Program:
        return self.linears.program

    def vector(self, part: str) -> Vector | None:
        return self.vectors.get(self.stem + part)

    def needed(self, part: str) -> Vector:
        """A vector that the layer's parts call for."""
        return self.vectors[self.stem + part]

    def weight(self, part: str) -> PackedWeight:
        try:
            return self.weights[self.stem + part]
        except KeyError:
            raise ModelError(f"the model has no weight {self.stem + part!r}") from None

    def parts(self, product: Product, column: int = 0) -> Parts:
        """The product's weights and their columns, fused or not."""
        fused = self.weights.get(self.stem + product.name)
        if fused is not None:
            return [(fused, column)]
        return [(self.weight(part), first) for part, first in product.columns(column)]

    def add(
        self,
        product: Product,
        reading: ReadRows,
        target: Place,
        column: int = 0,
        factor: float = 1.0,
        rows: Rows = "every",
    ) -> None:
        """A product, to columns of `target` from one on."""
        reads, reader = reading.options(factor), self.stem + product.reader
        self.linears.add(self.parts(product, column), reads, reading.source, target, reader, rows=rows)

"""A layer in a program: its tensors by their names, and products that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Linears, Parts, Place, Rows
from phasewise.serving.models.parts.part import Product

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel, Vector


@dataclass(frozen=True, slots=True)
class Reading:
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
    """One layer of a model. name: "layers.3"."""

    linears: Linears
    model: PackedModel
    name: str

    @property
    def program(self) -> Program:
        return self.linears.program

    def vector(self, part: str) -> Vector | None:
        return self.model.vectors.get(f"{self.name}.{part}")

    def weight(self, part: str) -> PackedWeight:
        name = f"{self.name}.{part}"
        try:
            return self.model.weights[name]
        except KeyError:
            raise ModelError(f"{self.model.name} has no weight {name!r}") from None

    def parts(self, product: Product, column: int = 0) -> Parts:
        """The product's weights and their columns, fused or not."""
        fused = self.model.weights.get(f"{self.name}.{product.name}")
        if fused is not None:
            return [(fused, column)]
        return [(self.weight(part), first) for part, first in product.columns(column)]

    def add(
        self,
        product: Product,
        reading: Reading,
        target: Place,
        column: int = 0,
        factor: float = 1.0,
        rows: Rows = "every",
    ) -> None:
        """A product, to columns of `target` from one on."""
        reads, reader = reading.options(factor), f"{self.name}.{product.reader}"
        self.linears.add(self.parts(product, column), reads, reading.source, target, reader, rows=rows)

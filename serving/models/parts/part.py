"""The tensors that a part of a layer calls for, and the way in which they are packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Product:
    """Weights of a layer that read the same rows, packed one below the other where their forms agree."""

    name: str
    inputs: int
    outputs: Mapping[str, int]
    """Rows of each weight, by our names, in their order."""
    reader: str = ""
    """The name that adapters have for the product; "": none changes it."""
    is_stack: bool = False
    """True if the weights must be one: those of experts, one below the other."""
    is_native: bool = False
    """True if the weights keep the file's format."""

    @classmethod
    def alone(cls, name: str, outputs: int, inputs: int, reader: str = "") -> Product:
        """The product of one weight."""
        return cls(name, inputs, {name: outputs}, reader)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Every weight, as (outputs, inputs)."""
        return {part: (rows, self.inputs) for part, rows in self.outputs.items()}

    def columns(self, first: int = 0) -> Iterator[tuple[str, int]]:
        """Every weight with the column at which its outputs begin."""
        for part, rows in self.outputs.items():
            yield part, first
            first += rows


class LayerPart(ABC):
    """A part of a layer."""

    @property
    @abstractmethod
    def products(self) -> tuple[Product, ...]:
        """In the order in which a pass reads their weights."""

    @property
    @abstractmethod
    def vectors(self) -> Mapping[str, int]:
        """Lengths of vectors by our names, before they are joined."""

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Vectors that are packed one behind the other, by the name of the whole."""
        return {}

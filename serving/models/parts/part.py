"""The tensors that a part of a layer calls for, and the way in which they are packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from phasewise.serving.errors import ModelError

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


@dataclass(frozen=True)
class ProductFactors:
    """One factor for the outputs of each product of a layer; 1 changes nothing.

    No weight is multiplied by them: products of the stream read a norm that is, convolutions have taps that
    are, and what is read of a state is multiplied on its way back.
    """

    qkv: float = 1.0
    state_gate: float = 1.0
    state_values: float = 1.0
    state_keys: float = 1.0
    state_queries: float = 1.0
    state_times: float = 1.0
    state_out: float = 1.0
    gate: float = 1.0
    up: float = 1.0

    def check(self) -> None:
        """ModelError unless all are numbers that kernels can take."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 1e-6 <= value <= 1e6:
                raise ModelError(
                    f"the product {field.name} is multiplied by {value!r:.80}: a number from 1e-6 to 1e6"
                    " expected"
                )


NO_FACTORS = ProductFactors()

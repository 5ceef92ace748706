"""A layer in a program: places of its rows, tensors by their names, products that read them, and the
part that mixes the tokens of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Linears, Parts, Place, Rows

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
    are, and what is read of a state is multiplied on its way back."""

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


Entry = TypeVar("Entry", Place, int)


@dataclass(frozen=True, slots=True)
class MixingRows(Generic[Entry]):
    """An entry for each kind of rows: their place, or the numbers in each of them; 0 where a part needs
    none."""

    products: Entry
    """Products of the stream."""
    own: Entry
    """Rows of the convolution, gates of attention, or queries where those are a product of products."""
    gates: Entry
    """Gates, or queries as they meet vectors and later values."""
    mixed: Entry
    """The numbers that are read of positions, of a state or of vectors."""


@dataclass(frozen=True, slots=True)
class ActivationArena:
    """Places of rows, in floats. Mixers and feed-forward layers take turns in one of them."""

    hidden: Place
    """The stream."""
    mixing: MixingRows[Place]
    gate_up: Place
    given: Place
    """The output of experts: of each row, a row for each of its experts."""
    router: Place
    normed: Place
    """Rows of the stream behind a LayerNorm."""
    branch: Place
    """The output of a half of a layer, where it is normalised before it is added."""
    summed: Place
    """The sum of what experts gave, where it is normalised before it is added."""
    inputs: Place
    """Inputs of all layers."""
    aside: Place
    """Rows that go round attention."""
    streams: Place
    last_streams: Place
    """Streams behind the last layer, of rows that want logits."""
    merged: Place
    """Their products, but the first one's."""
    tail: Place
    """Hidden rows of the last layer that want logits, and its feed-forward rows (in place of `gate_up`)."""
    logits: Place
    fed: Place
    """Rows for a head that drafts."""
    taken: Place
    """The rows that such a head reads."""
    embedded: Place
    """Embeddings of its tokens."""


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


class Mixer(LayerPart):
    """A part that reads other positions."""

    takes_no_adapters: ClassVar[str] = ""
    """Why no adapter can be added to its products; "": one can."""

    @property
    @abstractmethod
    def back(self) -> Product:
        """The product that leads back to the stream."""

    @property
    @abstractmethod
    def widths(self) -> MixingRows[int]: ...

    @abstractmethod
    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        """Adds the operations; the place of the rows that `back` reads.

        kept_as: the layer whose place keys and values have. rows: those that are wanted behind it."""

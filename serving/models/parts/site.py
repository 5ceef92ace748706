"""Interfaces between a layer's parts and a program: products, places of rows, tensors by name, and mixers,
which mix the tokens of a sequence."""

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
from phasewise.serving.models.fields import check_factor
from phasewise.serving.models.linears import Linears, Parts, Place, Rows

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Product:
    """Weights of a layer that read the same rows, packed one below the other where their forms agree."""

    name: str
    inputs: int
    outputs: Mapping[str, int]
    """Output rows of each weight by our names, in packed order."""
    reader: str = ""
    """The name that adapters have for the product; "": no adapter changes it."""
    is_stack: bool = False
    """True if the weights must be packed as one, as those of experts are."""
    is_native: bool = False
    """True if the weights keep the file's format."""

    @classmethod
    def alone(cls, name: str, outputs: int, inputs: int, reader: str = "") -> Product:
        """The product of one weight."""
        return cls(name, inputs, {name: outputs}, reader)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape (outputs, inputs) of every weight."""
        return {part: (rows, self.inputs) for part, rows in self.outputs.items()}

    def columns(self, first: int = 0) -> Iterator[tuple[str, int]]:
        """Every weight with the column at which its outputs begin."""
        for part, rows in self.outputs.items():
            yield part, first
            first += rows


class LayerPart(ABC):
    """A part of a layer: a mixer, a feed-forward layer, a mixture of experts, streams or layer inputs."""

    @property
    @abstractmethod
    def products(self) -> tuple[Product, ...]:
        """The part's products, in the order in which a forward pass reads their weights."""

    @property
    @abstractmethod
    def vectors(self) -> Mapping[str, int]:
        """Lengths of the part's vectors by our names, before any are joined."""

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """Names of vectors that are packed as one, by the name of the whole."""
        return {}


@dataclass(frozen=True)
class ProductFactors:
    """One factor for the outputs of each product of a layer; 1 changes nothing. No weight is multiplied by a
    factor: the norm that a product of the stream reads is, or the taps of a convolution, or what is read of a
    state on its way back."""

    qkv: float = 1.0
    state_gate: float = 1.0
    state_values: float = 1.0
    state_keys: float = 1.0
    state_queries: float = 1.0
    state_times: float = 1.0
    state_out: float = 1.0
    gate: float = 1.0
    up: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_factor(f"the factor of the product {field.name}", getattr(self, field.name))


NO_FACTORS = ProductFactors()


Entry = TypeVar("Entry", Place, int)


@dataclass(frozen=True, slots=True)
class MixingRows(Generic[Entry]):
    """An entry for each kind of a mixer's rows: their place, or the numbers of one row; 0: no such rows."""

    products: Entry
    """Products of the stream."""
    own: Entry
    """Rows of the convolution, gates of attention, or queries of two products one behind the other."""
    gates: Entry
    """Gates of a state; of latent attention absorbed queries, and later values."""
    mixed: Entry
    """Results of a mixer, as read of positions, of a state or of latent vectors."""


@dataclass(frozen=True, slots=True)
class ActivationArena:
    """Places of a step's rows, in floats. Rows of mixers and of feed-forward layers share one region."""

    hidden: Place
    """The residual stream."""
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
    """The sum of the experts' outputs, where it is normalised or multiplied before it is added; before that
    the products which such experts read."""
    inputs: Place
    """Layer inputs, which layers read beside the stream, of all layers."""
    aside: Place
    """Rows of the low-rank way round attention (LAuReL)."""
    streams: Place
    last_streams: Place
    """Streams behind the last layer, of rows that want logits."""
    merged: Place
    """Products of `last_streams`, of all streams but the first."""
    tail: Place
    """Hidden rows of the last layer that want logits, and its feed-forward rows (in place of `gate_up`)."""
    logits: Place
    fed: Place
    """Rows that a draft head will read."""
    taken: Place
    """The served model's rows, as a draft head reads them."""
    embedded: Place
    """Embeddings of a draft head's tokens."""


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
    """The place in a program of one layer of a model, or of what is outside layers. `stem`: the beginning of
    the layer's names, "layers.3."; "" outside layers."""

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
        """The vector of this name, which must be there."""
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
        """Add a product, whose outputs begin at `column` of `target`."""
        reads, reader = reading.options(factor), self.stem + product.reader
        self.linears.add(self.parts(product, column), reads, reading.source, target, reader, rows=rows)


class Mixer(LayerPart):
    """A part of a layer that reads other positions."""

    takes_no_adapters: ClassVar[str] = ""
    """The clause of an error that says why the mixer's products take no adapters; "": they take adapters."""

    @property
    @abstractmethod
    def back(self) -> Product:
        """The product that leads back to the stream."""

    @property
    @abstractmethod
    def widths(self) -> MixingRows[int]: ...

    @abstractmethod
    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        """Add the mixer's operations; returns the place of the rows that `back` reads. `kept_as`: index of
        the layer whose keys and values are used. `rows`: the rows that are wanted behind the mixer."""

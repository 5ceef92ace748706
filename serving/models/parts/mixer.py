"""What mixes the tokens of a sequence: the part of a layer that leads from the stream to rows for `o`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.part import Part, Product
from phasewise.serving.models.parts.site import Reading, Site

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


class Mixer(Part):
    """A part that reads other positions."""

    @property
    @abstractmethod
    def back(self) -> Product:
        """The product that leads back to the stream."""

    @property
    @abstractmethod
    def widths(self) -> MixingRows[int]: ...

    @abstractmethod
    def add(self, site: Site, reading: Reading, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        """Adds the operations; the place of the rows that `back` reads.

        kept_as: the layer whose place keys and values have. rows: those that are wanted behind it.
        """

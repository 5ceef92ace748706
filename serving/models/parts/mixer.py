"""The part of a layer that mixes the tokens of a sequence: from the stream to rows for `o`."""

from __future__ import annotations

from abc import abstractmethod

from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.part import LayerPart, Product
from phasewise.serving.models.parts.rows import MixingRows
from phasewise.serving.models.parts.site import ReadRows, Site


class Mixer(LayerPart):
    """A part that reads other positions."""

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

        kept_as: the layer whose place keys and values have. rows: those that are wanted behind it.
        """

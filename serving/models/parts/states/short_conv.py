"""gate * conv(factor * x), x, factor and gate being products of the stream (LFM 2)."""

from __future__ import annotations

from phasewise.serving.models.linears import Place, Rows
from phasewise.serving.models.parts.part import Product
from phasewise.serving.models.parts.rows import MixingRows
from phasewise.serving.models.parts.site import ReadRows, Site
from phasewise.serving.models.parts.states.recurrence import Convolving


class ShortConv(Convolving):
    """A layer of StateLayers.kind "short_conv"."""

    @property
    def into(self) -> tuple[Product, ...]:
        return (Product.alone("state_in", 3 * self.hidden, self.hidden),)

    @property
    def back(self) -> Product:
        return Product.alone("o", self.hidden, self.hidden, reader="o")

    @property
    def widths(self) -> MixingRows[int]:
        return MixingRows(3 * self.hidden, 0, 0, self.hidden)

    def add(self, site: Site, reads: ReadRows, places: MixingRows[Place], kept_as: int, rows: Rows) -> Place:
        self.add_into(site, reads, places.products)
        site.program.convolve(self.taps(site), *places.products, *places.mixed, gates_rows=True)
        return places.mixed
